"""What is not exactly one of torch.nn's own layers is refused by every rule, with a sentence: never left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import regraft as rg
from helpers import picture, randomise

CORE = (rg.MergeLinears, rg.FuseBiasInLinear, rg.FoldBatchNorm, rg.FuseBatchNorm1dInLinear)
CORE += (rg.FuseBatchNorm2dInConv2d, rg.MergeConvs, rg.FusePad, rg.FoldScale, rg.PrepackForCpu, rg.ReducePrecision)


class Net(nn.Module):
    """A site for every rule that rewrites layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.a, self.b = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
        self.norm, self.act, self.drop = nn.BatchNorm2d(3), nn.SiLU(), nn.Dropout()
        self.q, self.k, self.norm1 = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.act(self.norm(self.pad(nn.functional.pad(x, (1, 1, 1, 1)))))
        z = self.drop(y.mean((2, 3)))
        return self.norm1(self.q(z)), self.k(z) * 0.5, self.a(x) + self.b(x)


class Tracer(torch.fx.Tracer):
    """Layers stay layers, whatever they have become."""

    def is_leaf_module(self, m, name):
        return parametrize.is_parametrized(m) or not list(m.children())


class Quantised(torch.Tensor):
    """A tensor subclass, as torchao puts into plain layers."""


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def with_forward(layer: nn.Module) -> None:
    kind = type(layer)
    layer.__class__ = type(f"Own{kind.__name__}", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


def without_forward(layer: nn.Module) -> None:
    layer.__class__ = type(f"My{type(layer).__name__}", (type(layer),), {})


def quantised(layer: nn.Module) -> None:
    layer.register_parameter("weight", nn.Parameter(layer.weight.detach().as_subclass(Quantised)))


KINDS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "parametrized": (lambda layer: parametrize.register_parametrization(layer, "weight", Halved()), "parametrized"),
    "weight norm": (parametrizations.weight_norm, "and so parametrized"),
    "spectral norm": (parametrizations.spectral_norm, "and so parametrized"),
    "old weight norm": (weight_norm, "weight is computed by pruning or weight norm"),
    "old spectral norm": (spectral_norm, "weight is computed by pruning or weight norm"),
    "pruned": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "is computed by pruning"),
    "a forward": (with_forward, "whose forward is its own and not that of"),
    "a subclass": (without_forward, "only torch.nn's own classes"),
    "quantised": (quantised, "weight is a Quantised, not an ordinary tensor"),
    "a hook": (lambda layer: layer.register_forward_hook(lambda *_: None), "has hooks"),
}


def made(kind: str) -> torch.fx.GraphModule:
    model = randomise(Net()).eval()
    for name in ("pad", "a", "b", "q", "k"):
        KINDS[kind][0](model.get_submodule(name))
    return torch.fx.GraphModule(model, Tracer().trace(model))


@pytest.mark.parametrize("rule", CORE, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_of_another_kind_are_refused_with_a_sentence(kind: str, rule: type[rg.Rewrite]) -> None:
    gm = made(kind)
    before = picture(gm)
    report = rule().explain(gm)
    assert not report.applied, str(report)
    sites = {row[2] for row in report.rows()} - {"output"}
    rows = [row for row in report.rows() if KINDS[kind][1] in row[3]]
    assert rows, str(report)
    wanted = {
        rg.MergeLinears: {"q", "k"},
        rg.MergeConvs: {"a", "b"},
        rg.FuseBiasInLinear: {"q", "k"},
        rg.FoldBatchNorm: {"norm", "norm1"},
        rg.FuseBatchNorm1dInLinear: {"norm1"},
        rg.FuseBatchNorm2dInConv2d: {"norm"},
        rg.FusePad: {"pad"},
        rg.FoldScale: {"mul"},
        rg.PrepackForCpu: {"pad", "a", "b", "q", "k"},
        rg.ReducePrecision: {"pad", "a", "b", "q", "k"},
    }[rule]
    assert wanted <= sites or {" + ".join(sorted(wanted, key=list("abqk").index))} == sites, str(report)
    rule()(gm)
    assert [row for row in rg.Report("", rg.history(gm)).rows() if row[1] == "refused"] == report.rows()
    assert picture(gm) == before


@pytest.mark.parametrize("change", [with_forward, without_forward])
@pytest.mark.parametrize(
    ("rule", "layer"),
    [
        (rg.FoldBatchNorm, "norm"),
        (rg.FoldBatchNorm, "norm1"),
        (rg.FuseBatchNorm1dInLinear, "norm1"),
        (rg.FuseBatchNorm2dInConv2d, "norm"),
        (rg.RemoveDeadWork, "drop"),
        (rg.ReplaceActivation, "act"),
        (rg.ReducePrecision, "act"),
    ],
)
def test_so_are_norms_activations_and_dropout(rule, layer: str, change) -> None:
    model = randomise(Net()).eval()
    change(model.get_submodule(layer))
    gm = torch.fx.GraphModule(model, Tracer().trace(model))
    rows = {row[2]: row for row in rule().explain(gm).rows()}
    assert rows[layer][1] == "refused"
    assert f"{layer} is a {type(gm.get_submodule(layer)).__name__}" in rows[layer][3]


@pytest.mark.parametrize(
    ("rule", "parts", "site"),
    [
        (rg.MergeLinears, {"a": nn.LazyLinear(4), "b": nn.Linear(4, 4)}, "a"),
        (rg.FuseBiasInLinear, {"a": nn.LazyLinear(4), "b": nn.Linear(4, 4)}, "a"),
        (rg.MergeConvs, {"a": nn.LazyConv2d(4, 1), "b": nn.Conv2d(4, 4, 1)}, "a"),
        (rg.PrepackForCpu, {"a": nn.LazyConv2d(4, 1), "b": nn.Conv2d(4, 4, 1)}, "a"),
    ],
)
def test_lazy_layers_are_to_be_run_once(rule, parts, site) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = parts["a"], parts["b"]

        def forward(self, x):
            return self.a(x), self.b(x)

    rows = {row[2]: row for row in rule().explain(torch.fx.symbolic_trace(Two().eval())).rows()}
    assert "whose weights are not made yet; run the model once" in rows[site][3]


@pytest.mark.parametrize("norm", [nn.LazyBatchNorm2d(), nn.SyncBatchNorm(4)], ids=lambda norm: type(norm).__name__)
def test_a_lazy_or_synchronised_batch_norm_has_a_row(norm: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), norm).eval()
    lazy = isinstance(norm, nn.LazyBatchNorm2d)
    rules = [rg.FoldBatchNorm(), *([rg.FuseBatchNorm2dInConv2d()] if lazy else [])]
    for rule in rules:
        (row,) = rule.explain(torch.fx.symbolic_trace(net)).rows()
        assert row[1:3] == ("refused", "1")
        assert f"1 is a {type(norm).__name__}" in row[3]


def test_what_another_rewrite_has_made_says_so() -> None:
    gm = rg.PrepackForCpu()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)).eval()))
    (row,) = rg.FuseBiasInLinear().explain(gm).rows()
    assert row[3] == "0 is a PackedLinear, which PrepackForCpu has made; apply that one last"


def test_a_parametrized_weight_is_not_computed_to_say_so() -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight

    gm = made("a subclass")
    parametrize.register_parametrization(gm.q, "weight", Counted())
    calls.clear()
    for rule in CORE:
        rule().explain(gm)
    assert not calls

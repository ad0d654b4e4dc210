"""Siblings that do not all fit together: those that do are merged, and each other one is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import regraft as rg
from helpers import Wrap, check_applied, picture, randomise

MAKES: dict[type[rg.Rewrite], Callable[[], nn.Module]] = {
    rg.MergeLinears: lambda: nn.Linear(4, 4),
    rg.MergeConvs: lambda: nn.Conv2d(4, 4, 1),
}
X = {rg.MergeLinears: (torch.randn(2, 3, 4),), rg.MergeConvs: (torch.randn(2, 4, 3, 5),)}
RULES = pytest.mark.parametrize("rule", MAKES, ids=lambda rule: rule.__name__)


def of(rule: type[rg.Rewrite], names: str, function: Callable | None = None) -> nn.Module:
    each = function or (lambda m, x: tuple(getattr(m, name)(x) for name in names))
    return randomise(Wrap(each, **{name: MAKES[rule]() for name in names})).eval()


def rows(gm: torch.fx.GraphModule) -> list[tuple[str, str, str]]:
    step = rg.history(gm)[-1]
    return [("merged", site.where, site.sentence) for site in step.applied] + [
        ("refused", refusal.where, refusal.reason) for refusal in step.refused
    ]


ODD: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "hooked": (lambda m: m.b.register_forward_hook(lambda module, args, out: out + 1), "b has hooks"),
    "frozen": (lambda m: m.b.requires_grad_(False), "b.weight is frozen and a.weight is trainable"),
    "frozen bias": (lambda m: m.b.bias.requires_grad_(False), "b.bias is frozen and b.weight is trainable"),
    "training": (lambda m: m.b.train(), "some of the layers are in training mode and some are not"),
    "parametrized": (lambda m: parametrizations.weight_norm(m.b), "b is a Parametrized"),
    "forward on the instance": (lambda m: setattr(m.b, "forward", lambda x: x), "b has a forward of its own"),
}


@RULES
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("names", ["abc", "bac", "acb"])
def test_the_others_are_merged(rule: type[rg.Rewrite], odd: str, names: str) -> None:
    model = of(rule, names)
    ODD[odd][0](model)
    gm = torch.fx.symbolic_trace(model)
    expected, before = gm(*X[rule]), picture(gm)
    report = rule().explain(gm)
    rule()(gm)
    assert report.rows() == rg.Report("", rg.history(gm)).rows()
    (merged, refused) = rows(gm)
    assert merged == ("merged", "a + c", "merged a + c")
    assert refused[:2] == ("refused", "b")
    assert ODD[odd][1].replace("a.", f"{names.replace('b', '')[0]}.") in refused[2]
    for value, wanted in zip(gm(*X[rule]), expected, strict=True):
        torch.testing.assert_close(value, wanted)
    once = picture(gm)
    rule()(gm)
    assert not rg.history(gm)[-1].applied
    rg.undo(gm)
    assert picture(gm) == once
    rg.undo(gm)
    assert picture(gm) == before


@RULES
def test_a_dtype_or_a_tie_apart(rule: type[rg.Rewrite]) -> None:
    model = of(rule, "abc")
    model.b.double()
    gm = rule()(torch.fx.symbolic_trace(model))
    assert rows(gm)[1][2] == "a.weight is float32 and b.weight is float64; convert the model to one dtype"
    model = of(rule, "abcd", lambda m, x: (m.a(x), m.b(x), m.c(x), m.d(x.relu())))
    model.d.weight = model.b.weight
    gm = check_applied(rule(), model, X[rule])
    assert rows(gm) == [
        ("merged", "a + c", "merged a + c"),
        ("refused", "b", "b.weight is tied to d.weight; untie them, or leave b as it is"),
    ]


@RULES
@pytest.mark.parametrize("frozen", ["bd", "ab", "ad", "ac"])
def test_frozen_and_trainable_make_two_groups(rule: type[rg.Rewrite], frozen: str) -> None:
    model = of(rule, "abcd")
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    gm = check_applied(rule(), model, X[rule], sites=2)
    trained = "".join(sorted(set("abcd") - set(frozen)))
    assert {site.sentence for site in rg.history(gm)[-1].applied} == {
        f"merged {' + '.join(group)}" for group in (frozen, trained)
    }
    assert {name: p.requires_grad for name, p in gm.named_parameters()} == {
        f"{'_'.join(group)}.{leaf}": group == trained for group in (frozen, trained) for leaf in ("weight", "bias")
    }


def written(names: str) -> Callable:
    """A forward that writes the layers' input, between the first two of them and the others."""

    def forward(m, x):
        y = x * 1
        first = [getattr(m, name)(y) for name in names[:2]]
        y.add_(1)
        return *first, *(getattr(m, name)(y) for name in names[2:])

    return forward


@RULES
def test_a_write_in_between_makes_two_groups(rule: type[rg.Rewrite]) -> None:
    gm = check_applied(rule(), of(rule, "abcd", written("abcd")), X[rule], sites=2)
    assert [site.sentence for site in rg.history(gm)[-1].applied] == ["merged a + b", "merged c + d"]


@RULES
def test_one_alone_behind_the_write(rule: type[rg.Rewrite]) -> None:
    gm = check_applied(rule(), of(rule, "abc", written("abc")), X[rule])
    assert rows(gm)[1] == ("refused", "c", "node 'add_' changes 'mul' in place between 'a' and 'c'")


@RULES
def test_where_no_two_fit_all_of_them_are_one_refusal(rule: type[rg.Rewrite]) -> None:
    model = of(rule, "abc")
    model.a.register_forward_hook(lambda *_: None)
    model.b.requires_grad_(False)
    gm = rule()(torch.fx.symbolic_trace(model))
    ((outcome, where, sentence),) = rows(gm)
    assert (outcome, where) == ("refused", "a + b + c")
    assert "a has hooks" in sentence
    assert ";;" not in sentence.replace(" ", "")  # b, which the others are compared with, has nothing to say
    assert "b.weight is frozen and c.weight is trainable" in sentence
    model.b.train()
    model.c.bias.requires_grad_(False)
    ((_, _, sentence),) = rows(rule()(torch.fx.symbolic_trace(model)))
    assert "c.bias is frozen" in sentence


def test_matrices_of_another_width_are_no_siblings() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x), self.b(x), self.c(x)

    gm = rg.MergeLinears()(torch.fx.symbolic_trace(Wrong()))
    assert rows(gm) == [("merged", "a + c", "merged a + c"), ("refused", "b", "b takes inputs of another size")]

"""What tests share: random statistics, the state of a graph module as data, and the laws that every rewrite obeys."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_map

import regraft as rg
from regraft.core.graph_module import adopt

FORMS = ("fx", "trace")
"""How a graph is made: by `torch.fx.symbolic_trace`, which knows no shapes, and by `regraft.trace`, which does."""


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every floating-point parameter and buffer with random numbers: fresh ones hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point() or tensor.is_meta:
                continue
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            values = values + 0.3 if name.endswith("running_var") else values * 1.6 - 0.8
            tensor.copy_(values)
    return model


def capture(model: nn.Module, inputs: tuple[Any, ...], form: str) -> GraphModule:
    """The graph of `model` in one of `FORMS`."""
    if form == "fx":
        return adopt(torch.fx.symbolic_trace(model))
    return rg.trace(model, inputs)


def picture(module: nn.Module) -> dict[str, Any]:
    """Everything about a module that undo must give back and a refusal must leave, to be compared with `==`."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    found: dict[str, Any] = {
        "state_dict": {name: _bits(value) for name, value in module.state_dict().items()},
        "state_dict order": list(module.state_dict()),
        "tensors": [(name, id(t), t.requires_grad, t.dtype, str(t.device), _stride(t)) for name, t in tensors],
        "bits": [_bits(t) for _, t in tensors],
        "modules": [(n, _identity(m), m.training) for n, m in module.named_modules(remove_duplicate=False)],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
    }
    for path, owner in module.named_modules():
        if isinstance(owner, GraphModule):
            nodes = [(n.name, n.op, n.target, str(n.args), str(n.kwargs), sorted(n.meta)) for n in owner.graph.nodes]
            found |= {f"nodes {path}": nodes, f"code {path}": owner.code, f"class {path}": _code_of(owner)}
            found[f"uses {path}"] = [sorted(user.name for user in n.users) for n in owner.graph.nodes]
    return found


def _identity(module: nn.Module) -> Any:
    # A shallow copy of a graph module has containers of its own, and so has every capture.
    return "graph" if isinstance(module, GraphModule) else "container" if type(module) is nn.Module else id(module)


def _code_of(owner: GraphModule) -> bytes:
    return type(owner).forward.__code__.co_code  # what runs, and not only what is shown


def _stride(tensor: Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided else None


def _bits(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.is_meta or tensor.layout is not torch.strided:
        return str(tensor.shape)
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Two pictures are alike; the message names the part that is not."""
    assert before.keys() == after.keys()
    for part, value in before.items():
        assert value == after[part], f"{part} differs"


def values_of(shown: dict[str, Any]) -> dict[str, Any]:
    """The part of a picture that a copy with other objects shares: names, code, bits."""
    kept = {k: v for k, v in shown.items() if k.startswith(("nodes", "code", "state_dict", "bits"))}
    return {part: [node[:5] for node in value] if "nodes" in part else value for part, value in kept.items()}


def copies(gm: GraphModule) -> dict[str, GraphModule]:
    """`gm` copied and saved in every way that must keep its history."""
    buffer = io.BytesIO()
    torch.save(gm, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(gm),
        "copy": copy.copy(gm),
        "pickle": pickle.loads(pickle.dumps(gm)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


def run(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The output leaves for fresh copies of the inputs, some of which a model may write."""
    fresh = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs)
    with torch.no_grad():
        return [leaf for leaf in tree_flatten(model(*fresh))[0] if isinstance(leaf, Tensor)]


def in_float64(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """What the model computes in double precision."""
    exact = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    return run(copy.deepcopy(model).double(), exact)


def assert_matches_float64(model: nn.Module, gm: nn.Module, inputs: tuple[Any, ...], slack: float = 4.0) -> None:
    """`gm` is about as near to the model's double-precision result as the model itself is."""
    outputs = zip(in_float64(model, inputs), run(model, inputs), run(gm, inputs), strict=True)
    for exact, expected, got in outputs:
        assert expected.dtype == got.dtype
        assert expected.shape == got.shape
        assert torch.equal(expected.isnan(), got.isnan())
        assert torch.equal(expected.isinf(), got.isinf())
        finite = exact.isfinite() & expected.isfinite()
        if not expected.is_floating_point():
            assert torch.equal(expected, got)
            continue
        if not finite.any():
            continue
        scale = float(exact[finite].abs().max())
        bound = slack * float((expected.double() - exact)[finite].abs().max())
        bound += slack * torch.finfo(expected.dtype).eps * scale
        assert float((got.double() - exact)[finite].abs().max()) <= bound


def applied(transformation: rg.Transformation, gm: GraphModule) -> int:
    """At how many sites the last step was applied."""
    return len(rg.history(gm)[-1].applied) if rg.history(gm) else 0


def check_applied(
    rule: rg.Rewrite, model: nn.Module, inputs: tuple[Any, ...], form: str = "fx", sites: int = 1, marks: bool = True
) -> GraphModule:
    """Apply `rule` and hold it to the laws; returns the rewritten graph module, still rewritten."""
    caller = picture(model)
    gm = capture(model, inputs, form)
    before, random = picture(gm), torch.get_rng_state()
    report = rule.explain(gm)
    assert_same(before, picture(gm))
    assert rule(gm) is gm
    step = rg.history(gm)[-1]
    assert len(step.applied) == sites, step.refused
    assert report.applied == sites
    assert torch.equal(random, torch.get_rng_state())
    assert bool(rule.get_transformed_nodes(gm)) is marks  # a rule that only removes leaves none
    assert_matches_float64(model, gm, inputs)
    assert_same(caller, picture(model))
    once = picture(gm)
    rule(gm)
    assert not rg.history(gm)[-1].applied, "twice is not once"
    assert_same(once, picture(gm))
    for other in copies(gm).values():
        assert [n.name for n in rule.get_transformed_nodes(other)] == [n.name for n in rule.get_transformed_nodes(gm)]
        assert_same(values_of(before), values_of(picture(rule(other, reverse=True))))
        assert not rule.get_transformed_nodes(other)
        assert_same(once, picture(gm))
    rule(gm, reverse=True)
    assert_same(before, picture(gm))
    assert_same(caller, picture(model))
    assert rg.history(gm) == ()
    rule(gm)
    assert_same(values_of(once), values_of(picture(gm)))
    return gm


def check_refused(
    rule: rg.Rewrite, model: nn.Module, inputs: tuple[Any, ...], form: str, *words: str, sites: int = 1
) -> GraphModule:
    """`rule` refuses every candidate, says why in a sentence with all of `words`, and changes nothing."""
    caller = picture(model)
    gm = capture(model, inputs, form)
    before, random = picture(gm), torch.get_rng_state()
    rule(gm)
    step = rg.history(gm)[-1]
    assert not step.applied, step.applied[0].sentence
    assert len(step.refused) == sites, step.refused
    for word in words:
        assert any(word in refusal.reason for refusal in step.refused), step.refused
    assert_same(before, picture(gm))
    assert_same(caller, picture(model))
    assert torch.equal(random, torch.get_rng_state())
    assert not rule.get_transformed_nodes(gm)
    assert rule.explain(gm).refused == sites
    return gm


def forget_shapes(gm: GraphModule) -> GraphModule:
    """A graph as it is where nobody recorded shapes."""
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    return gm


class Wrap(nn.Module):
    """A model whose `forward` is a function of itself and one input, for one-line models."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)

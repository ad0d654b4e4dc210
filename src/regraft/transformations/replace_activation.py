"""`ReplaceActivation`: activations by cheaper ones that are nearly the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn
from torch.fx import Node

from regraft.core.edit import Edit
from regraft.core.pattern import Match, Pattern
from regraft.core.plainness import plain_module
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.vocabulary import attribute
from regraft.transformations._replaceable import Activation, Replaceable, expect_activations, input_of


class ReplaceActivation(Rewrite):
    """Replace activations by others, wherever they are called: as modules, as functions, as methods.

    `gelu(x) ≈ x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))` is off by at most 5e-4 (Hendrycks and Gimpel 2016,
    arXiv:1606.08415); `silu(x) ≈ x relu6(x + 3) / 6` by at most 0.2 (Howard et al. 2019, arXiv:1905.02244). The result
    is not the same, so `optimize` does this only where it is asked to.

    Args:
        mapping: What to replace, by what: classes of modules, modules or functions of one tensor. A class or a function
            stands for its default settings. By default exact GELU by its tanh form, and SiLU by hard-swish.

    Example:
        >>> import torch, regraft as rg
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
        >>> rg.ReplaceActivation({torch.nn.SiLU: torch.nn.Hardswish})(rg.symbolic_trace(net)).get_submodule("1")
        Hardswish()
    """

    preserves_computation = False

    def __init__(self, mapping: Mapping[Activation, Activation] | None = None) -> None:
        usual: dict[Activation, Activation] = {nn.GELU: nn.GELU("tanh"), nn.SiLU: nn.Hardswish}
        if mapping is not None:
            expect_activations(mapping)
        self.mapping = dict(mapping) if mapping is not None else usual

    @property
    def pattern(self) -> Pattern:  # type: ignore[override]
        """The activations to be replaced."""
        return Replaceable(tuple(self.mapping))

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        (node,) = match.nodes
        wanted = Replaceable(tuple(self.mapping)).which(node, match.owner)
        assert wanted is not None
        value, replacement = input_of(node), self.mapping[wanted]
        path = str(node.target)
        module = attribute(match.owner, path) if node.op == "call_module" else None
        require(
            that(isinstance(value, Node), f"{match.where} is not called on a tensor"),
            plain_module(match.where, module) if module is not None else None,
            facts.in_place(node),
            facts.floating(value),
        )

        name = _name_of(replacement)
        if isinstance(replacement, (type, nn.Module)):
            new = replacement() if isinstance(replacement, type) else copy.deepcopy(replacement)
            new.train(module.training if module is not None else match.owner.training)
            own = module is not None and facts.readers_of(module) == {node}
            place = path if own else edit.free_name(f"{node.name}_{name.lower()}")
            edit.put_module(place, new, {})
            edit.replace_with_module(node, place, value)
            return f"{_name_of(wanted)} became {name}"
        edit.replace(node, replacement, value)
        if module is not None:
            edit.discard_module(path)
        return f"{_name_of(wanted)} became {name}"


def _name_of(activation: Activation) -> str:
    kind = type(activation) if isinstance(activation, nn.Module) else activation
    return str(getattr(kind, "__name__", kind))

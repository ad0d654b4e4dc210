"""`FuseGelu`: GELU written out becomes one call."""

from __future__ import annotations

import math

import torch
from torch.fx import Node
from torch.nn import functional as F

from regraft.core.edit import Edit
from regraft.core.pattern import Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.tree import Either, Number, Op, Product, Tree, TreeMatch, Value
from regraft.core.values import value_of
from regraft.core.vocabulary import ADD, ERF, POWER, SQUARE, TANH

_X = Value("x")
_SQUARE = Either(Op(POWER, _X, Number(2)), Op(SQUARE, _X))
_CUBE = Op(POWER, _X, Number(3))
_CUBIC = Either(*(Product(*factors, number="cubic") for factors in ((_CUBE,), (_SQUARE, _X), (_X, _X, _X))))
_QUADRATIC = Either(*(Product(*factors, number="cubic") for factors in ((_SQUARE,), (_X, _X))))
_SUM = Either(
    Product(Op(ADD, _X, _CUBIC), number="inside"),
    Product(_X, Op(ADD, _QUADRATIC, Number(1)), number="inside"),
)
_STEP = Either(Op(ERF, Product(_X, number="inside")), Op(TANH, _SUM))


class FuseGelu(Rewrite):
    """Fuse GELU written out, exact or in its tanh form, into `F.gelu`.

    `x/2 (1 + erf(x / √2)) = gelu(x)` and `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) = gelu(x, "tanh")`, in every
    grouping and order (Hendrycks and Gimpel 2016, arXiv:1606.08415). The numbers must be these to the precision of the
    values, and no value on the way may be used elsewhere.

    Example:
        >>> import torch, regraft as rg
        >>> class Gelu(torch.nn.Module):
        ...     def forward(self, x):
        ...         return 0.5 * x * (1 + torch.erf(x / 2**0.5))
        >>> gm = rg.FuseGelu()(rg.symbolic_trace(Gelu()))
        >>> [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]
        ['gelu']
    """

    preserves_computation = True
    pattern = Tree(Product(_X, Op(ADD, _STEP, Number(1)), number=0.5), ERF, TANH)

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        assert isinstance(match, TreeMatch)
        x, cubic = match.values["x"], match.values.get("cubic")
        require(facts.tensor(x), facts.floating(x))
        wanted = {"inside": math.sqrt(0.5) if cubic is None else math.sqrt(2 / math.pi), "cubic": 0.044715}
        require(
            *(_near(match, x, name, wanted[name]) for name in ("inside", "cubic") if name in match.values),
            facts.closed(match.inner, match.result),
            facts.unchanged(x, match.nodes[0], match.result),
            facts.in_place(match.result),
        )

        edit.replace(match.result, F.gelu, x, approximate="none" if cubic is None else "tanh")
        edit.erase_unread(match.inner)
        return "fused GELU" if cubic is None else "fused GELU in its tanh form"


def _near(match: TreeMatch, x: Node, name: str, wanted: float) -> str | None:
    """The number is the wanted one as far as the values can tell."""
    value, given = value_of(x), match.values[name]
    tolerance = (
        4 * torch.finfo(torch.float64 if value is not None and value.dtype is torch.float64 else torch.float32).eps
    )
    off = abs(given / wanted - 1)
    return that(off <= tolerance, f"{match.where}: {given!r} is off by {off:.1e} from GELU's {wanted!r}")

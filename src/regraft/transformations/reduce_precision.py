"""`ReducePrecision`: layers compute in bfloat16 or float16, and what needs more stays in float32."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from regraft.core import vocabulary as v
from regraft.core.edit import Edit
from regraft.core.mutation import may_alias, writes
from regraft.core.pattern import Calls, Match
from regraft.core.query import Facts, require, that
from regraft.core.rewrite import Rewrite
from regraft.core.values import value_of
from regraft.core.vocabulary import Call, Operation, Weight
from regraft.transformations._keeping import keeping, not_kept
from regraft.transformations._rounding import Cast, is_float32, is_number, name_of, own_memory

_LAYERS = (v.LINEAR, v.CONV, v.TRANSPOSED_CONV)
_FOLLOWERS: tuple[Operation, ...] = (
    *(v.RELU, v.RELU6, v.HARDTANH, v.GELU, v.SILU, v.HARDSWISH, v.HARDSIGMOID, v.LEAKY_RELU, v.SIGMOID, v.TANH),
    *(v.RESHAPE, v.FLATTEN, v.TRANSPOSE, v.PERMUTE, v.UNSQUEEZE, v.EXPAND, v.INDEX, v.IDENTITY, v.DROPOUT, v.PAD),
    *(v.ADD, v.ADD_IN_PLACE, v.ATTENTION),
)
_CAST = torch.ops.aten.to.dtype


class ReducePrecision(Rewrite):
    """Linear layers and convolutions get weights of `dtype`, and what lies between two of them is computed in it.

    `f(x) ~ float32(f_16(round_16(x)))`: a relative error of `2^-9` (bfloat16) or `2^-12` (float16) for each layer. What
    goes through in half precision are activations, additions of two such values, attention (whose softmax torch
    accumulates in float32, and whose mask stays as it is) and views. Float32 stay: norms and their statistics, means
    and sums, embeddings, positions, softmax, the residual stream of a transformer, all that `keep` names, and what the
    caller gives and gets.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        keep: Names of modules that stay in float32, with `*` and `?`: `keep=["lm_head", "encoder.layer.0.*"]`.

    Example:
        >>> import torch, regraft as rg
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> gm = rg.ReducePrecision()(rg.symbolic_trace(net))
        >>> gm.get_submodule("0").weight.dtype, gm(torch.randn(3, 4)).dtype
        (torch.bfloat16, torch.float32)
        >>> [node.name for node in gm.graph.nodes if node.op == "call_function"]
        ['to_dtype', '_2']
    """

    preserves_computation = False
    pattern = Calls(*_LAYERS, *_FOLLOWERS)

    def __init__(self, dtype: torch.dtype = torch.bfloat16, keep: Sequence[str] = ()) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype={dtype!r}: use torch.bfloat16 or torch.float16, as in ReducePrecision(torch.bfloat16)"
            )
        self.dtype = dtype
        self.keep = keeping(keep, "ReducePrecision")

    def rewrite(self, match: Match, edit: Edit, facts: Facts) -> str:
        """See `Rewrite.rewrite`."""
        call = match.call
        require(not_kept(call.where, self.keep, "stays in float32"))
        return self._layer(call, edit, facts) if call.operation in _LAYERS else self._follower(call, edit, facts)

    def _layer(self, call: Call, edit: Edit, facts: Facts) -> str:
        weight, bias = call.weight("weight"), call.weight("bias")
        require(that(call.module is not None, f"{call.where} is a function call, not a module"))
        require(facts.plain(call), facts.alone(call))
        assert weight is not None
        assert call.module is not None
        present = [one for one in (weight, bias) if one is not None]
        single = all(one.tensor.dtype is torch.float32 for one in present)
        require(
            that(single, f"{call.where} is not in float32, but in {weight.tensor.dtype}"),
            that(is_float32(call.input), f"the input of {call.where} is not float32"),
        )

        weights = {"weight": weight, "bias": bias}
        edit.put_module(call.where, call.module, {key: self._cast(one) for key, one in weights.items()})
        x = self._source(call.input, call.node, facts) or edit.insert(call.node, _CAST, call.input, self.dtype)
        value = value_of(call.node)
        inner = edit.insert_module(call.node, call.where, x, value=value.to(self.dtype) if value is not None else None)
        self._finish(call, inner, edit)
        return f"weights in {name_of(self.dtype)}"

    def _follower(self, call: Call, edit: Edit, facts: Facts) -> str:
        node, owner = call.node, call.owner
        tensors = [value for value in node.all_input_nodes if not is_number(value)]
        sources = {value: source for value in tensors if (source := self._source(value, node, facts)) is not None}
        needed = tensors if call.operation is not v.ATTENTION else [call[key] for key in ("input", "key", "value")]
        require(that(bool(sources), f"{call.where} works on float32 values"))
        require(that(all(value in sources for value in needed), f"{call.where} also works on float32 values"))
        written, adds = bool(writes(node, owner)), call.operation is v.ADD_IN_PLACE and call["alpha"] in (None, 1)
        require(None if written or not may_alias(node, owner) else facts.untouched(node))
        require(that(not written or len(call.input.users) == 1, f"{call.where} writes what others read"))
        safe = not written or adds or own_memory(sources[call.input], owner)
        require(that(safe, f"{call.where} works in place; use the out-of-place form"))

        # a mask stays what it is: in half precision the lowest number of float32 would be -inf, and True a one
        given = call["attn_mask"] if call.operation is v.ATTENTION else None
        mask = value_of(given) if given not in sources else None
        wide = mask is not None and mask.dtype is torch.float32 and mask.device.type not in ("cpu", "meta")
        require(that(not wide, f"{call.where} has a mask in float32, which halves take on the CPU alone"))

        terms = (sources.get(value, value) for value in (call["input"], call["other"])) if adds else ()
        inner = edit.insert(node, operator.add, *terms) if adds else edit.copy(node, sources)
        self._finish(call, inner, edit)
        return f"computed in {name_of(self.dtype)}"

    def _finish(self, call: Call, inner: Node, edit: Edit) -> None:
        """The node becomes the cast back; casts that nobody reads any more go."""
        before = call.node.all_input_nodes
        edit.replace(call.node, _CAST, inner, torch.float32)
        edit.erase_unread([value for value in before if value.target is _CAST])

    def _cast(self, weight: Weight | None) -> Any:
        return None if weight is None else (Cast(self.dtype), [weight])

    def _source(self, value: Node, reader: Node, facts: Facts) -> Node | None:
        """The value in half precision that `value` is the cast of, if `reader` still finds the same."""
        cast_back = value.target is _CAST and value.args[1] is torch.float32 and self.transformed(value)
        source = value.args[0] if cast_back and facts.unchanged(value, value, reader) is None else None
        return source if isinstance(source, Node) else None

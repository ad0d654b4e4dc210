"""A graph in the forms that oneDNN Graph has been seen to compute rightly, for inputs of certain sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from regraft.core.vocabulary import ATTENTION, Call, attribute, read
from regraft.optimize.engines.onednn_columns import of_columns_read
from regraft.optimize.engines.onednn_fusions import PRODUCTS, called, is_factor, kept_apart, overwritten, read_twice
from regraft.optimize.engines.onednn_layouts import (
    Images,
    anew,
    as_reshape,
    begins_oddly,
    begun_anew,
    dense,
    is_view,
    lies_oddly,
    order,
    steps_oddly,
)
from regraft.optimize.engines.onednn_same import same_in_each_call
from regraft.optimize.engines.onednn_spelling import respelled
from regraft.optimize.engines.written_attention import Mask, WrittenAttention

_BROADCASTING = {
    *(name + end for name in ("add", "sub", "mul", "div", "masked_fill") for end in ("", "_")),
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv")),
    *("truediv", "true_divide", "multiply", "subtract", "divide", "rsub", "pow"),
    *("maximum", "minimum", "max", "min", "where", "softmax"),
}
"""Operations that are fused with tensors of their result's size alone, by the names of their functions and methods."""
_IN_PLACE = {name for name in _BROADCASTING if name.endswith("_")} | {"iadd", "isub", "imul", "itruediv"}
_ADDING = {"addmm", "baddbmm", "addmv", "addbmm"}
"""Matrix products that are added to their first tensor."""
Form = tuple[torch.Size, tuple[int, ...]]
"""The size of a tensor, and its axes from the one with the longest step."""
Attention = Literal["fused", "in float32", "in its own type"]
"""How attention is computed: by torch's fused call, or written out, in one type or the other."""


class Forms(nn.Module):
    """A graph without what oneDNN Graph goes wrong at, or has no form for.

    When it fuses an addition, a product or the like, that is tensors that are not of one form, or that have several
    elements in one place: it reads and writes beyond some of them, and `x * c * c` with a `c` of fewer axes ends the
    process. Then tensors with an axis of one element whose step is not what it would be by itself, as between the heads
    of a transposed single token. And what the same kernel began with. Such tensors become dense ones of
    their own. So does a product of a single row: one of 2048 numbers, with another tensor added by the same kernel,
    writes beyond the end of its result. So do the matrices of a product of which neither rows nor columns lie in one
    piece: its kernel for those is a hundred times slower.

    Along a first axis of one element any step will do. But where that is not the tensor's own, torch does not see that
    the channels of an image lie last. So such a tensor is looked at anew, as is what must not be fused any further.

    A constant that is added to a product, or multiplied with it, cannot be compiled, so constants are given beside the
    inputs. A few calls are spelled otherwise. Results that are the same in each call are no results of a program.

    Args:
        gm: The graph.
        sample: Its inputs.
        images: Whether the channels of images are to lie last, where the graph has convolutions.

    Attributes:
        images: How many convolutions are given such.
        beside: What it is given after its inputs.
        attention: How attention is computed.
    """

    def __init__(self, gm: GraphModule, sample: Sequence[Tensor], images: bool = True) -> None:
        super().__init__()
        read_or_called = (node for op in ("get_attr", "call_module") for node in gm.graph.find_nodes(op=op))
        if any(isinstance(attribute(gm, str(node.target)), GraphModule) for node in read_or_called):
            raise ValueError("the graph has graphs inside of it")
        self.training = False  # of itself alone: the graph's modules are others', too
        self.gm = gm
        values = _Values(gm, images)
        values.run(*sample)
        self.images = values.images
        self.known = values
        fused = (node for node in gm.graph.nodes if called(node, gm) in _BROADCASTING and node not in values.scaled)
        self.larger = {node: values.to_enlarge(node) for node in fused}
        self.larger |= {node: values.to_gather(node) for node in values.products}
        constants = {(a, form) for larger in self.larger.values() for a, form in larger.items() if a in values.steady}
        self.places = {constant: place for place, constant in enumerate(constants)}
        self.beside = [dense(values.steady[node], *form) for node, form in self.places]
        self.attention: Attention = "fused"

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results that are not the same in each call.

        Args:
            *inputs: Those of the graph, and `beside`.
        """
        given = inputs[: len(inputs) - len(self.beside)]
        results = _tensors(_Run(self, inputs[len(given) :]).run(*given))
        return tuple(result for result, known in zip(results, self.known.results) if known is None)

    def complete(self, results: Sequence[Tensor]) -> list[Tensor]:
        """All results.

        Args:
            results: Those that are not the same in each call.
        """
        others = iter(results)
        return [next(others) if known is None else known.clone() for known in self.known.results]


class _Values(Images):
    """Runs a graph and notes of every tensor its size, and what oneDNN Graph goes wrong at.

    Attributes:
        forms: The size of each tensor, and the order of its axes.
        odd: The tensors that lie oddly.
        rows: The products of a single row.
        products: The matrix products.
        scaled: The images that are multiplied with a number for each channel.
        scattered: The tensors in which the elements of no row, and of no column, lie side by side.
        viewed: The tensors that are looked at anew.
        steady: The tensors that depend on sizes and weights alone, as they are in the sample.
        results: The tensors among the results that are steady, and None for each of the others.
        respelled: The calls that are spelled otherwise, as functions of the values of the nodes.
        renewing: What is called where a node would write into its argument, and need not.
        attentions: The calls of fused attention that can be written out, and
        masks: the masks of those that are the same in each call.
    """

    def __init__(self, gm: GraphModule, images: bool) -> None:
        super().__init__(gm, images)
        self.gm = gm
        self.forms: dict[Node, Form] = {}
        self.odd: set[Node] = set()
        self.rows: set[Node] = set()
        self.products = {node for node in gm.graph.nodes if called(node, gm) in PRODUCTS}
        self.scaled: set[Node] = set()
        self.scattered: set[Node] = set()
        self.viewed: set[Node] = set()
        self.steady: dict[Node, Tensor] = {}
        self.results: list[Tensor | None] = []
        self.respelled: dict[Node, Callable[[Mapping[Node, Any]], Tensor]] = {}
        self.renewing: dict[Node, Callable[..., Tensor]] = {}
        self.attentions: dict[Node, WrittenAttention] = {}
        self.masks: dict[Any, Mask] = {}
        self._same = same_in_each_call(gm)
        self._apart, self._twice = kept_apart(gm) | overwritten(gm), read_twice(gm)

    def run_node(self, n: Node) -> Any:
        try:
            result = self._renewed(n) if n in self.out_of_place else super().run_node(n)
        except RuntimeError:
            if self.writes or not is_view(n):
                raise
            self.respelled[n] = partial(as_reshape, n)
            result = self.respelled[n](self.env)
        if isinstance(result, Tensor):
            result = self.in_rows(n, result)
            self._note(n, result)
        if n.op == "output":
            kept = {id(self.env[node]) for node in n.all_input_nodes if node in self.steady}
            self.results = [leaf.detach() if id(leaf) in kept else None for leaf in _tensors(result)]
        return result

    def _renewed(self, n: Node) -> Any:
        """What a node gives, in memory of its own if that is of the size of what it would write to; of its type."""
        written, instead = self.out_of_place[n]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        dtype, size = self.env[written].dtype, self.env[written].shape
        result = instead(*args, **kwargs)
        if result.shape != size:
            return super().run_node(n)
        self.renewing[n] = instead if result.dtype == dtype else lambda *a, **k: instead(*a, **k).to(dtype)
        return result.to(dtype)

    def _note(self, n: Node, result: Tensor) -> None:
        self.forms[n] = result.shape, order(result)
        name = called(n, self.gm)
        if n in self._same:
            self.steady[n] = result.detach()  # it may be a parameter
        if lies_oddly(result):
            self.odd.add(n)
        if 1 not in result.stride()[-2:]:
            self.scattered.add(n)
        pixel = result.ndim == 4 and result.shape[2:].numel() == 1  # of which a sum and a product have no fast kernel
        if n in self._apart or steps_oddly(result) or (pixel and is_factor(n, self.gm)):
            self.viewed.add(n)
        if self._is_scaled(n, result):  # by torch, which needs no copy of the image's size, if nothing is fused with it
            self.scaled.add(n)
            self.viewed.update((n, *n.all_input_nodes))
        if n in self.products and result.shape[-2:-1].numel() == 1:
            self.rows.add(n)
            if name in _ADDING and n.all_input_nodes[0] not in self._same:
                raise ValueError(f"{n.name} adds a product of one row to what is computed")
        call = read(n, self.gm)
        other = respelled(n, name, call, result, self.env, self.steady)
        if other is not None:
            self.respelled[n] = other
        self.respelled |= of_columns_read(n, self.gm, self.steady)
        if call is not None and call.operation is ATTENTION:
            self._note_attention(n, call)

    def _is_scaled(self, n: Node, result: Tensor) -> bool:
        if self._writes(n) or not is_factor(n, self.gm) or result.ndim != 4:
            return False
        sizes = [self.forms[a][0] for a in n.all_input_nodes if a in self.forms and a not in self.steady]
        pixels = torch.Size((*result.shape[:2], 1, 1))
        return pixels != result.shape and sorted(sizes) == sorted((pixels, result.shape))

    def _writes(self, n: Node) -> bool:
        return called(n, self.gm) in _IN_PLACE and n not in self.renewing

    def _note_attention(self, n: Node, call: Call) -> None:
        written = WrittenAttention.of(call, self.env)
        if written is None:
            return
        self.attentions[n] = written
        mask = written.call["attn_mask"]
        if written.mask is not None and written.mask not in self.masks and (mask is None or mask in self._same):
            self.masks[written.mask] = written.prepared(self.env).known()

    def to_enlarge(self, node: Node) -> dict[Node, Form]:
        """The tensors that a call is not to be given as they are, with the form that they get."""
        given = [argument for argument in node.all_input_nodes if argument in self.forms]
        form = self.forms.get(node)
        if form is None or not given:
            return {}
        several, twice = len(given) > 1, self._twice.get(node, ())
        if self._writes(node):  # what is written to has to stay what it is
            del given[0]
        found: dict[Node, Form] = {}
        for a in given:
            other = self.forms[a] != form and (several or self.forms[a][0] == form[0])
            if a in self.odd or a in self.steady or other or (several and a in twice):
                found[a] = form
        return found

    def to_gather(self, node: Node) -> dict[Node, Form]:
        """The matrices that a product is not to be given as they are, with their form: its kernel for them is slow."""
        sizes = {a: self.forms[a][0] for a in node.all_input_nodes if a in self.scattered}
        return {a: (size, tuple(range(len(size)))) for a, size in sizes.items()}


class _Run(Images):
    """Runs a graph in its forms.

    Args:
        forms: The forms.
        beside: What is given beside the inputs.
    """

    def __init__(self, forms: Forms, beside: Sequence[Tensor]) -> None:
        super().__init__(forms.gm, bool(forms.images))
        self._forms, self._known, self._beside = forms, forms.known, beside
        self._masks: dict[Any, Mask] = {}

    def run_node(self, n: Node) -> Any:
        known = self._known
        if n in known.steady:
            # TorchScript computes them otherwise than torch, and where that decides a branch, by much: a distance of 16
            # falls into T5's bucket for 15, because a logarithm that should be 2 is a little less
            return known.steady[n]
        if self._forms.attention != "fused" and n in known.attentions:
            return self._written_out(known.attentions[n])
        if n in known.respelled:
            result = known.respelled[n]({argument: self.given(n, argument) for argument in n.all_input_nodes})
        elif n in known.renewing:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = known.renewing[n](*args, **kwargs)
        else:
            result = super().run_node(n)
        result = result.clone() if n in known.rows else result
        return anew(result) if n in known.viewed else result

    def _written_out(self, attention: WrittenAttention) -> Tensor:
        key, dtype = attention.mask, torch.float32 if self._forms.attention == "in float32" else attention.dtype
        if key is not None and (key, dtype) not in self._masks:
            known = self._known.masks.get(key)
            self._masks[key, dtype] = (known or attention.prepared(self.env)).to(dtype)
        return attention.compute(self.env, self._masks[key, dtype] if key is not None else None, dtype)

    def given(self, n: Node, argument: Node) -> Any:
        form = self._forms.larger.get(n, {}).get(argument)
        if form is None:
            value = super().given(n, argument)
            matrix = n in self._known.products and isinstance(value, Tensor)
            return begun_anew(value) if matrix and begins_oddly(value) else value
        place = self._forms.places.get((argument, form))
        return dense(self.env[argument], *form) if place is None else self._beside[place]


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]

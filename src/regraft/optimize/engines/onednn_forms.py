"""A graph in the forms that oneDNN Graph has been seen to compute rightly, for inputs of certain sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from regraft.core.errors import NotCovered
from regraft.core.values import tensors_in
from regraft.core.vocabulary import attribute
from regraft.optimize.engines.onednn_fusions import BROADCASTING, called
from regraft.optimize.engines.onednn_layouts import Form, Images, anew, begins_oddly, begun_anew, dense
from regraft.optimize.engines.onednn_values import Values
from regraft.optimize.engines.written_attention import Mask, WrittenAttention

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
    piece: its kernel for those is a hundred times slower. And those of which it takes one axis for another, or reads
    beyond them: a second matrix of a single row that lies oddly. So does a part of an image that is pooled, for which
    it has the reference alone.

    Along a first axis of one element any step will do. But where that is not the tensor's own, torch does not see that
    the channels of an image lie last. So such a tensor is looked at anew, as is what must not be fused any further.

    Rows of attention that see no key become zeros. Where the sample has none, that is not asked in each layer: the
    program says at the end whether there were any, and then its results are not taken.

    A constant that is added to a product, or multiplied with it, cannot be compiled, so constants are given beside the
    inputs. So are weights that MKL has packed, since TorchScript has no such constants. A few calls are spelled
    otherwise. Results that are the same in each call are no results of a program.

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
        self.training = False
        # Weights, and no layers: for each layer TorchScript would make a type, which takes long and which it keeps.
        weights = dict.fromkeys(chain(gm.parameters(), gm.buffers()))
        self._buffers.update((f"weight_{place}", weight) for place, weight in enumerate(weights))
        values = Values(gm, images)
        values.run(*sample)
        self.images = values.images
        self.known = values
        fused = (node for node in gm.graph.nodes if called(node, gm) in BROADCASTING and node not in values.by_torch)
        self.larger = {node: _to_enlarge(node, values) for node in fused}
        self.larger |= {node: _to_gather(node, values) for node in values.products}
        self.larger |= {node: _to_condense(node, values) for node in values.poolings}
        constants = {(a, form) for larger in self.larger.values() for a, form in larger.items() if a in values.steady}
        self.places = {constant: place for place, constant in enumerate(constants)}
        self.beside = [dense(values.steady[node], *form) for node, form in self.places]
        packs = {id(layer.packed): layer.packed for layer in values.own.values() if layer.packed is not None}
        places = {each: len(self.beside) + place for place, each in enumerate(packs)}  # of what several share, one
        self.packs = {node: places.get(id(layer.packed)) for node, layer in values.own.items()}
        self.beside += packs.values()
        self.attention: Attention = "fused"

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results that are not the same in each call, and whether some row has seen no key.

        Args:
            *inputs: Those of the graph, and `beside`.
        """
        given = inputs[: len(inputs) - len(self.beside)]
        run = _Run(self, inputs[len(given) :])
        results = tensors_in(run.run(*given))
        return (*(result for result, known in zip(results, self.known.results) if known is None), *run.blind)

    def complete(self, results: Sequence[Tensor]) -> list[Tensor]:
        """All results.

        Args:
            results: What `forward` has given.

        Raises:
            NotCovered: Some row has seen no key.
        """
        others = iter(results)
        complete = [next(others) if known is None else known.clone() for known in self.known.results]
        if any(map(bool, others)):
            raise NotCovered("the program was made for masks that let each row see a key")
        return complete


class _Run(Images):
    """Runs a graph in its forms.

    Args:
        forms: The forms.
        beside: What is given beside the inputs.
    """

    def __init__(self, forms: Forms, beside: Sequence[Tensor]) -> None:
        super().__init__(forms.known.gm, bool(forms.images))
        self._forms, self._known, self._beside = forms, forms.known, beside
        self._masks: dict[Any, Mask] = {}
        self.blind: list[Tensor] = []  # for masks that had no such row in the sample, whether there is one
        self._images: dict[Node, Tensor] = {}  # of what is computed by pixels, the images

    def run_node(self, n: Node) -> Any:
        known = self._known
        if n in known.steady:
            # TorchScript computes them otherwise than torch, and where that decides a branch, by much: a distance of 16
            # falls into T5's bucket for 15, because a logarithm that should be 2 is a little less
            return known.steady[n]
        if n in known.done:
            return None
        if n in known.numbers:  # when traced, a size is a tensor, of which `sym_max` and the like know nothing
            return known.numbers[n]
        if self._forms.attention != "fused" and n in known.attentions:
            return self._written_out(known.attentions[n])
        if n in known.own:
            place = self._forms.packs[n]
            result = known.own[n].compute(self.env, None if place is None else self._beside[place])
        elif n in known.by_pixels:
            result = known.by_pixels[n].compute(self.env)
        elif n in known.respelled:
            result = known.respelled[n]({argument: self.given(n, argument) for argument in n.all_input_nodes})
        elif n in known.renewing:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = known.renewing[n](*args, **kwargs)
        else:
            result = super().run_node(n)
        if n in known.imaged:
            self._images[n] = result
            result = known.imaged[n].back(result, known.forms[n][0])
        result = result.clone() if n in known.rows else result
        return anew(result) if n in known.viewed else result

    def _written_out(self, attention: WrittenAttention) -> Tensor:
        key, dtype = attention.mask, torch.float32 if self._forms.attention == "in float32" else attention.dtype
        if key is not None and (key, dtype) not in self._masks:
            mask = self._known.masks.get(key) or attention.prepared(self.env)
            if key in self._known.sighted:
                assert mask.blind is not None
                self.blind.append(mask.blind.any())
                mask = mask.sighted
            self._masks[key, dtype] = mask.to(dtype)
        return attention.compute(self.env, self._masks[key, dtype] if key is not None else None, dtype)

    def given(self, n: Node, argument: Node) -> Any:
        inside = self._known.inside.get(n)
        if inside is None:
            return self._given(n, argument)
        if argument in inside:
            return self._images[argument]
        value = self._given(n, argument)
        return self._known.imaged[n].image_of(value) if isinstance(value, Tensor) and value.ndim else value

    def _given(self, n: Node, argument: Node) -> Any:
        form = self._forms.larger.get(n, {}).get(argument)
        if form is None:
            value = super().given(n, argument)
            matrix = n in self._known.products and isinstance(value, Tensor)
            return begun_anew(value) if matrix and begins_oddly(value) else value
        place = self._forms.places.get((argument, form))
        again = self._known.twice.get(n, {}).get(argument, 0)
        if place is not None and not again:
            return self._beside[place]
        value = self.env[argument] if place is None else self._beside[place]
        for _ in range(again):  # TorchScript would make one of two equal copies
            value = anew(value)
        return dense(value, *form)


def _to_enlarge(node: Node, values: Values) -> dict[Node, Form]:
    """The tensors that a call is not to be given as they are, with the form that they get."""
    given = [argument for argument in node.all_input_nodes if argument in values.forms]
    form = values.forms.get(node)
    if form is None or not given:
        return {}
    if not form[0] and any(values.forms[a][0] for a in given):  # the largest element of a tensor
        return {}
    several, twice = len(given) > 1, values.twice.get(node, ())
    if values.writes_to(node):  # what is written to has to stay what it is
        del given[0]
    found: dict[Node, Form] = {}
    for a in given:
        other = values.forms[a] != form and (several or values.forms[a][0] == form[0])
        if a in values.odd or a in values.steady or other or (several and a in twice):
            found[a] = form
    return found


def _to_condense(node: Node, values: Values) -> dict[Node, Form]:
    """The images with gaps that are pooled, with their form: for those there is the reference kernel alone."""
    return {a: values.forms[a] for a in node.all_input_nodes if a in values.odd}


def _to_gather(node: Node, values: Values) -> dict[Node, Form]:
    """The matrices that a product is not to be given as they are, with their form: its kernel is slow, or wrong."""
    sizes = {a: values.forms[a][0] for a in node.all_input_nodes if a in values.scattered}
    second = node.all_input_nodes[-1]
    if second in values.odd and len(size := values.forms[second][0]) > 3 and size[-2] == 1:
        sizes[second] = size
    return {a: (size, tuple(range(len(size)))) for a, size in sizes.items()}

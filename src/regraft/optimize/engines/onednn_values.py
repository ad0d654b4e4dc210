"""What is noted of a graph as it runs on the sample: what oneDNN Graph goes wrong at, or has no form for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from regraft.core.values import tensors_in
from regraft.core.vocabulary import ATTENTION, Call, read
from regraft.optimize.engines.onednn_affine import FEWER, Chains, scales_channels
from regraft.optimize.engines.onednn_columns import of_columns_read
from regraft.optimize.engines.onednn_contents import Contents
from regraft.optimize.engines.onednn_fusions import (
    ADDING,
    BROADCASTING,
    IN_PLACE,
    POOLINGS,
    PRODUCTS,
    begins_kernel,
    called,
    goes_inside,
    is_elementwise,
    is_factor,
    kept_apart,
    overwritten,
    read_twice,
)
from regraft.optimize.engines.onednn_layouts import (
    Form,
    Images,
    as_reshape,
    is_view,
    lies_oddly,
    mixes_axes,
    order,
    steps_oddly,
)
from regraft.optimize.engines.onednn_linear import OwnLayer
from regraft.optimize.engines.onednn_moves import Move, chains
from regraft.optimize.engines.onednn_pixels import Imaged, PixelLayer, RowConvolution
from regraft.optimize.engines.onednn_rotation import Rotation
from regraft.optimize.engines.onednn_spelling import respelled, without_places
from regraft.optimize.engines.written_attention import Mask, WrittenAttention


class Values(Images):
    """Runs a graph and notes of every tensor its size, and what oneDNN Graph goes wrong at.

    Attributes:
        forms: The size of each tensor, and the order of its axes.
        odd: The tensors that lie oddly.
        rows: The products of a single row.
        products: The matrix products.
        poolings: The poolings of images.
        by_torch: The calls that are left to torch, which takes tensors of any form.
        scattered: The tensors in which the elements of no row, and of no column, lie side by side, or whose axes are
            taken for each other.
        viewed: The tensors that are looked at anew.
        steady: The tensors that depend on sizes and weights alone, as they are in the sample.
        numbers: The numbers that are made of sizes.
        done: What has written into steady tensors, and gives nothing.
        twice: The arguments that a call has to be given as copies, and which of their copies.
        results: The tensors among the results that are steady, and None for each of the others.
        respelled: The calls that are spelled otherwise, as functions of the values of the nodes.
        own: The linear layers that are computed outside of its kernels.
        by_pixels: What gives an image in the place of a tensor: linear layers and convolutions over one axis.
        inside: What goes into their kernels, with those arguments that are in the same kernel, and
        imaged: for all of these, which kind of image it is.
        renewing: What is called where a node would write into its argument, and need not.
        attentions: The calls of fused attention that can be written out,
        attending: how many seconds they took in the sample, and
        masks: the masks of those that are the same in each call, and
        sighted: the others that let each row see a key in the sample.
    """

    def __init__(self, gm: GraphModule, images: bool) -> None:
        super().__init__(gm, images)
        self.gm = gm
        self.forms: dict[Node, Form] = {}
        self.odd: set[Node] = set()
        self.rows: set[Node] = set()
        self.products = {node for node in gm.graph.nodes if called(node, gm) in PRODUCTS}
        self.poolings = {node for node in gm.graph.nodes if called(node, gm) in POOLINGS}
        self.by_torch: set[Node] = set()
        self.scattered: set[Node] = set()
        self.viewed: set[Node] = set()
        self.steady: dict[Node, Tensor] = {}
        self.numbers: dict[Node, float] = {}
        self.done: set[Node] = set()
        self.results: list[Tensor | None] = []
        self.respelled: dict[Node, Callable[[Mapping[Node, Any]], Any]] = {}
        self.own: dict[Node, OwnLayer] = {}
        self.by_pixels: dict[Node, Imaged] = {}
        self.imaged: dict[Node, Imaged] = {}
        self.inside: dict[Node, set[Node]] = {}
        self.renewing: dict[Node, Callable[..., Tensor]] = {}
        self.attentions: dict[Node, WrittenAttention] = {}
        self.attending = 0.0
        self.masks: dict[Any, Mask] = {}
        self.sighted: set[Any] = set()
        self._apart, self.twice = kept_apart(gm) | overwritten(gm), read_twice(gm)
        self._chains = {} if self.writes else chains(gm)
        self._affine = Chains()
        self._contents = Contents()
        self._outside: set[Node] = set()  # what is computed so, and functions of it
        self._packs: dict[Any, Tensor] = {}
        self._kernels: set[Node] = set()  # products and convolutions, and what goes into their kernels

    def run_node(self, n: Node) -> Any:
        """See `Interpreter.run_node`."""
        start = time.perf_counter()
        try:
            with self._contents:
                result = self._renewed(n) if n in self.out_of_place else super().run_node(n)
        except RuntimeError:
            if self.writes or not is_view(n):
                raise
            self.respelled[n] = partial(as_reshape, n)
            result = self.respelled[n](self.env)
        seconds = time.perf_counter() - start
        asked = self._contents.noted() or (n.target == "tolist" and "tolist")  # which reads memory as it is
        if asked and n not in self.same:
            raise ValueError(f"{n.name}: {asked} makes numbers or sizes of what a tensor holds, as in the sample")
        if isinstance(result, Tensor):
            result = self._moved(n, self.in_rows(n, result))
            self._note(n, result)
        elif n in self.same and isinstance(result, (int, float)):
            self.numbers[n] = result
        elif n in self.same and result is None:
            self.done.add(n)
        elif (other := without_places(n)) is not None:
            self.respelled[n] = other
        if n in self.attentions:
            self.attending += seconds
        if n.op == "output":
            kept = {id(self.env[node]) for node in n.all_input_nodes if node in self.steady}
            self.results = [leaf.detach() if id(leaf) in kept else None for leaf in tensors_in(result)]
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
        if n in self.same:
            self.steady[n] = result.detach()  # it may be a parameter
        if lies_oddly(result):
            self.odd.add(n)
        if 1 not in result.stride()[-2:] or mixes_axes(result):
            self.scattered.add(n)
        pixel = result.ndim == 4 and result.shape[2:].numel() == 1  # of which a sum and a product have no fast kernel
        if n in self._apart or steps_oddly(result) or (pixel and is_factor(n, self.gm)):
            self.viewed.add(n)
        if self._is_scaled(n, result) or self._is_gate(n) or self._is_widened(n, result):
            self.by_torch.add(n)
            self.viewed.update((n, *n.all_input_nodes))  # nothing is fused with what is looked at anew
        if n in self.products and result.shape[-2:-1].numel() == 1:
            self.rows.add(n)
            if name in ADDING and n.all_input_nodes[0] not in self.same:
                raise ValueError(f"{n.name} adds a product of one row to what is computed")
        call = read(n, self.gm)
        other = respelled(n, name, call, result, self.env, self.steady)
        if other is not None:
            self.respelled[n] = other
            if name == "masked_fill":  # it is what it is given, or a mask itself
                self.by_torch.add(n)
        self.respelled |= of_columns_read(n, self.gm, self.steady)
        self._note_rotation(n, result)
        self._note_affine(n, call, result)
        self._note_layer(n, call)
        if (begins_kernel(n, self.gm) and n not in self.own and n not in self.rows) or self._is_inside(n):
            self._kernels.add(n)
        if call is not None and call.operation is ATTENTION:
            self._note_attention(n, call)

    def _note_layer(self, n: Node, call: Call | None) -> None:
        own = None if n in self.steady else OwnLayer.of(call, self.env, self.steady, self._packs)
        if own is not None:
            self.own[n] = own
            self.rows.discard(n)
            self._outside.add(n)
        elif is_elementwise(n, self.gm) and n.all_input_nodes[0] in self._outside:  # it has no kernel to go into
            self._outside.add(n)
            self.viewed.add(n)
        elif n not in self.steady and not self.writes:
            self._note_pixels(n, call)

    def _note_pixels(self, n: Node, call: Call | None) -> None:
        row = RowConvolution.of(call, self.env) if n in self.over_rows else None
        layer = row or PixelLayer.of(call, self.env, self.steady)
        if layer is not None:
            self.by_pixels[n] = self.imaged[n] = layer
        elif n not in self.by_torch and n not in self.respelled:
            images = [a for a in n.all_input_nodes if a in self.imaged and self.forms[a] == self.forms[n]]
            images = [a for a in images if type(self.imaged[a]) is type(self.imaged[images[0]])]
            inside = {a for a in images if goes_inside(n, a, self.gm)}
            if inside:  # what else reads the image might find in it what this kernel has written there
                self.imaged[n] = self.imaged[images[0]]
                self.inside[n] = inside | {a for a in images if set(a.users) <= {n, *inside}}

    def _is_scaled(self, n: Node, result: Tensor) -> bool:
        sizes = [self.forms[a][0] for a in n.all_input_nodes if a in self.forms and a not in self.steady]
        return not self.writes_to(n) and is_factor(n, self.gm) and scales_channels(result.shape, sizes)

    def _is_gate(self, n: Node) -> bool:
        """Whether it multiplies parts of merged layers: they have gaps, and nothing would be fused with it anyway."""
        given = n.all_input_nodes
        wanted = n in self._apart and not self.writes_to(n) and is_factor(n, self.gm)
        return wanted and not self.odd.isdisjoint(given) and all(a in self.odd or a in self.viewed for a in given)

    def _is_widened(self, n: Node, result: Tensor) -> bool:
        """Whether it joins a tensor of few elements with one of many, in no kernel of a product or a convolution."""
        if self.writes_to(n) or called(n, self.gm) not in BROADCASTING - {"softmax"} or self._is_inside(n):
            return False
        return any(FEWER * self.forms[a][0].numel() <= result.numel() for a in n.all_input_nodes if a in self.forms)

    def _is_inside(self, n: Node) -> bool:
        before = self._kernels.intersection(n.all_input_nodes) - self.viewed
        return any(self.forms[a][0] == self.forms[n][0] and goes_inside(n, a, self.gm) for a in before)

    def _note_rotation(self, n: Node, result: Tensor) -> None:
        turning = None if self.writes else Rotation.of(n, result, self.gm, self.forms)
        if turning is not None and turning.negated not in self.steady:
            spelled = turning.spelled(self.steady.get(turning.sine), self.gm, self.respelled)
            self.respelled |= spelled
            self.by_torch.update(spelled)
            self.viewed.discard(turning.turned)  # which is two tensors now
            for node in spelled:
                self.inside.pop(node, None)
                self.imaged.pop(node, None)
            if turning.straight in spelled:
                self.viewed.update((turning.straight, *turning.straight.all_input_nodes))

    def _note_affine(self, n: Node, call: Call | None, result: Tensor) -> None:
        if self.writes or self._is_inside(n) or n in self.respelled or n in self.steady:
            return
        spelled = self._affine.spelled(call, result, self.env)
        if spelled is not None:
            self.respelled[n] = spelled
            self.by_torch.add(n)
            self.viewed.update((n, *n.all_input_nodes))
            self.viewed -= self._affine.open.intersection(n.all_input_nodes)  # those are no tensors

    def _moved(self, n: Node, result: Tensor) -> Tensor:
        """The result, as one copy leaves it that does what several do: of an image that is convolved, channels last."""
        chain, plain = [] if n in self.same else list(self._chains.get(n, ())), tuple(range(result.ndim))
        layouts = [plain, (0, 2, 3, 1)] if self.is_convolved(n) and result.ndim == 4 else [plain]
        if order(result) != plain:  # views come last
            chain = chain[:-1]
            while chain and not self._is_dense(chain[-1]):
                del chain[-1]
            layouts = [tuple(range(len(self.forms[each][0]))) for each in chain[-1:]]
        given = chain[0].all_input_nodes[0] if chain else None
        if given not in self.forms or given in self.odd:
            return result
        move = Move.of(chain, self.gm, self.forms[given], self.numbers, layouts)
        if move is None:
            return result
        self.respelled |= move.spelled
        return result if move.laid == layouts[0] else result.contiguous(memory_format=torch.channels_last)

    def _is_dense(self, n: Node) -> bool:
        return n not in self.odd and self.forms[n][1] == tuple(range(len(self.forms[n][0])))

    def writes_to(self, n: Node) -> bool:
        """Whether a call writes into its first argument.

        Args:
            n: The call.
        """
        return called(n, self.gm) in IN_PLACE and n not in self.renewing

    def _note_attention(self, n: Node, call: Call) -> None:
        written = WrittenAttention.of(call, self.env)
        if written is None:
            return
        self.attentions[n] = written
        if written.mask is None or written.mask in self.masks or written.mask in self.sighted:
            return
        mask = written.call["attn_mask"]
        if mask is None or mask in self.same:
            self.masks[written.mask] = written.prepared(self.env).known()
        elif not written.blind(self.env).any():
            self.sighted.add(written.mask)

"""How the tensors of a graph lie in memory when oneDNN Graph runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from regraft.core.mutation import mutating_nodes
from regraft.core.strides import depends_on_strides
from regraft.core.values import JOINING, called_name, layout_of, value_of
from regraft.core.vocabulary import ATTENTION, attribute, read
from regraft.optimize.engines.onednn_fusions import called
from regraft.optimize.engines.onednn_in_place import out_of_place
from regraft.optimize.engines.onednn_same import same_in_each_call

Form = tuple[torch.Size, tuple[int, ...]]
"""The size of a tensor, and its axes from the one with the longest step."""
_VIEWS = {"view", "_unsafe_view", "view_as"}
_SUMS = {"add", "add_", "iadd"}
_CONVOLUTIONS = {"conv2d", "conv_transpose2d", "convtranspose2d"}
_RESIZING = {"interpolate", "upsample", "upsamplingbilinear2d", "upsamplingnearest2d"}
_RESIZING |= {"upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d"}
"""Of which torch's kernels, too, are far faster where the channels lie last."""


class Images(Interpreter):
    """Runs a graph with images whose channels lie last, as oneDNN's convolutions have them, and sequences whose do.

    What a kernel gives to torch lies as it does in the trace. With the channels first each image is reordered there and
    back, and a kernel that is given images of both kinds is far slower than torch.

    Args:
        gm: The graph. Where it reads strides, or has layers that may do so, tensors lie as they do in the graph; and
            where it writes into what others may see, since what is a view there may be a copy here.
        images: Whether there are to be such images.

    Attributes:
        out_of_place: What writes into its argument, and need not: see `out_of_place`.
        writes: Whether others do.
        same: The values that are the same in each call.
        over_rows: The convolutions over one axis, whose channels lie last, too.
    """

    def __init__(self, gm: GraphModule, images: bool = True) -> None:
        super().__init__(gm)
        self._convolutions: dict[Node, Node] = {}
        self._resizing: dict[Node, Node] = {}
        self._joining: set[Node] = set()
        self._joined: dict[Node, bool] = {}
        self.over_rows: set[Node] = set()
        self.out_of_place = out_of_place(gm)
        self.same = same_in_each_call(gm)
        self.writes = any(node not in self.out_of_place and node not in self.same for node in mutating_nodes(gm))
        self._bound = self.writes or any(_reads_strides(node, gm) for node in gm.graph.nodes)
        self._attending = {} if self._bound else {node: _attended(node, gm) for node in gm.graph.nodes}
        if images and not self._bound:
            self._convolutions, self._resizing = (
                {node: node.all_input_nodes[0] for node in gm.graph.nodes if called(node, gm) in names}
                for names in (_CONVOLUTIONS, _RESIZING)
            )
            if self._convolutions:  # elsewhere what has four axes is no image
                self._joining = {node for node in gm.graph.nodes if called(node, gm) in JOINING}
            self.over_rows = {node for node in gm.graph.nodes if _is_over_a_row(node, gm)}

    @property
    def images(self) -> int:
        """How many convolutions are given such images, or rows."""
        return len(self._convolutions) + len(self.over_rows)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        """See `Interpreter.fetch_args_kwargs_from_env`."""
        return map_arg((n.args, n.kwargs), lambda argument: self.given(n, argument))

    def given(self, n: Node, argument: Node) -> Any:
        """What a node is given for one of its arguments.

        Args:
            n: The node.
            argument: The argument.
        """
        value = self.env[argument]
        resized = argument is self._resizing.get(n)
        if not isinstance(value, Tensor) or value.ndim != 4:  # what is joined may be the pieces of a split
            return value
        if argument in self._attending.get(n, ()):
            return value if value.stride(3) == 1 else value.contiguous()
        if not (resized or argument is self._convolutions.get(n) or self._joins_images(n)):
            return value
        if value.shape[2:].numel() == 1:  # its steps are what the kernel before has left, which are not those of torch
            return value.flatten(1).contiguous().view(value.shape)
        last = torch.contiguous_format if resized and _is_returned(n) else torch.channels_last
        # a kernel whose image is asked to lie so is not fused with the next
        return value if value.is_contiguous(memory_format=last) else value.contiguous(memory_format=last)

    def _joins_images(self, n: Node) -> bool:
        """Whether a node joins images of which one has its channels last: where not all do, the result's are first."""
        if n in self._joining and n not in self._joined:
            given = [self.env[each] for each in n.all_input_nodes]
            self._joined[n] = any(isinstance(t, Tensor) and layout_of(t) is torch.channels_last for t in given)
        return self._joined.get(n, False)

    def is_convolved(self, n: Node) -> bool:
        """Whether a convolution reads it, and is given images with their channels last.

        Args:
            n: The node.
        """
        return any(self._convolutions.get(user) is n for user in n.users)

    def run_node(self, n: Node) -> Any:
        """See `Interpreter.run_node`."""
        return self.env[n.all_input_nodes[0]] if self._only_lays(n) else super().run_node(n)

    def _only_lays(self, n: Node) -> bool:
        """Whether a node does nothing but lay an image otherwise than the others."""
        if called_name(n) != "contiguous" or len(n.args) > 1 or n.kwargs or not self._convolutions:
            return False
        image: Tensor = self.env[n.all_input_nodes[0]]
        return image.is_contiguous(memory_format=torch.channels_last)

    def in_rows(self, n: Node, result: Tensor) -> Tensor:
        """What a convolution over time or a sum gives, with the features of a token side by side.

        So do linear layers have them. A sum lies as its first tensor does; in Whisper, whose convolutions have them
        apart where images lie as they are, so would every sum down to the last layer, and what each layer gives would
        be transposed for it.

        Args:
            n: The convolution, or the sum.
            result: Its result.
        """
        summed = called(n, self.module) in _SUMS
        if result.ndim != 3 or self._bound or not (summed or n in self.over_rows):
            return result
        given = [self.env[each] for each in n.all_input_nodes] if summed and self.over_rows else []
        last = any(isinstance(each, Tensor) and order(each) == (0, 2, 1) for each in given)
        return result.mT.contiguous().mT if last or n in self.over_rows else result.contiguous()


def _is_returned(node: Node) -> bool:
    """Whether the caller gets its result, with the channels first: the image before, a smaller one, is laid so."""
    result = value_of(node)
    return result is not None and result.is_contiguous() and all(user.op == "output" for user in node.users)


def _attended(node: Node, gm: GraphModule) -> tuple[Node, ...]:
    """Queries, keys and values: torch's fused kernel takes those whose features lie side by side, and no others."""
    call = read(node, gm)
    return () if call is None or call.operation is not ATTENTION else (call.input, call["key"], call["value"])


def is_view(node: Node) -> bool:
    """Whether a node is a view in other sizes, which an image may not have where its channels lie last.

    Args:
        node: The node.
    """
    return called_name(node) in _VIEWS and not any(isinstance(value, torch.dtype) for value in node.args)


def as_reshape(node: Node, env: Mapping[Node, Any]) -> Any:
    """A view as a reshape, from the values of the nodes.

    Args:
        node: The view.
        env: The values.
    """
    values: Any = map_arg((*node.args, *node.kwargs.values()), env.__getitem__)
    given, *sizes = values
    return given.reshape(sizes[0].shape) if called_name(node) == "view_as" else given.reshape(*sizes)


def _reads_strides(node: Node, gm: GraphModule) -> bool:
    return called_name(node) not in _VIEWS and any(depends_on_strides(node, each, gm) for each in node.all_input_nodes)


def _is_over_a_row(node: Node, gm: GraphModule) -> bool:
    """Whether it is a convolution over one axis, and none that pads with something else than zeros."""
    layer = attribute(gm, str(node.target)) if node.op == "call_module" else None
    return called(node, gm) == "conv1d" and getattr(layer, "padding_mode", "zeros") == "zeros"


def order(tensor: Tensor) -> tuple[int, ...]:
    """The axes of a tensor, from the one with the longest step; those of one element stay where they are.

    Args:
        tensor: The tensor.
    """
    steps = tensor.stride()
    longer = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    by_step = dict(zip(longer, sorted(longer, key=lambda axis: -steps[axis])))
    return tuple(by_step.get(axis, axis) for axis in range(tensor.ndim))


def dense(tensor: Tensor, size: torch.Size, axes: Sequence[int]) -> Tensor:
    """A copy of a tensor, expanded to a size.

    Args:
        tensor: The tensor.
        size: The size.
        axes: The axes of the copy, from the one with the longest step.
    """
    copy = tensor.expand(size).permute(tuple(axes)).clone(memory_format=torch.contiguous_format)
    return copy.permute(sorted(axes, key=axes.__getitem__))


def anew(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor with which nothing is fused; an image that steps oddly, in its own steps.

    It has to hold for a tensor that lies otherwise than in the trace.

    Args:
        tensor: The tensor.
    """
    if not steps_oddly(tensor):
        same: Tensor = torch.ops.aten.alias(tensor)
        return same
    return tensor.squeeze(0).movedim(0, 2).unsqueeze(0).movedim(3, 1)


def begins_oddly(tensor: Tensor) -> bool:
    """Whether the first axis has one element, and a step that is shorter than the way through all the others.

    oneDNN Graph takes the second matrix of a product for another one then: the keys of a sequence whose batch is its
    second axis.

    Args:
        tensor: The tensor.
    """
    others = (size * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:]))
    return tensor.ndim > 3 and tensor.shape[0] == 1 and tensor.stride(0) < max(others)


def mixes_axes(tensor: Tensor) -> bool:
    """Whether an axis of matrices of four axes lies between both axes of the batch, and is as long as the outer one.

    oneDNN Graph takes the one for the other then, where it is the second axis of the batch that is the outer one. An
    einsum of XLNet gives such to a product, for texts of two segments.

    Args:
        tensor: The tensor.
    """
    axes = order(tensor)
    return axes[:1] == (1,) and axes[2:3] == (0,) and tensor.ndim == 4 and tensor.shape[1] == tensor.shape[axes[1]]


def begun_anew(tensor: Tensor) -> Tensor:
    """The same memory, with a first axis of one element that steps over all of it.

    Args:
        tensor: The tensor.
    """
    inner = tensor.squeeze(0)
    axes = order(inner)
    back = sorted(range(inner.ndim), key=axes.__getitem__)
    return inner.permute(axes).unsqueeze(0).permute(0, *(axis + 1 for axis in back))


def steps_oddly(tensor: Tensor) -> bool:
    """Whether it is an image by itself in its batch, with its channels last, and torch cannot see that.

    Args:
        tensor: The tensor.
    """
    last = tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and tensor.stride(0) != tensor.numel()


def lies_oddly(tensor: Tensor) -> bool:
    """Whether several elements are in one place, or an axis of one element has a step that it would not have by itself.

    The first axes of one element are taken for what they are, whatever their step. Or whether there are gaps between
    the elements, as in a slice of a merged layer's result: oneDNN Graph has a slow kernel for such, forty times slower
    than a copy.
    """
    within = False
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride())):
        own = tensor.shape[axis + 1] * tensor.stride(axis + 1) if axis + 1 < tensor.ndim else 1
        if (size > 1 and step == 0) or (size == 1 and within and step != own):
            return True
        within = within or size > 1
    dense = 1
    for step, size in sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if step != dense:
            return True
        dense *= size
    return False

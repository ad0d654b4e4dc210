"""What is computed as images though it is none: linear layers, by pixels, and convolutions over one axis, by rows.

What follows has to be computed of the image, too, for only then does it go into the same kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from regraft.core.vocabulary import CONV, Call
from regraft.optimize.engines.onednn_convolutions import as_row, row_convolution
from regraft.optimize.engines.onednn_linear import layer_of
from regraft.optimize.engines.onednn_single import Env, Spelling
from regraft.transformations._packed_linear import as_good_by_pixels
from regraft.transformations._pixels import image_of, kernel_of, rows_of


class Imaged(Protocol):
    """A call that gives an image in the place of a tensor."""

    def compute(self, env: Env) -> Tensor:
        """The image that is its result.

        Args:
            env: The values of the nodes.
        """
        ...

    def image_of(self, x: Tensor) -> Tensor:
        """Another tensor of its result's size, as such an image.

        Args:
            x: The tensor.
        """
        ...

    def back(self, image: Tensor, size: torch.Size) -> Tensor:
        """What such an image stands for.

        Args:
            image: The image.
            size: The size of the tensor.
        """
        ...


@dataclass(frozen=True)
class PixelLayer:
    """A linear layer as a convolution for which each row is a pixel, where that keeps up with the product here.

    Args:
        given: What it is given.
        kernel: Its weight, (out_features, in_features, 1, 1).
        bias: (out_features,), or None.
    """

    given: Node
    kernel: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, call: Call | None, env: Env, steady: Mapping[Node, Tensor]) -> PixelLayer | None:
        """A call of a layer as a convolution; None where it is none, or is slower so.

        Args:
            call: The call.
            env: The values of the nodes in the sample.
            steady: Those that are the same in each call.
        """
        layer = layer_of(call, env, steady)
        if call is None or layer is None:
            return None
        x, weight, bias = layer  # of several channels: an image of one may be read in either layout
        return cls(call.input, kernel_of(weight), bias) if as_good_by_pixels(x, weight, bias) else None

    def compute(self, env: Env) -> Tensor:
        """See `Imaged`: (1, out_features, 1, rows)."""
        return F.conv2d(image_of(env[self.given]), self.kernel, self.bias)

    def image_of(self, x: Tensor) -> Tensor:
        """See `Imaged`."""
        return image_of(x)

    def back(self, image: Tensor, size: torch.Size) -> Tensor:
        """See `Imaged`."""
        return rows_of(image, size[:-1])


@dataclass(frozen=True)
class RowConvolution:
    """A convolution over one axis as one over the pixels of a row, whose channels lie last.

    Args:
        spelling: The convolution of the image, (batch, channels, 1, length).
    """

    spelling: Spelling

    @classmethod
    def of(cls, call: Call | None, env: Env) -> RowConvolution | None:
        """A call of a convolution as such; None where it is none.

        Args:
            call: The call.
            env: The values of the nodes in the sample.
        """
        spelling = None if call is None or call.operation is not CONV else row_convolution(call, env)
        return None if spelling is None else cls(spelling)

    def compute(self, env: Env) -> Tensor:
        """See `Imaged`."""
        return self.spelling(env)

    def image_of(self, x: Tensor) -> Tensor:
        """See `Imaged`."""
        return as_row(x)

    def back(self, image: Tensor, size: torch.Size) -> Tensor:
        """See `Imaged`."""
        return image.squeeze(2)

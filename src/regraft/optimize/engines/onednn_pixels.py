"""Linear layers as convolutions for which each row is a pixel, where those keep up with products here.

What follows a layer has to be computed of the image, too, for only then does it go into the same kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from regraft.core.vocabulary import LINEAR, Call
from regraft.transformations._packed_linear import as_good_by_pixels
from regraft.transformations._pixels import image_of, kernel_of


@dataclass(frozen=True)
class PixelLayer:
    """A linear layer as such a convolution.

    Args:
        given: What it is given.
        kernel: Its weight, (out_features, in_features, 1, 1).
        bias: (out_features,), or None.
    """

    given: Node
    kernel: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, call: Call | None, env: Mapping[Node, Any], steady: Mapping[Node, Tensor]) -> PixelLayer | None:
        """A call of a layer as a convolution; None where it is none, or is slower so.

        Args:
            call: The call.
            env: The values of the nodes in the sample.
            steady: Those that are the same in each call.
        """
        if call is None or call.operation is not LINEAR:
            return None
        given = (call["weight"], call["bias"])
        weight, bias = (steady.get(each) if isinstance(each, Node) else each for each in given)
        if not isinstance(weight, Tensor) or (bias is None and call["bias"] is not None):
            return None
        x = env[call.input]
        if not x.is_cpu or x.dtype is not weight.dtype or weight.ndim != 2 or min(weight.shape) < 2 or not x.numel():
            return None  # an image of one channel may be read in either layout
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        return cls(call.input, kernel_of(weight), bias) if as_good_by_pixels(x, weight, bias) else None

    def compute(self, env: Mapping[Node, Any]) -> Tensor:
        """The result, (1, out_features, 1, rows).

        Args:
            env: The values of the nodes.
        """
        return F.conv2d(image_of(env[self.given]), self.kernel, self.bias)

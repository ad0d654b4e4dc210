"""Rows as the pixels of an image, for a linear layer that is computed as a convolution of one pixel by one.

oneDNN has other kernels for convolutions than for products, and without AVX-512 they are the faster ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def image_of(x: Tensor) -> Tensor:
    """(..., channels) as one image of one line, (1, channels, 1, rows), with its channels last."""
    return x.reshape(1, 1, -1, x.shape[-1]).movedim(3, 1)


def rows_of(image: Tensor, size: Sequence[int]) -> Tensor:
    """The rows of such an image, (*size, channels)."""
    return image.movedim(1, 3).reshape(*size, image.shape[1])


def kernel_of(weight: Tensor) -> Tensor:
    """The weight of a linear layer as that of a convolution."""
    return weight[:, :, None, None]

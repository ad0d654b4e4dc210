"""How a convolution pads its input, whether that is given as numbers or as a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def per_axis(setting: Any, axes: int) -> Any:
    """A setting of a convolution, one number for each axis: a function takes one for all, and a module has several.

    Args:
        setting: The stride, padding or dilation.
        axes: How many axes the kernel has.
    """
    if isinstance(setting, int) and axes:
        return (setting,) * axes
    return tuple(setting) if isinstance(setting, list) else setting


def padded_ends(padding: Any, sizes: Sequence[int], dilation: Any) -> tuple[tuple[int, int], ...]:
    """What is put before and after each axis. Where "same" cannot be even, torch puts one more after it.

    Args:
        padding: Numbers, one or one for each axis, `"same"`, or `"valid"`.
        sizes: The size of the kernel along each axis.
        dilation: One number, or one for each axis.

    >>> padded_ends("same", (3, 4), 1), padded_ends("valid", (3,), (2,)), padded_ends(1, (3, 3), 1)
    (((1, 1), (1, 2)), ((0, 0),), ((1, 1), (1, 1)))
    """
    axes = len(sizes)
    if padding == "same":
        reaches = [step * (size - 1) for size, step in zip(sizes, per_axis(dilation, axes), strict=True)]
        return tuple((reach // 2, reach - reach // 2) for reach in reaches)
    return tuple((size, size) for size in ((0,) * axes if padding == "valid" else per_axis(padding, axes)))

"""Which transformations `optimize` tries, and in which order: the table, and how a name becomes transformations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from regraft.core.transformation import Transformation
from regraft.transformations import TRANSFORMATIONS

# Simplify first, because what is gone hides nothing; then fold constants into weights; then fuse and merge; pack last,
# because nothing matches a packed layer any more. A name that this version of regraft does not have is passed over.
_SIMPLIFY = ("RemoveDeadWork", "FoldBatchNorm", "SumConvs", "FusePad", "ReplaceEinsum", "ReplaceMatmul")
_ATTEND = ("FuseAttention", "PadAttention")
_FUSE = (*_ATTEND, "FuseNorm", "FuseGelu", "HoistActivation", "FoldScale", "ChangeTrueDivToMulByInverse")
_TIDY = ("RemoveDeadWork", "RemoveUnreadRows")  # what was there for a norm that is folded; queries, before they merge
_MERGE = ("MergeLinears",)  # no convolutions: to read some channels of many takes longer than to read an image again
PACKING = ("PrepackForCpu",)

FOR_TORCH = (*PACKING, "MergeLinears", "FusePad", "PadAttention")
"""What pays with torch's kernels alone: OpenVINO is no slower without the others, often faster."""

LARGE = 2 << 30
"""Bytes of weights beyond which nothing is done unasked that takes room for the weights once more."""

OTHER_KERNELS = 4.0
"""How many times the reference's error is allowed where other kernels run, those of packed layers or of an engine: they
order sums otherwise, and there are as many in a row as the model is deep."""

# What the presets ask for where that is not what a transformation does by itself.
SETTINGS: dict[str, dict[str, Any]] = {"FoldScale": {"layer_norms": False}}

PRESETS: dict[str, tuple[str, ...]] = {
    # computes the same, to within the rounding that the model has itself
    "exact": (*_SIMPLIFY, *_FUSE, *_TIDY, *_MERGE, *PACKING),
    # also what changes the result by more than that; the error is shown
    "fast": (*_SIMPLIFY, *_FUSE, *_TIDY, "ReplaceActivation", *_MERGE, "ReducePrecision", *PACKING),
    # what a compiler does not find by itself, and nothing that it does better
    "compile": (*_SIMPLIFY, "FuseAttention", "RemoveUnreadRows", *_MERGE),
}


def resolve(transformations: Any) -> tuple[Transformation, ...]:
    """The transformations that a caller of `optimize` asked for.

    Args:
        transformations: None, a preset's name, the name of a transformation, a transformation, or several.

    Raises:
        TypeError: It is none of these; the message shows what would be.
        ValueError: It is a name that nothing has.

    Example:
        >>> [type(t).__name__ for t in resolve("MergeLinears")]
        ['MergeLinears']
    """
    if transformations is None:
        transformations = "exact"
    if isinstance(transformations, str):
        return _named(transformations)
    if isinstance(transformations, Transformation):
        return (transformations,)
    if isinstance(transformations, Sequence):
        return tuple(part for one in transformations for part in _one(one))
    raise _wrong(transformations)


def _one(item: object) -> tuple[Transformation, ...]:
    if isinstance(item, Transformation):
        return (item,)
    if isinstance(item, str):
        return _named(item)
    raise _wrong(item)


def _named(name: str) -> tuple[Transformation, ...]:
    known = {cls.__name__: cls for cls in TRANSFORMATIONS}
    if name in known:
        return (known[name](),)
    if name not in PRESETS:
        raise ValueError(
            f"transformations={name!r} is no preset ({', '.join(PRESETS)}) and no transformation "
            f"({', '.join(sorted(known))})"
        )
    return tuple(made for part in PRESETS[name] if part in known and (made := _for_a_preset(known[part])) is not None)


def _for_a_preset(cls: type[Transformation]) -> Transformation | None:
    try:
        return cls(**SETTINGS.get(cls.__name__, {}))
    except TypeError:  # it has no defaults: nothing that a preset could decide for the caller
        return None


def _wrong(item: object) -> TypeError:
    if isinstance(item, type) and issubclass(item, Transformation):
        return TypeError(f"transformations has the class {item.__name__}; make one: {item.__name__}()")
    if isinstance(item, nn.Module):
        return TypeError("transformations is a model; the call is regraft.optimize(model, args, kwargs)")
    return TypeError(
        f"transformations is a {type(item).__name__}, but takes a preset's name, a transformation or several: "
        'regraft.optimize(model, args, transformations=["exact", regraft.MergeLinears()])'
    )

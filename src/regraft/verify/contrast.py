"""Lay a candidate's run beside the reference's: structure, plain values, integers, and floating-point outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from regraft.verify.compare import Measured, Rule
from regraft.verify.errors import measure
from regraft.verify.oracle import Truth
from regraft.verify.result import Leaf
from regraft.verify.run import Run
from regraft.verify.tree import Opaque, Tree, computable, same_class, unsupported

Numbers = dict[str, Measured]

_AFTER = " after the call"


def contrast(truth: Truth, candidate: Run, before: Tree, rule: Rule) -> tuple[list[Leaf], list[str], Numbers]:
    """Compare one run of the candidate with the reference.

    Args:
        truth: The reference.
        candidate: The candidate's run on the same inputs.
        before: The inputs as they were, to tell which were changed in place.
        rule: How much may differ.

    Returns:
        A result per output, what is wrong with the structure, and the numbers of the floating-point outputs.

    Raises:
        TypeError: for outputs that cannot be compared (sparse, nested, quantized, meta).
    """
    leaves: list[Leaf] = []
    numbers: Numbers = {}
    others = (truth.exact, truth.coarse, truth.rounded)
    ours, theirs = _changed(before, truth.own.inputs, candidate.inputs)
    wrote, writes, problems = _written(truth.own, candidate)
    sides = [
        (truth.own.output, candidate.output, [one and one.output for one in others], ""),
        (ours, theirs, [one and one.inputs for one in others], _AFTER),
        (wrote, writes, [one and Tree(_named(one.written)) for one in others], _AFTER),
    ]
    for own, other, trees, suffix in sides:
        problems += _structure(own, other, suffix) if own is not wrote else []
        for name in own.leaves.keys() & other.leaves.keys():
            wanted, found = own.leaves[name], other.leaves[name]
            true, rough, rounded = (tree and tree.leaves.get(name) for tree in trees)
            leaf, measured = _leaf(name + suffix, wanted, found, true, rough, rounded, rule)
            leaves.append(leaf)
            if measured is not None:
                numbers[leaf.name] = measured
    order = {name: i for i, name in enumerate(own.leaves | dict.fromkeys(truth.own.output.leaves))}
    leaves.sort(key=lambda leaf: (leaf.name.endswith(_AFTER), order.get(leaf.name, 0)))
    return leaves, problems, numbers


def _structure(own: Tree, other: Tree, suffix: str) -> list[str]:
    problems = []
    for name, cls in own.containers.items():
        found = other.containers.get(name)
        if found is not None and not same_class(cls, found):
            problems.append(f"{name}{suffix} is a {found.__name__} where the reference gives a {cls.__name__}")
        elif found is None and name in other.leaves:
            kind = type(other.leaves[name]).__name__
            problems.append(f"{name}{suffix} is a {kind} where the reference gives a {cls.__name__}")
    known, theirs = own.leaves | own.containers, other.leaves | other.containers
    missing = [name for name in (*own.leaves, *own.empty) if name not in theirs and _top(name, theirs)]
    problems += [f"{name}{suffix} is missing" for name in missing]
    added = [name for name in (*other.leaves, *other.empty) if name not in known]
    problems += [f"{name}{suffix} is not an output of the reference" for name in added]
    problems += [
        f"{name}{suffix} is a {other.containers[name].__name__} where the reference gives a {type(leaf).__name__}"
        for name, leaf in own.leaves.items()
        if name in other.containers
    ]
    return problems


def _top(name: str, theirs: dict[str, object]) -> bool:
    # Below a container that is itself of another kind, the missing leaves are no news.
    return not any(name.startswith(f"{other}{mark}") for other in theirs for mark in ".[<" if _is_leaf(theirs[other]))


def _is_leaf(value: object) -> bool:
    return not isinstance(value, type)


def _changed(before: Tree, own: Tree, other: Tree) -> tuple[Tree, Tree]:
    """Only what either side changed in its inputs."""
    same = {
        name
        for name, value in before.leaves.items()
        if name in own.leaves and name in other.leaves
        if _identical(value, own.leaves[name]) and _identical(value, other.leaves[name])
    }
    kept = [{n: v for n, v in tree.leaves.items() if n not in same} for tree in (own, other)]
    return Tree(kept[0], dict(own.containers), own.empty), Tree(kept[1], dict(other.containers), other.empty)


def _written(own: Run, candidate: Run) -> tuple[Tree, Tree, list[str]]:
    """The buffers that both sides wrote to, and which one alone did, of those that both are known to have.

    Of a candidate that is a function nobody knows which it has; what it writes to of the reference's own is seen.
    """
    mine = {name: value for name, value in own.written.items() if name in candidate.buffers | candidate.written.keys()}
    theirs = {name: value for name, value in candidate.written.items() if name in own.buffers}
    lost, added = own.changed & (mine.keys() - theirs.keys()), candidate.changed & (theirs.keys() - mine.keys())
    problems = [f"buffer {name} is not written to; the reference does so" for name in mine if name in lost]
    problems += [f"buffer {name} is written to; the reference does not do so" for name in theirs if name in added]
    return Tree(_named(mine)), Tree(_named(theirs)), problems


def _named(buffers: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {f"buffer {name}": value for name, value in buffers.items()}


def _identical(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or unsupported(one) or unsupported(other):
            return False
        one, other = computable(one), computable(other)
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(one != one, other != other)
    return type(one) is type(other) and (isinstance(one, Opaque) or _equal(one, other))


def _equal(one: object, other: object) -> bool:
    return bool(one == other) or (isinstance(one, float) and isinstance(other, float) and one != one and other != other)


def _leaf(
    name: str, wanted: object, found: object, true: object, rough: object, rounded: object, rule: Rule
) -> tuple[Leaf, Measured | None]:
    for side, value in (("the reference's", wanted), ("the candidate's", found)):
        why = unsupported(value) if isinstance(value, torch.Tensor) else None
        if why is not None:
            raise TypeError(f"verify compares dense tensors: {side} {name} {why}")
    if type(wanted) in (float, complex) and type(found) is type(wanted):
        number = torch.float64 if type(wanted) is float else torch.complex128
        true, rough, rounded = (
            torch.tensor(value, dtype=number) if isinstance(value, (float, complex)) else None
            for value in (true, rough, rounded)
        )
        leaf, measured = _leaf(
            name, torch.tensor(wanted, dtype=number), torch.tensor(found, dtype=number), true, rough, rounded, rule
        )
        return Leaf(**dict(vars(leaf), dtype=type(wanted).__name__)), measured
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return _value(name, wanted, found), None
    return _tensor(name, wanted, found, true, rough, rounded, rule)


def _value(name: str, wanted: object, found: object) -> Leaf:
    kind = (wanted.cls if isinstance(wanted, Opaque) else type(wanted)).__name__
    if type(wanted) is not type(found):
        other = f"is a {type(found).__name__} where the reference gives a {kind}"
        return Leaf(name, False, kind, problem=other, candidate_error=math.inf)
    if isinstance(wanted, Opaque) and isinstance(found, Opaque):
        right = same_class(wanted.cls, found.cls)
    else:
        right = _equal(wanted, found)
    problem = None if right else f"is {_short(found)} where the reference gives {_short(wanted)}"
    return Leaf(name, right, kind, problem=problem, candidate_error=0.0 if right else math.inf)


def _short(value: object) -> str:
    text = repr(value.cls) if isinstance(value, Opaque) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _tensor(
    name: str, wanted: torch.Tensor, found: torch.Tensor, true: object, rough: object, rounded: object, rule: Rule
) -> tuple[Leaf, Measured | None]:
    dtype, shape = str(wanted.dtype).removeprefix("torch."), tuple(wanted.shape)
    for what, one, other in (
        ("dtype", wanted.dtype, found.dtype),
        ("shape", shape, tuple(found.shape)),
        ("device", wanted.device, found.device),
    ):
        if one != other:
            problem = f"has the {what} {other} where the reference's is {one}"
            return Leaf(name, False, dtype, shape, problem=problem, candidate_error=math.inf), None
    comparable = isinstance(true, torch.Tensor) and true.shape == wanted.shape
    if not (wanted.dtype.is_floating_point or wanted.is_complex()):
        return _integers(name, wanted, found, true if comparable and isinstance(true, torch.Tensor) else None), None
    # A leaf that stayed in low precision in the float64 run is rounded itself, and says nothing about rounding.
    exact = true if isinstance(true, torch.Tensor) and true.dtype in (torch.float64, torch.complex128) else None
    exact = exact if comparable else None
    spread = None
    if exact is not None and isinstance(rough, torch.Tensor) and rough.shape == wanted.shape:
        wide = torch.promote_types(wanted.dtype, torch.float64)
        spread = (rough.to(wide) - wanted.to(wide)) * (torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps)
        spread = torch.view_as_real(spread).abs() if spread.is_complex() else spread.abs()
    moved = rounded if isinstance(rounded, torch.Tensor) and rounded.shape == wanted.shape else None
    measured = measure(wanted, found, exact, spread, rule, moved)
    return leaf_from(name, dtype, shape, measured), measured


def leaf_from(name: str, dtype: str, shape: tuple[int, ...], m: Measured) -> Leaf:
    """The result for one floating-point output."""
    at = f"[{', '.join(map(str, m.where))}]" if m.where else ""
    problem = f"{m.problem}, at {at}" if m.problem and at else m.problem
    if problem is None and not m.within:
        by_rms = m.candidate_error <= m.allowed
        measure_of = "root mean square" if by_rms else "largest"
        error, base, allowed = m.candidate_error, m.reference_error, m.allowed
        if by_rms:
            error, base, allowed = m.candidate_rms, m.reference_rms, m.allowed_rms
        problem = (
            f"is off: its {measure_of} error is {error:.3g} of the output's magnitude, "
            f"{allowed:.3g} is allowed, the reference's own is {base:.3g}"
            + (f"; the worst place is {at}" if at else "")
            + f"; it differs from the reference by up to {m.max_abs:.3g}"
        )
    note = f"has {m.jumps} elements decided by the reference's own rounding" if m.jumps else None
    return Leaf(
        name,
        problem is None,
        dtype,
        shape,
        m.max_abs,
        m.max_rel,
        m.cosine,
        m.reference_error,
        m.candidate_error,
        m.ratio,
        m.allowed,
        m.where,
        problem,
        note,
    )


def _integers(name: str, wanted: torch.Tensor, found: torch.Tensor, true: torch.Tensor | None) -> Leaf:
    """Integers and booleans must be equal.

    Except where the reference differs from its own float64 run: there rounding decided (an argmax near a tie), and
    the float64 answer is as good.
    """
    dtype, shape = str(wanted.dtype).removeprefix("torch."), tuple(wanted.shape)
    differs = wanted != found
    decided = torch.zeros_like(differs)
    if true is not None and true.dtype == wanted.dtype:
        decided = differs & (wanted != true.to(wanted.device)) & (found == true.to(found.device))
    wrong = differs & ~decided
    if not bool(wrong.any()):
        note = f"has {int(decided.sum())} elements decided by the reference's own rounding" if decided.any() else None
        return Leaf(name, True, dtype, shape, note=note)
    first = tuple(int(i) for i in wrong.nonzero()[0])
    gap = float((wanted.to(torch.float64) - found.to(torch.float64)).abs().max())
    problem = (
        f"differs in {int(wrong.sum())} of {wrong.numel()} elements, which must be equal; first at {list(first)}: "
        f"{found[first].item()} where the reference has {wanted[first].item()}"
    )
    share = 1 - float(wrong.to(torch.float64).mean())
    return Leaf(name, False, dtype, shape, gap, gap, share, 0.0, math.inf, math.inf, 0.0, first, problem)

"""Random graphs under random compositions, undone in random order: whole steps, and single sites."""

from __future__ import annotations

import copy
import os
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import regraft as rg
from regraft.testing import assert_same_picture, fuzz, picture, programs
from regraft.testing.fuzzing import quiet, runs

ASKED = int(os.environ.get("REGRAFT_FUZZ", "0"))
SEED = time.time_ns() if ASKED else 0  # `make fuzz` draws new graphs each time
RULES = tuple(rule for rule in rg.TRANSFORMATIONS if rule is not rg.DeepCopy)


@pytest.mark.fuzz
@pytest.mark.parametrize("rule", rg.TRANSFORMATIONS, ids=lambda rule: rule.__name__)
def test_every_rule_obeys_the_laws(rule: type[rg.Transformation]) -> None:
    tally = fuzz(rule(), examples=ASKED or 12, seed=SEED)
    print(f"{rule.__name__}: {tally}")


@pytest.mark.fuzz
@settings(max_examples=ASKED or 40)
@given(programs(), st.lists(st.sampled_from(RULES), min_size=1, max_size=5), st.data())
def test_any_composition_is_undone_in_any_order(program, rules, data) -> None:
    built = runs(program)
    assume(built is not None)
    model, gm, args, kwargs = built
    with quiet():
        callers, before, reference = picture(model), picture(gm), copy.deepcopy(gm)
        t = rg.compose(*(rule() for rule in rules))
        gm = t(gm)
        if t.preserves_computation:
            assert_computes_the_same(reference, gm, args, kwargs)
        while rg.history(gm):
            undo_something(gm, data)
            if data.draw(st.integers(0, 3)) == 3 and t.preserves_computation:
                assert_computes_the_same(reference, gm, args, kwargs)
        assert_same_picture(before, picture(gm), f"undo of {[rule.__name__ for rule in rules]}")
        assert_same_picture(callers, picture(model), "the caller's model")


def undo_something(gm, data) -> None:
    """Undo a step or a site; one that something else stands on refuses, and changes nothing. Some can always go."""
    steps = rg.history(gm)
    wanted = [(step.id, None) for step in steps]
    wanted += [(step.id, site.id) for step in steps for site in step.applied]
    for step, site in data.draw(st.permutations(wanted)):
        now = picture(gm)
        try:
            rg.undo(gm, step, site=site)
        except rg.ReversalConflict:
            assert_same_picture(now, picture(gm), "a refused undo")
            assert rg.history(gm) == steps
        else:
            return
    raise AssertionError("nothing can be undone")


def assert_computes_the_same(reference, gm, args, kwargs) -> None:
    args, kwargs = copy.deepcopy(tuple(value.detach() for value in args)), {k: v.detach() for k, v in kwargs.items()}
    verdict = rg.verify(reference, gm, args, kwargs)
    assert verdict.ok, str(verdict)

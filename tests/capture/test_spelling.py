"""Every Python spelling is the same ATen call: a captured graph, exported again, gives the calls it came from."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from capture.zoo import BY_NAME, make_inputs
from regraft.capture import trace, transformers_adapter
from regraft.capture.cleaning import clean
from regraft.capture.signature import take_apart
from regraft.capture.spelling_table import FUNCTIONS, METHODS, OPERATORS
from regraft.capture.widest import Exports

#: spelled with another call that is defined as the same
ALIASES = {"aten.true_divide.Tensor": "aten.div.Tensor", "aten.lift_fresh_copy.default": "aten.clone.default"}
#: reads of sizes, and views of the whole, come and go with how a graph is run
UNCOUNTED = {
    *("aten.sym_size.int", "aten.slice.Tensor", "aten.detach.default", "aten.detach_.default"),
    *("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout"),
}


@cache
def both(name: str) -> tuple[Counter[str], Counter[str]]:
    family = BY_NAME[name]
    model, inputs = family.build(), make_inputs(family, 3, 11)
    transformers_adapter.prepare(model)
    with torch.no_grad():
        before = Exports(model, take_apart(model, (), inputs), decided=False).one([None] * len(inputs)).program
        after = torch.export.export(trace(model, (), inputs), (), dict(inputs), strict=False)
    return calls(before), calls(after)


def calls(program: Any) -> Counter[str]:
    graph = program.graph
    clean(graph, None)
    names = [str(node.target) for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(ALIASES.get(name, name) for name in names if name not in UNCOUNTED)


@pytest.mark.parametrize(
    "name", ["bert", "bert-eager", "deberta-v2", "llama", "t5", "bloom", "mixtral", "resnet", "swin", "levit", "clip"]
)
def test_export_of_the_graph_gives_the_calls_again(name: str) -> None:
    before, after = both(name)
    assert before == after


def test_no_call_that_writes_is_respelled() -> None:
    """Written as a Python operator it would be dead code to `torch.fx`, and removed."""
    for overload in (*OPERATORS, *FUNCTIONS, *METHODS):
        assert not overload._schema.is_mutable, overload

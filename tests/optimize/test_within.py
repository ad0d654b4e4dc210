"""An index beyond what it indexes is an error with every engine, as it is with the original; a row of attention that
sees no key is zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import regraft as rg
from regraft.core.errors import NotCovered
from regraft.dropin import grafts_of
from regraft.optimize.engines.flat import Flat

ROWS, COLUMNS = 5, 6


def through_a_view(x: Tensor, i: Tensor) -> Tensor:
    places = torch.zeros(2, COLUMNS, dtype=torch.long)
    places[0].copy_(i[0])
    return x[places]


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding bag": lambda x, i: F.embedding_bag(i, x),
    "index": lambda x, i: x[i[0]],
    "index of two axes": lambda x, i: x[i[0], i[1]],
    "index of the last axis": lambda x, i: x[:, i[0]],
    "index of a derived value": lambda x, i: x[i[:, 0].cumsum(0) - i[:, 0].cumsum(0) + i[0, 0]],
    "index that was written through a view": through_a_view,
    "index select": lambda x, i: x.index_select(0, i[0]),
    "index select of the last axis": lambda x, i: x.index_select(-1, i[0]),
    "gather": lambda x, i: x.gather(0, i),
    "gather of the last axis": lambda x, i: x.gather(-1, i),
    "take": lambda x, i: x.take(i),
    "take along an axis": lambda x, i: torch.take_along_dim(x, i, 0),
    "take along no axis": lambda x, i: torch.take_along_dim(x, i),
    "scatter": lambda x, i: x.scatter(0, i, x),
    "scatter a number": lambda x, i: x.scatter(0, i, 1.0),
    "scatter in place": lambda x, i: x.clone().scatter_(0, i, 1.0),
    "scatter add": lambda x, i: x.scatter_add(0, i, x),
    "scatter reduce": lambda x, i: x.scatter_reduce(0, i, x, "sum"),
    "index add": lambda x, i: x.index_add(0, i[0, :3], x[:3]),
    "index copy": lambda x, i: x.index_copy(0, i[0, :3], x[:3]),
    "index put": lambda x, i: x.index_put((i[0, :3],), x[:3]),
    "put": lambda x, i: x.put(i, x),
    "one hot": lambda x, i: F.one_hot(i, ROWS),
}


class Model(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.operation(x, i)


class Lenient(Interpreter):
    """A runtime that gives zeros where there is nothing."""

    def run_node(self, n: Node) -> object:
        try:
            return super().run_node(n)
        except (IndexError, RuntimeError):
            return pytree.tree_map_only(Tensor, lambda value: torch.zeros_like(value, device="cpu"), n.meta["val"])


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_runtime_is_asked_whether_indices_are_within(name: str) -> None:
    model = Model(OPERATIONS[name])
    x, i = torch.randn(ROWS, COLUMNS), torch.randint(0, ROWS, (ROWS, COLUMNS))
    flat = Flat(rg.trace(model, (x, i)), {"x": x, "i": i})
    graph = flat.exported().module(check_guards=False)
    run = flat.covering(lambda inputs: Lenient(graph, garbage_collect_values=False).run(*inputs))
    refused = 0
    for value in (0, ROWS - 1, -1, -ROWS, -ROWS - 1, ROWS, COLUMNS, -COLUMNS - 1, 29, 30, -30, -31, 1 << 40):
        other = i.clone()
        other[0, 0] = value
        try:
            expected = model(x, other)
        except (IndexError, RuntimeError):
            refused += 1
            with pytest.raises(NotCovered, match="an index is beyond"):
                run((x, other))
            continue
        try:
            (found,) = run((x, other))
        except NotCovered:
            assert value not in range(ROWS), "torch takes those as well, and the graph runs for them"
        else:
            assert torch.equal(found, expected)
    assert refused or name == "take along an axis"


def test_indices_that_are_the_same_in_every_call_are_not_asked() -> None:
    model = nn.Sequential(nn.Linear(COLUMNS, COLUMNS))
    model.register_buffer("order", torch.randperm(COLUMNS))
    model.forward = lambda x: model[0](x)[:, model.order]
    x = torch.randn(ROWS, COLUMNS)
    flat = Flat(rg.trace(model, (x,)), {"x": x})
    asked = {node.target for node in flat.exported().graph.nodes} & {
        torch.ops.aten.ge.Scalar,
        torch.ops.aten.all.default,
    }
    assert not asked
    found, within = flat.exported().module()(x)
    assert within
    assert torch.equal(found, model(x))


class Words(nn.Module):
    """Words, and of each text those at some places, of which there are as many as the text has words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        words = self.first(self.table(ids)).relu()
        return self.second(words.gather(1, places[..., None].expand(-1, -1, 8)))


@pytest.mark.parametrize("engine", ["onednn", "inductor", "onnxruntime", "openvino"])
def test_an_engine_raises_what_the_original_raises(engine: str) -> None:
    if engine in ("onnxruntime", "openvino"):
        pytest.importorskip(engine)
    model = Words().eval()
    ids, places = torch.randint(0, 9, (2, 5)), torch.randint(0, 5, (2, 5))
    result = rg.optimize(model, (ids, places), engine=engine, keep="all", seconds=0.01)
    assert result.graphs[0].engine.engine == engine, result
    with torch.no_grad():
        for words, where in ((-1, 0), (9, 0), (0, -1), (0, 5)):
            bad = ids.clone(), places.clone()
            bad[0][1, 2], bad[1][1, 3] = words, where
            with pytest.raises((IndexError, RuntimeError)) as expected:
                model(*bad)
            with pytest.raises(expected.type, match=str(expected.value).splitlines()[0].split("[")[0].split("(")[0]):
                result.model(*bad)
        assert not grafts_of(result.model).calls["forward"]
        longer = torch.randint(0, 9, (3, 7)), torch.full((3, 7), 6)
        assert torch.allclose(result.model(*longer), model(*longer), atol=1e-5)
        assert grafts_of(result.model).calls["forward"] == 1


class Attention(nn.Module):
    """In two layers with one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            query, key, value = layer(x)[:, None].chunk(3, -1)
            x = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, 0]
        return x


def _added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


def _padded(*lengths: int, size: int = 5) -> Tensor:
    """A mask for texts of such lengths, the padding in front; causal, so that the padding sees no key."""
    seen = torch.arange(size) >= size - torch.tensor(lengths)[:, None]
    return (seen[:, None] & torch.ones(size, size, dtype=torch.bool).tril())[:, None]


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "true and false": lambda mask: mask,
    "added": _added,
    "of each key": lambda mask: mask[:, :, -1:],
    "added of each key": lambda mask: _added(mask[:, :, -1:]),
}
BLIND = {"true and false": (3, 5), "added": (3, 5), "of each key": (0, 5), "added of each key": (0, 5)}


@pytest.mark.parametrize("form", FORMS)
def test_a_runtime_is_asked_whether_each_row_sees_a_key(form: str) -> None:
    model, x, formed = Attention().eval(), torch.randn(2, 5, 8), FORMS[form]
    flat = Flat(rg.trace(model, (x, formed(_padded(5, 5)))), {"x": x, "mask": formed(_padded(5, 5))})
    program = flat.exported()
    assert sum(node.target is torch.ops.aten.any.dim for node in program.graph.nodes) == 1
    module = program.module(check_guards=False)
    run = flat.covering(lambda inputs: module(*inputs))

    def called(mask: Tensor) -> Tensor:
        return run((x, mask))[0]

    with torch.no_grad():
        for mask in (_padded(5, 5), _padded(5, 5) | torch.eye(5, dtype=torch.bool)):
            torch.testing.assert_close(called(formed(mask)), model(x, formed(mask)))
        with pytest.raises(NotCovered, match="a row of attention sees no key"):
            called(formed(_padded(*BLIND[form])))


def test_a_mask_that_is_written_to_is_asked_again() -> None:
    class Narrowed(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mask = mask.clone()
            first = super().forward(x, mask)
            mask[..., 0] = False
            return super().forward(first, mask)

    model, x = Narrowed().eval(), torch.randn(2, 5, 8)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    flat = Flat(rg.trace(model, (x, seen)), {"x": x, "mask": seen})
    module = flat.exported().module(check_guards=False)
    run = flat.covering(lambda inputs: module(*inputs))
    with torch.no_grad():
        torch.testing.assert_close(run((x, seen))[0], model(x, seen))
    with pytest.raises(NotCovered, match="a row of attention sees no key"):
        run((x, _padded(5, 5)))  # of which the first row sees the first key alone


def test_an_engine_that_does_not_cover_the_example_is_none() -> None:
    x, mask = torch.randn(2, 5, 8), _padded(3, 5)
    flat = Flat(rg.trace(Attention().eval(), (x, mask)), {"x": x, "mask": mask})
    module = flat.exported().module(check_guards=False)
    with pytest.raises(NotCovered, match="a row of attention sees no key"):
        flat.covering(lambda inputs: module(*inputs))


@pytest.mark.parametrize("form", ["true and false", "added"])
@pytest.mark.parametrize("engine", ["onednn", "inductor", "onnxruntime", "openvino"])
def test_with_an_engine_a_row_that_sees_no_key_is_what_it_is_without(engine: str, form: str) -> None:
    if engine in ("onnxruntime", "openvino"):
        pytest.importorskip(engine)
    model, x, formed = Attention().eval(), torch.randn(2, 5, 8), FORMS[form]
    result = rg.optimize(model, (x, formed(_padded(5, 5))), engine=engine, keep="all", seconds=0.01)
    assert result.graphs[0].engine.engine == engine, result
    with torch.no_grad():
        for mask in map(formed, (_padded(5, 5), _padded(3, 5), _padded(0, 1))):
            torch.testing.assert_close(result.model(x, mask), model(x, mask), atol=1e-5, rtol=1e-5)
    assert grafts_of(result.model).calls["forward"] == 3

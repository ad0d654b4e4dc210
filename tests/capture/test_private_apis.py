"""The private names that regraft stands on are where it looks for them; a new torch or transformers is met here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import operator
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import regraft as rg
from regraft.capture import caches, torch_private, transformers_adapter
from regraft.core import fx_private, ordinary

SOURCE = Path(fx_private.__file__).parents[1]

#: a thing of torch's, and its private attributes that the source reads, wherever it does
HOLDERS = {
    nn.Linear(2, 2): "_parameters _buffers _modules _non_persistent_buffers_set _apply _forward_hooks "
    "_forward_pre_hooks _backward_hooks _backward_pre_hooks",
    torch.ones(2): "_version _backward_hooks _post_accumulate_grad_hooks",
    torch.ones(2).untyped_storage(): "_cdata",
    torch.ops.aten.relu.default: "_schema",
    forward_ad: "_current_level",
    next(iter(prune.identity(nn.Linear(2, 2), "weight")._forward_pre_hooks.values())): "_tensor_name",
    torch.fx.symbolic_trace(nn.ReLU()): "_code",
    torch.fx.Graph(): "_codegen _graph_namespace _find_nodes_lookup_table",
    torch.fx.Graph()._graph_namespace: "_used_names _base_count _rename_object",
    torch.fx.Graph().placeholder("x"): "_erased _update_args_kwargs",
}
OURS = {"_parts", "_fields"}  # of a culprit; of a named tuple, which is documented


def private_attributes() -> Iterator[tuple[str, str, str]]:
    """Where, of what and what: each attribute with an underscore that the source reads, but those of `self`."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                if owner not in ("self", "cls"):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", owner, node.attr


def private_imports() -> Iterator[tuple[str, str, str]]:
    """Where, from what and what: each import of torch's or transformers' that no documentation promises."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "transformers"):
                for alias in node.names:
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", str(node.module), alias.name


def test_every_private_name_is_where_the_source_looks_for_it() -> None:
    known = {name for names in HOLDERS.values() for name in names.split()} | OURS
    for where, owner, name in private_attributes():
        if owner.split(".")[0] in ("torch", "aten", "nn"):
            start = {"torch": torch, "aten": torch.ops.aten, "nn": nn}[owner.split(".")[0]]
            found = functools.reduce(getattr, [*owner.split(".")[1:], name], start)
            assert found is not None, where
        elif owner != "sys":
            assert name in known, f"{where} reads {owner}.{name}: enter in HOLDERS whose it is"
    for where, module, name in private_imports():
        if module.split(".")[0] in sys.modules:
            assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}"), where


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: type(holder).__name__)
def test_private_attributes(holder: object) -> None:
    assert [name for name in HOLDERS[holder].split() if not hasattr(holder, name)] == []


def test_what_private_attributes_mean() -> None:
    x = torch.ones(4)
    version = x._version
    x[1:].add_(1)
    assert x._version > version, "a write through a view counts"
    assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata != x.clone().untyped_storage()._cdata
    weight = nn.Parameter(torch.ones(2))
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks
    weight.register_hook(lambda grad: grad)
    weight.register_post_accumulate_grad_hook(lambda weight: None)
    assert weight._backward_hooks
    assert weight._post_accumulate_grad_hooks
    layer = nn.Linear(2, 2)
    layer.register_buffer("b", x, persistent=False)
    assert layer._non_persistent_buffers_set == {"b"}
    assert set(layer._parameters) == {"weight", "bias"}
    graph = torch.fx.symbolic_trace(nn.ReLU()).graph
    node = graph.call_function(torch.relu, (next(iter(graph.nodes)),))
    assert not fx_private.is_erased(node)
    graph.erase_node(node)
    assert fx_private.is_erased(node)
    schema = torch.ops.aten.add_.Tensor._schema
    assert [bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments] == [True, False, False]
    assert torch.compile(layer)._orig_mod is layer
    conv = nn.Conv2d(2, 2, 1, padding=(1, 2), padding_mode="circular")
    assert list(conv._reversed_padding_repeated_twice) == [2, 2, 1, 1]


def test_below_autograd_no_operator_asks_for_gradients() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with ordinary.below_autograd():
        assert not (x * 2).requires_grad
        assert x.view(4)._base is None
    assert (x * 2).requires_grad
    assert x.view(4)._base is x


def test_who_is_looking_on_at_a_call() -> None:
    """The state of torch by which packed layers, quantized ones and engines know an ordinary call."""
    assert ordinary.KNOWN

    def state(_: object = None) -> tuple[bool, ...]:
        return (
            bool(torch._C._len_torch_dispatch_stack()),
            bool(torch._C._is_any_autocast_enabled()),
            torch._C._get_tracing_state() is not None,
            torch._C._functorch.peek_interpreter_stack() is not None,
        )

    seen, ordinary_calls = [], []

    def looked(x: torch.Tensor) -> torch.Tensor:
        seen.append(state())
        ordinary_calls.append(ordinary.ordinary_call())
        return x * 2

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2)
    looked(x)
    with Mode():
        looked(x)
    with torch.autocast("cpu", torch.bfloat16):
        looked(x)
    torch.jit.trace(looked, (x,), check_trace=False)
    torch.vmap(looked)(x)
    torch.func.grad(lambda x: looked(x).sum())(x)
    torch.func.functionalize(looked)(x)
    assert ordinary_calls == [True, *[False] * 6]
    with forward_ad.dual_level():
        assert not ordinary.ordinary_call()
    assert ordinary.ordinary_call()
    nothing, mode, autocast, traced = [False] * 4, [True, *[False] * 3], [False, True, False, False], [False] * 4
    traced[2] = True
    transformed = [False, False, False, True]
    assert [list(s) for s in seen] == [nothing, mode, autocast, traced, transformed, transformed, transformed]
    seen.clear()
    make_fx(looked)(x)
    assert seen[0][0]
    assert isinstance(torch._C._get_mkldnn_enabled(), bool)


def test_numbers_of_dictionaries() -> None:
    assert torch_private.dict_version is torch._C._dynamo.guards.dict_version  # and not what stands for it
    layer = nn.Linear(2, 2)
    for table, change in (
        (vars(layer), lambda: setattr(layer, "in_features", 3)),
        (vars(layer), layer.train if not layer.training else layer.eval),
        (layer._parameters, lambda: setattr(layer, "weight", nn.Parameter(torch.ones(2, 2)))),
        (layer._parameters, lambda: delattr(layer, "bias")),
    ):
        before = torch_private.dict_version(table)
        assert torch_private.dict_version(table) == before
        change()
        assert torch_private.dict_version(table) != before


def test_numbers_of_dictionaries_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (id, len, lambda table: 0, lambda table: object()):
        assert not torch_private._counts(version)
    monkeypatch.delattr(torch._C._dynamo.guards, "dict_version")
    version, table = torch_private._dict_version(), {"a": 1}
    assert version(table) != version(table)


def test_the_storage_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)
    before, pointer = torch_private.storage_of(x), x.data_ptr()
    x.share_memory_()
    assert (torch_private.storage_of(x), x.data_ptr() == pointer) == (before, False)
    x.data = x.data.clone()
    assert torch_private.storage_of(x) != before
    monkeypatch.delattr(torch.multiprocessing.reductions, "StorageWeakRef")
    assert torch_private.storage_of(x) != torch_private.storage_of(x)


def test_tensors_have_values_outside_of_the_modes_of_export(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch_private.outside_of_modes():
                found.append(type(torch.arange(2)) is torch.Tensor and torch.arange(2).tolist() == [0, 1])
            return x + 1

    torch.export.export(Looks(), (torch.ones(2),), strict=False)
    assert found == [True]
    monkeypatch.delattr(torch_private.dispatch, "_disable_current_modes")
    with torch_private.outside_of_modes():
        assert torch.arange(2).tolist() == [0, 1]


def test_keywords_in_export() -> None:
    class Keywords(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x - y

    x, y = torch.ones(2), torch.zeros(2)
    gm = rg.trace(Keywords(), (x, y))
    program = torch.export.export(gm, (), {"y": y, "x": x})
    assert torch.equal(program.module()(y=y, x=x), x - y)
    assert torch_private.keywords_in_export() == []


@pytest.mark.parametrize(
    "transformed",
    [
        lambda x: torch.vmap(lambda row: row.sum())(x),
        lambda x: torch.func.grad(lambda x: (x**3).sum())(x),
        lambda x: torch.func.jvp(torch.tanh, (x,), (x,))[1],
    ],
)
def test_transformed_functions_in_an_exported_graph(transformed) -> None:
    class Transformed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return transformed(x)

    program = torch.export.export(Transformed(), (torch.ones(2, 3),), strict=False)
    assert any(torch_private.transforms_functions(node.target) for node in program.graph.nodes)
    assert not any(torch_private.transforms_functions(f) for f in (torch.tanh, operator.add, torch.ops.aten.add.Tensor))


def test_a_mask_is_causal_as_torchs_transformer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    home, causal = nn.modules.transformer, nn.Transformer.generate_square_subsequent_mask(3)
    assert home._detect_is_causal_mask(causal, None, 3) is True, "it compares"
    with torch_private.causal_as_told():
        answers = [home._detect_is_causal_mask(causal, told, 3) for told in (None, True, False)]
        assert answers == [False, True, False]
    assert home._detect_is_causal_mask(causal, None, 3) is True
    monkeypatch.delattr(home, "_detect_is_causal_mask")
    with torch_private.causal_as_told():
        assert not hasattr(home, "_detect_is_causal_mask")


def test_sizes_without_the_printer(monkeypatch: pytest.MonkeyPatch) -> None:
    value = next(iter(program().graph.nodes)).meta["val"]
    expression = torch_private.symbolic_expression(value.shape[0])
    expected = torch_private.expression_source(expression * 2 + 1)
    monkeypatch.setitem(sys.modules, "torch.utils._sympy.printers", None)
    source = torch_private.expression_source(expression * 2 + 1)
    assert eval(source, {str(expression): 5}) == eval(expected, {str(expression): 5}) == 11
    gm = rg.trace(Two(), (torch.ones(4, 2), torch.ones(4, 2)), dynamic_shapes="auto")
    assert torch.equal(gm(torch.ones(6, 2), torch.ones(6, 2)), torch.full((6, 2), 2.0))


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if x.shape[0] % 2 == 0 else x - y


class Sums(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) + y


def program() -> torch.export.ExportedProgram:
    axes = {0: torch.export.Dim.AUTO}
    return torch.export.export(Two(), (torch.ones(4, 2), torch.ones(4, 2)), dynamic_shapes=(axes, axes))


def test_graph() -> None:
    gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
    graph = gm.graph
    assert isinstance(graph._codegen, torch.fx.graph.CodeGen)
    assert isinstance(graph._graph_namespace._used_names, set)
    assert isinstance(graph._graph_namespace._base_count, dict)
    assert callable(graph._graph_namespace._rename_object)
    for name in ("_tracer_cls", "_tracer_extras", "_co_fields"):
        assert hasattr(graph, name)
    assert {"_graph", "_code"} <= fx_private.DERIVED_ATTRIBUTES & set(vars(gm))
    assert type(gm).__qualname__.endswith("GraphModuleImpl")
    assert fx_private.declared_class(gm) is torch.fx.GraphModule


def test_a_node_is_rewritten_as_by_the_public_setters() -> None:
    gm = torch.fx.symbolic_trace(Sums())
    x, y, first, second, _ = gm.graph.nodes
    fx_private.rewrite_node(second, "call_function", operator.mul, (first, 2.0), {})
    fx_private.set_meta(second, {"here": 1})
    assert (second.op, second.target, second.args, second.kwargs) == ("call_function", operator.mul, (first, 2.0), {})
    assert second.meta == {"here": 1}
    assert list(y.users) == [first]
    assert list(first.users) == [second]
    assert gm.graph.find_nodes(op="call_function", target=operator.mul) == [second]
    assert gm.graph.find_nodes(op="call_function", target=operator.add) == [first]
    fx_private.rewrite_node(second, "call_method", "neg", (x,), {})
    assert gm.graph.find_nodes(op="call_method", target="neg") == [second]
    assert list(first.users) == []
    gm.graph.lint()
    gm.recompile()
    assert gm(torch.ones(1), torch.ones(1)) == -1


def test_code_generator() -> None:
    parameters = inspect.signature(torch.fx.graph.CodeGen.gen_fn_def).parameters
    assert list(parameters)[:3] == ["self", "free_vars", "maybe_return_annotation"]
    assert "repr_fn" in inspect.signature(torch.fx.graph.CodeGen.generate_output).parameters


def test_exported_program() -> None:
    exported = program()
    assert any("%" in guard for guard in torch_private.guards_of(exported)), exported
    assert all("L['x']" in guard or "L['y']" in guard for guard in torch_private.guards_of(exported))
    value = next(iter(exported.graph.nodes)).meta["val"]
    expression = torch_private.symbolic_expression(value.shape[0])
    assert expression.is_Symbol
    assert torch_private.expression_source(expression * 2 + 1)
    assert {"max", "min"} <= {*torch_private.guard_functions(), *dir(__builtins__), "max", "min"}
    node = next(node for node in exported.graph.nodes if node.op == "call_function")
    assert "stack_trace" in node.meta


@pytest.mark.parametrize("involved", [False, True])
def test_calls_that_make_tensors_of_involved_sizes_are_not_looked_up(involved: bool) -> None:
    looked_up: list[Any] = []

    class Padded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.pad(x, (0, (7 - x.shape[1] % 7) % 7 if involved else 1))[:, ::2]
            looked_up.append(getattr(getattr(x, "fake_mode", None), "cache_enabled", None))
            return x

    x = torch.randn(2, 56)
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True):  # which is off in most tests
        gm = rg.trace(Padded(), (x,), dynamic_shapes="auto")
    assert looked_up[0] is not involved
    assert torch.equal(gm(x[:, :51]), Padded()(x[:, :51]))


def test_what_is_no_stand_in_has_no_calls_to_look_up() -> None:
    torch_private.remember_no_calls(torch.ones(1))


def test_shape_environment() -> None:
    env = ShapeEnv()
    assert isinstance(env.backed_var_to_val, dict)
    assert isinstance(env.var_to_range, dict)
    assert callable(env.create_symintnode)


def test_pytree() -> None:
    leaves, spec = torch_private.tree_flatten({"a": [1, (2, None)], "b": torch.Size([3])})
    assert torch_private.tree_unflatten(leaves, torch_private.unpack_spec(torch_private.pack_spec(spec))) == {
        "a": [1, (2, None)],
        "b": torch.Size([3]),
    }
    assert torch_private.unpack_spec(torch_private.pack_spec(spec)) == spec
    assert [path for path, _ in torch_private.tensor_paths({"a": [1, 2]})] == ["['a'][0]", "['a'][1]"]


def test_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers import masking_utils
    from transformers.exporters import exporter_dynamo
    from transformers.exporters.utils import apply_patches
    from transformers.integrations import sdpa_attention

    assert callable(exporter_dynamo.register_cache_pytrees_for_model)
    assert callable(exporter_dynamo.register_pytree_node)
    with apply_patches("dynamo"):
        pass
    # it is asked for by this name where a mask is made, and so it can be replaced there
    assert masking_utils.is_torchdynamo_exporting() is False
    assert "is_torchdynamo_exporting()" in inspect.getsource(masking_utils)
    replaced = ("is_torchdynamo_exporting", "_vmap_expansion_sdpa", "TransformGetItemToIndex")
    before = [getattr(masking_utils, name) for name in replaced]
    with transformers_adapter._as_run(nn.ReLU()):
        assert masking_utils.is_torchdynamo_exporting.__module__ == transformers_adapter.__name__
        assert not any(getattr(masking_utils, name) is was for name, was in zip(replaced, before, strict=True))
        along_axes = masking_utils._vmap_expansion_sdpa
        assert sdpa_attention.is_torchdynamo_compiling.__module__ == transformers_adapter.__name__
    assert [getattr(masking_utils, name) for name in replaced] == before
    assert sdpa_attention.is_torchdynamo_compiling.__module__ != transformers_adapter.__name__
    assert "not is_torchdynamo_compiling()" in inspect.getsource(sdpa_attention.sdpa_attention_forward)

    def mask(text: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (text + query > key * 2)

    numbers = [torch.arange(n) for n in (2, 1, 4, 5)]
    with masking_utils.TransformGetItemToIndex():
        expected = masking_utils._vmap_expansion_sdpa(mask)(*numbers)
    assert expected.shape == (2, 1, 4, 5)
    assert torch.equal(along_axes(mask)(*numbers), expected)
    assert along_axes(lambda *_: torch.tensor(True))(*numbers).shape == (2, 1, 4, 5)
    assert torch.equal(
        along_axes(lambda text, *_: text > 0)(*numbers), (numbers[0] > 0).view(2, 1, 1, 1).expand(2, 1, 4, 5)
    )


def test_the_hooks_of_transformers_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=16)).eval()
    seen: list[bool] = []
    model.encoder.register_forward_pre_hook(lambda module, args: seen.append(transformers_adapter.collects()))
    ids = torch.ones(1, 3, dtype=torch.long)
    model(ids)
    assert not any(map(transformers_adapter.is_collector, hooks_of(model)))
    model(ids, output_hidden_states=True)
    assert any(map(transformers_adapter.is_collector, hooks_of(model)))
    assert not all(map(transformers_adapter.is_collector, hooks_of(model)))
    assert seen == [False, True]
    assert not transformers_adapter.collects()
    collector = importlib.import_module("transformers.utils.output_capturing")._active_collector

    def collecting(x: torch.Tensor, wanted: list[str]) -> torch.Tensor:
        token = collector.set({name: [] for name in wanted})
        result = x + int(transformers_adapter.collects(torch.compiler.is_compiling()))
        collector.reset(token)
        return result

    for run in (collecting, torch.compile(collecting, backend="eager", fullgraph=True)):
        assert [int(run(torch.zeros(()), wanted)) for wanted in ([], ["attentions"])] == [0, 1]


def test_outputs_are_made_as_their_classes_make_them() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = importlib.import_module("transformers.modeling_outputs")
    defined = [kind for kind in vars(outputs).values() if getattr(kind, "__module__", None) == outputs.__name__]
    kinds = [kind for kind in defined if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    assert len(kinds) > 40
    for kind in kinds:
        fields = [field.name for field in dataclasses.fields(kind)]
        for names in filter(None, (fields[:1], fields[1:2], fields[::2], fields)):
            values = [torch.ones(()) for _ in names]
            expected = kind(**dict(zip(names, [*values[:-1], (*values,)] if len(names) > 1 else values, strict=True)))
            leaves, spec = pytree.tree_flatten(expected)
            maker = transformers_adapter.output_maker(spec)
            assert maker is not None
            found = torch_private.unflattener(spec, transformers_adapter.output_maker)(leaves)
            assert type(found) is kind
            to_tuple = transformers.utils.ModelOutput.to_tuple  # those of several modalities ask parts of theirs, too
            assert to_tuple(found) == to_tuple(expected)
            assert list(found.items()) == list(expected.items())
            assert vars(found) == vars(expected)
            found[names[0]] = torch.zeros(())
            assert getattr(found, names[0]) == 0
            assert pickle.loads(pickle.dumps(found)).keys() == expected.keys()


def test_outputs_that_their_classes_make_otherwise_are_left_to_them() -> None:
    transformers = pytest.importorskip("transformers")

    @dataclasses.dataclass
    class Counted(transformers.utils.ModelOutput):
        first: torch.Tensor | None = None
        count: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.first.ndim:  # which a single try does not show
                vars(self)["count"] = len(self)

    @dataclasses.dataclass(init=False)
    class Named(transformers.utils.ModelOutput):
        first: torch.Tensor | None = None

        def __init__(self, first: torch.Tensor) -> None:
            vars(self)["name"] = "whatever"
            self.first = first

    @dataclasses.dataclass(init=False)
    class Strict(transformers.utils.ModelOutput):
        first: torch.Tensor | None = None

        def __init__(self, first: torch.Tensor) -> None:
            if not first.ndim:
                raise ValueError("a number is no row")
            self.first = first

    alone = transformers.modeling_outputs.BaseModelOutput((torch.ones(2), torch.ones(3)))
    late = transformers.modeling_outputs.BaseModelOutput(hidden_states=(torch.ones(2),))
    late.last_hidden_state = torch.ones(3)  # in another order than that of the fields
    for output in (
        Counted(torch.ones(2)),
        Named(torch.ones(2)),
        Strict(torch.ones(2)),
        alone,
        late,
        (torch.ones(2),),
        {"a": torch.ones(2)},
    ):
        leaves, spec = pytree.tree_flatten(output)
        assert transformers_adapter.output_maker(spec) is None, output
        found = torch_private.unflattener(spec, transformers_adapter.output_maker)(leaves)
        assert type(found) is type(output)


def hooks_of(model: nn.Module) -> list[Any]:
    tables = [table for module in model.modules() for table in (module._forward_hooks, module._forward_pre_hooks)]
    return [hook for table in tables for hook in table.values()]


def filled(library, windows: tuple[int, ...], tokens: int = 5):
    """A cache that transformers has filled itself, a layer for each window."""
    cache = library.DynamicCache()
    cache.layers = [
        library.DynamicSlidingWindowLayer(sliding_window=w) if w else library.DynamicLayer() for w in windows
    ]
    for index in range(len(windows)):
        cache.update(torch.randn(1, 2, tokens, 3), torch.randn(1, 2, tokens, 3), index)
    return cache


def test_caches_come_back_as_transformers_made_them() -> None:
    library = pytest.importorskip("transformers.cache_utils")
    for windows in [(0, 0), (4, 0, 4), (8,)]:
        cache = filled(library, windows)
        state = caches.state_of(cache)
        assert state is not None
        other = caches.restore(state.form, state.leaves)
        for one, two in zip(cache.layers, other.layers, strict=True):
            assert vars(one).keys() == vars(two).keys()
            assert all(_same(vars(one)[name], vars(two)[name]) for name in vars(one)), vars(two)
        for index in range(len(windows)):  # and it goes on as the original does
            more = torch.randn(1, 2, 2, 3), torch.randn(1, 2, 2, 3)
            assert _same(cache.update(*more, index), other.update(*more, index))
            assert cache.get_seq_length(index) == other.get_seq_length(index)
            assert cache.get_mask_sizes(1, index) == other.get_mask_sizes(1, index)
    pair = library.EncoderDecoderCache(filled(library, (0,)), filled(library, (0,)))
    pair.is_updated[0] = True
    state = caches.state_of(pair)
    assert state is not None
    assert caches.restore(state.form, state.leaves).is_updated == {0: True}


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    "moved",
    [
        {"DynamicSlidingWindowLayer": None},
        {"EncoderDecoderCache": None},
        {"DynamicLayer": lambda: SimpleNamespace(keys=None, values=None)},
        {"DynamicSlidingWindowLayer": lambda sliding_window: SimpleNamespace(keys=None, values=None)},
    ],
)
def test_a_cache_that_has_moved_stays_what_it_is(moved, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("transformers.cache_utils")
    cache = filled(library, (0,))
    other = ModuleType(library.__name__)
    vars(other).update({**vars(library), **moved})
    assert caches.state_of(cache) is not None
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", other)
    assert caches.state_of(cache) is None


def test_a_transformers_that_cannot_be_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        """As transformers is: a name of it is imported when it is asked for, be it that it fails."""

        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError(f"Could not import module {name!r}")

    monkeypatch.setitem(sys.modules, "transformers", Lazy("transformers"))
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    model, x = nn.Linear(2, 2).eval(), torch.randn(3, 2)
    assert torch.equal(rg.optimize(model, (x,), keep="all", seconds=0.01).model(x), model(x))

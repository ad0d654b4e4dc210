"""The private names that regraft stands on are where it looks for them; a new torch or transformers is met here."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from regraft.capture import torch_private
from regraft.core import fx_private


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
    from transformers.exporters import exporter_dynamo
    from transformers.exporters.utils import apply_patches

    assert callable(exporter_dynamo.register_cache_pytrees_for_model)
    assert callable(exporter_dynamo.register_pytree_node)
    with apply_patches("dynamo"):
        pass

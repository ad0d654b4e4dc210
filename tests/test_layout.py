"""Who may import whom, who may change a graph, and the shape of a transformation's file: read off the syntax tree."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "regraft"
TRANSFORMATIONS = SOURCE / "transformations"
LONGEST_FILE = 300
LONGEST_TRANSFORMATION = 130

# A part of regraft, and the parts that it may import. What is not named here (`__init__`, `optimize`, ...) stands on
# top of the parts and may import all of them, but never the command line.
LAYERS = {
    "core": {"core"},
    "transformations": {"core", "transformations"},
    "capture": {"core", "capture"},
    "verify": {"core", "verify"},
    "testing": {"core", "capture", "verify", "testing"},
    "report": {"report", "core.history", "core.errors", "core.report", "core.journal", "core.results", "verify"},
    "cli": {""},
}
ONLY_CLI_MAY_IMPORT = "cli"
NEEDS_TORCH_ONLY = {"core", "transformations", "verify"}
OPTIONAL = {
    "transformers": {"capture"},
    "torchao": {"transformations"},
    "onnx": set(),
    "onnxscript": set(),
    "onnxruntime": set(),
    "openvino": set(),
    "rich": {"report"},
    "jinja2": {"report"},
    "matplotlib": {"report"},
    "numpy": set(),
    "safetensors": set(),
    "hypothesis": {"testing"},
}

# Who may change a GraphModule; everybody else asks `core/edit.py`, which keeps the journal.
MAY_MUTATE = (
    *("core/edit.py", "core/convert.py", "core/states.py", "core/reversal.py", "core/carry.py", "core/arithmetic.py"),
    *("core/graph_module.py", "core/graph_record.py", "core/fx_private.py", "core/snapshot.py", "core/checkpoint.py"),
    "capture/",
    "core/clone.py",  # copies: what it sets is what the original has
    # a copy, that nobody else has: without a history, and nothing of it is taken back
    *("core/inlining.py", "optimize/engines/within.py"),
)
MUTATING_METHODS = {
    *("erase_node", "create_node", "call_function", "call_module", "call_method", "placeholder", "node_copy"),
    *("graph_copy", "inserting_before", "inserting_after", "replace_all_uses_with", "replace_input_with"),
    *("update_arg", "update_kwarg", "insert_arg", "eliminate_dead_code", "on_generate_code"),
    *("add_module", "add_submodule", "set_submodule", "delete_submodule", "delete_all_unused_submodules"),
    *("register_module", "register_parameter", "load_state_dict", "__setattr__", "__delattr__"),
}
MUTATING_ATTRIBUTES = {"args", "kwargs", "target", "op", "graph", "users", "training"}
EDITORS = {"edit", "editor"}  # `edit.erase_node(...)` is how it is done

FILES = sorted(SOURCE.rglob("*.py"))
RULES = [p for p in sorted(TRANSFORMATIONS.glob("*.py")) if not p.name.startswith("_")]


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_of(path: Path) -> str:
    """`core/edit.py` is `core.edit`; a package's `__init__` is the package."""
    return ".".join(part for part in path.relative_to(SOURCE).with_suffix("").parts if part != "__init__")


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Every import as (dotted name, line, whether it waits inside a function or for a type checker)."""
    package = ["regraft", *path.relative_to(SOURCE).parent.parts]

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from regraft import core` names a part only in its last word.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "regraft" else [module]
            if module.startswith("regraft."):
                inside = SOURCE.joinpath(*module.split(".")[1:])
                names = [
                    f"{module}.{alias.name}" if (inside / f"{alias.name}.py").exists() else module
                    for alias in node.names
                ]
            yield from ((name, node.lineno, lazy) for name in names)
        waits = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy or waits or checking)

    return visit(parse(path), False)


def starts(module: str, prefix: str) -> bool:
    return not prefix or module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    part = module_of(path).split(".")[0]
    wrong = []
    for name, line, _ in imports(path):
        if not starts(name, "regraft"):
            continue
        module = name.removeprefix("regraft").lstrip(".")
        if starts(module, ONLY_CLI_MAY_IMPORT) and module and part != "cli":
            wrong.append(f"{name_of(path)}:{line} imports {name}: nothing imports the command line")
        elif part in LAYERS and not any(starts(module, allowed) for allowed in LAYERS[part]):
            may = ", ".join(sorted(LAYERS[part]))
            wrong.append(f"{name_of(path)}:{line} imports {name}: `{part}` may import only {may}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_torch_and_nothing_else_unless_lazily(path: Path) -> None:
    part = module_of(path).split(".")[0]
    wrong = []
    for name, line, lazy in imports(path):
        root = name.split(".")[0]
        where = f"{name_of(path)}:{line} imports {name}"
        if root in {"regraft", "__future__"} or root in sys.stdlib_module_names:
            continue
        if root == "torch":
            if part == "report" and starts(name, "torch.fx"):
                wrong.append(f"{where}: a report reads results, never a graph")
            continue
        if root not in OPTIONAL:
            wrong.append(f"{where}: regraft depends on torch alone")
        elif not lazy:
            wrong.append(f"{where} at module level: import an optional package inside the function that needs it")
        elif part not in OPTIONAL[root] and (part in NEEDS_TORCH_ONLY or (part in LAYERS and part != "cli")):
            wrong.append(f"{where}: not the business of `{part}`")
    assert not wrong, "\n".join(wrong)


def mutations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
            receiver = node.func.value
            last = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", None)
            if last not in EDITORS:
                yield node.lineno, f"calls {ast.unparse(node.func)}()"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
            yield node.lineno, f"calls {node.func.id}()"
        for target in assigned(node):
            if isinstance(target, ast.Attribute) and target.attr in MUTATING_ATTRIBUTES and not is_self(target.value):
                yield node.lineno, f"assigns {ast.unparse(target)}"


def assigned(node: ast.AST) -> Iterator[ast.expr]:
    """The single targets of an assignment or a deletion, tuples taken apart."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign | ast.Delete)
        else [node.target]
        if isinstance(node, ast.AugAssign | ast.AnnAssign)
        else []
    )
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@pytest.mark.parametrize("path", [p for p in FILES if not name_of(p).startswith(MAY_MUTATE)], ids=name_of)
def test_only_the_editor_changes_graphs(path: Path) -> None:
    wrong = [f"{name_of(path)}:{line} {what}: go through core/edit.py" for line, what in mutations(parse(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_outgrows_its_reader(path: Path) -> None:
    longest = LONGEST_TRANSFORMATION if path in RULES else LONGEST_FILE
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= longest, f"{name_of(path)} has {lines} lines, more than {longest}: take it apart"


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def public_classes(path: Path) -> list[str]:
    return [n.name for n in parse(path).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def registry() -> list[str] | None:
    """The names in the tuple `TRANSFORMATIONS`, or None where there is none."""
    init = TRANSFORMATIONS / "__init__.py"
    for node in parse(init).body if init.exists() else []:
        if any(isinstance(t, ast.Name) and t.id == "TRANSFORMATIONS" for t in assigned(node)):
            assert isinstance(node.value, ast.Tuple), "TRANSFORMATIONS is a tuple, written out"
            return [ast.unparse(element) for element in node.value.elts]
    return None


@pytest.mark.parametrize("path", RULES, ids=name_of)
def test_one_transformation_one_file_one_name(path: Path) -> None:
    classes = public_classes(path)
    assert len(classes) == 1, f"{name_of(path)} has the public classes {classes}: it must have exactly one"
    assert snake_case(classes[0]) == path.stem, f"{classes[0]} belongs in {snake_case(classes[0])}.py, not {path.name}"
    functions = [n.name for n in parse(path).body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    assert not functions, f"{name_of(path)} has the public functions {functions}: its class is all it offers"
    assert classes[0] in (registry() or []), f"{classes[0]} is not in TRANSFORMATIONS of transformations/__init__.py"


def test_the_registry_names_nothing_twice_and_nothing_that_is_not_there() -> None:
    if not RULES:
        pytest.skip("no transformations yet")
    names = registry()
    assert names is not None, "transformations/__init__.py has no tuple TRANSFORMATIONS"
    assert sorted(names) == sorted(name for path in RULES for name in public_classes(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MergeLinears", "merge_linears"),
        ("FuseBatchNorm2dInConv2d", "fuse_batch_norm2d_in_conv2d"),
        ("ChangeTrueDivToMulByInverse", "change_true_div_to_mul_by_inverse"),
        ("FuseRMSNorm", "fuse_rms_norm"),
    ],
)
def test_snake_case(name: str, expected: str) -> None:
    assert snake_case(name) == expected


@pytest.mark.parametrize(
    "code",
    [
        "gm.graph.erase_node(node)",
        "with gm.graph.inserting_before(node): pass",
        "node.replace_all_uses_with(other)",
        "gm.delete_submodule('a')",
        "setattr(gm, 'a', module)",
        "node.args = (x,)",
        "node.args, y = (x,), 1",
        "del node.kwargs",
        "graph.call_function(f)",
    ],
)
def test_a_mutation_is_seen(code: str) -> None:
    assert list(mutations(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["edit.erase_node(node)", "self.args = 1", "x = node.args", "site.edit.call_module(m)"]
)
def test_what_is_not_a_mutation_passes(code: str) -> None:
    assert not list(mutations(ast.parse(code)))

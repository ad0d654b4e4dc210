"""The documentation is true: its Python runs, and the commands it names exist.

The Python blocks of one file run in order in one namespace, in a process and a folder of their own. A block that cannot
run says why: ```` ```python no-run: needs a GPU ````. Blocks that begin with `>>>` are doctests.

Run as a script with a Markdown file, this module runs that file's blocks.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS = 240

PYTHON = {"python", "py", "python3", "pycon"}
SHELL = {"bash", "sh", "shell", "console"}
OPENING = re.compile(r"^(?P<indent>\s*)(?P<fence>```+|~~~+)[ \t]*(?P<language>[\w+-]*)[ \t]*(?P<info>[^`]*)$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """One fenced block: `line` is that of its first line of code, counted from 1."""

    language: str
    info: str
    line: int
    code: str

    @property
    def runs(self) -> bool:
        return self.language in PYTHON and not self.info.startswith("no-run")


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = OPENING.match(lines[at])
        at += 1
        if not opening:
            continue
        first, indent, fence = at, opening["indent"], opening["fence"]
        while at < len(lines) and not re.fullmatch(rf"\s*{fence[0]}{{{len(fence)},}}\s*", lines[at]):
            at += 1
        assert at < len(lines), f"the block that opens in line {first} is never closed"
        code = "".join(line.removeprefix(indent) + "\n" for line in lines[first:at])
        found.append(Block(opening["language"].lower(), opening["info"].strip(), first + 1, code))
        at += 1
    return found


def run_page(path: Path) -> None:
    """Run a page's blocks; an error's traceback shows the page's own lines."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.runs and block.code.lstrip().startswith(">>>"):
            run_doctest(block, main.__dict__, path)
        elif block.runs:
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), main.__dict__)


def run_doctest(block: Block, namespace: dict[str, object], path: Path) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, {}, path.name, str(path), block.line - 1)
    test.globs = namespace
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, clear_globs=False)
    if runner.failures:
        sys.exit(f"{path.name}: the doctest in line {block.line} fails")


def python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def with_any(languages: set[str]) -> list[Path]:
    return [p for p in PAGES if p.exists() and any(b.language in languages for b in blocks(p.read_text("utf-8")))]


@pytest.mark.parametrize("page", with_any(PYTHON), ids=page_id)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    if not any(block.runs for block in blocks(page.read_text("utf-8"))):
        pytest.skip("every block of this page says why it is not run")
    done = python([__file__, str(page)], tmp_path)
    assert done.returncode == 0, f"{page_id(page)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    shows_nothing = "the original's own forward runs"  # a drop-in compared with its original by itself
    assert shows_nothing not in done.stderr, f"{page_id(page)}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", with_any(PYTHON), ids=page_id)
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page.read_text("utf-8")):
        if block.language in PYTHON and "no-run" in block.info:
            assert re.match(r"no-run: \S.{4,}", block.info), f"{page_id(page)}:{block.line} write: no-run: <the reason>"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def commands(code: str) -> list[list[str]]:
    """The words of each command: prompts, comments, output and assignments in front of it left out."""
    lines = code.replace("\\\n", " ").splitlines()
    prompted = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
    found = []
    for line in prompted or lines:
        for command in re.split(r"&&|\|\||[;|]", re.sub(r"(^|\s)#.*", "", line)):
            words = command.split()
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            found.append(words)
    return [words for words in found if words]


def wrong_with(words: list[str], folder: Path) -> str | None:
    """A sentence on what the command names and the project lacks, or None."""
    program, *rest = words
    plain = [word for word in rest if not word.startswith("-") and "=" not in word]
    if program == "make":
        missing = set(plain) - make_targets()
        return f"the Makefile has no target {', '.join(sorted(missing))}" if missing else None
    if program == "pip" or rest[:3] == ["-m", "pip", "install"]:
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
        named = set(",".join(re.findall(r"(?:regraft|\.)\[([\w,-]+)\]", " ".join(rest))).split(",")) - {""}
        return f"there is no extra {', '.join(sorted(named - extras))}" if named - extras else None
    if program.endswith("python") and rest and rest[0].endswith(".py"):
        return None if (ROOT / rest[0]).exists() else f"there is no file {rest[0]}"
    if program == "regraft" and rest:
        subcommand = [rest[0]] if not rest[0].startswith("-") else []
        call = "import sys; from regraft.cli import main; sys.exit(main())"
        done = python(["-c", call, *subcommand, "--help"], folder)
        return f"`regraft {' '.join(subcommand)} --help` fails: {done.stderr[-300:]}" if done.returncode else None
    return None


@pytest.mark.parametrize("page", with_any(SHELL), ids=page_id)
def test_the_commands_of_a_page_exist(page: Path, tmp_path: Path) -> None:
    wrong = [
        f"{page_id(page)}:{block.line} `{' '.join(words)}`: {problem}"
        for block in blocks(page.read_text("utf-8"))
        if block.language in SHELL
        for words in commands(block.code)
        if (problem := wrong_with(words, tmp_path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [p for p in PAGES if p.exists()], ids=page_id)
def test_the_targets_named_in_the_text_exist(page: Path) -> None:
    calls = re.findall(r"`make ([^`]*)`", page.read_text("utf-8"))
    named = [word for call in calls for word in call.split() if re.fullmatch(r"[a-z][\w-]*", word)]
    assert set(named) <= make_targets(), f"{page_id(page)} names {set(named) - make_targets()}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.exists()], ids=page_id)
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)", text) if not re.match(r"\w+:|#", t)]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page_id(page)} links to {missing}"


@pytest.fixture
def hooks() -> Any:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_whatever_is_public_has_a_page(hooks: Any) -> None:
    import regraft

    pages = (
        {cls.__name__ for cls in regraft.TRANSFORMATIONS} | set(hooks._public()) | {"TRANSFORMATIONS", "__version__"}
    )
    assert set(regraft.__all__) <= pages
    for name, thing in hooks._public().items():
        page = hooks.reference(name, thing)
        assert page.startswith(f"# {name}\n")
        text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        assert ">>>" not in text, name
        assert not re.search(r"^(Args|Raises|Returns|Attributes):", text, re.MULTILINE), name
        assert not re.search(r"^    \w+: ['\"]", page, re.MULTILINE), name
    assert "## put_module\n" in hooks.reference("Edit", regraft.Edit)
    assert "## __call__\n" in hooks.reference("Rewrite", regraft.Rewrite)  # which it has from another class as well


def test_every_transformation_has_a_page(hooks: Any) -> None:
    from regraft.cli.choosing import known

    for name, cls in known().items():
        page = hooks.page(name, cls)
        assert page.startswith(f"# {cls.__name__}\n")
        assert "```pycon\n>>>" in page
        assert "Args:" not in page


# The machinery itself.

PAGE = """
```python
x = 20
class Kept: pass
```
text
```pycon
>>> x + 1
21
```
- in a list
  ```python
  import pickle
  assert pickle.loads(pickle.dumps(Kept())) and x == 20
  ```
```python no-run: needs another planet
raise SystemExit("never")
```
"""


def test_blocks_share_one_namespace(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, "utf-8")
    done = python([__file__, str(page)], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("broken", "shown"),
    [("x = 20\n", "NameError"), (">>> x + 1\n21", "Expected")],
)
def test_a_broken_block_is_seen(tmp_path: Path, broken: str, shown: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(broken, broken.replace("20", "y").replace("21", "22")), "utf-8")
    done = python([__file__, str(page)], tmp_path)
    assert done.returncode != 0
    assert shown in done.stdout + done.stderr
    assert "page.md" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    ["make nothing", "pip install 'regraft[nothing]'", "HF=1 python examples/nothing.py", "cd x && make nothing"],
)
def test_a_command_that_does_not_exist_is_seen(command: str, tmp_path: Path) -> None:
    assert [wrong_with(words, tmp_path) for words in commands(f"$ {command}  # why\noutput")][-1]


def test_an_unclosed_block_is_seen() -> None:
    with pytest.raises(AssertionError, match="line 2"):
        blocks("text\n```python\nx = 1\n")


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))

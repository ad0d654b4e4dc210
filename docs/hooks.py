"""What mkdocs does to a page before it is rendered, and the pages that come from docstrings."""

import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

from mkdocs.structure.files import File

_NO_RUN = re.compile(r"^([ \t]*```)(python|pycon) no-run: (.+?)[ \t]*$", re.MULTILINE)
_SECTION = re.compile(r"^(?=(?:Args|Attributes|Examples?|Raises|Returns|Note|Source|References):$)", re.MULTILINE)
_FOLDER = "transformations"


def on_config(config):
    """A page for each transformation, under a heading of their own."""
    if importlib.util.find_spec("regraft") is None:
        raise SystemExit("the pages of the transformations come from their docstrings: pip install -e . first")
    pages = [{"Overview": f"{_FOLDER}/index.md"}]
    pages += [{cls.__name__: f"{_FOLDER}/{name}.md"} for name, cls in _transformations().items()]
    config.nav = [*(config.nav or []), {"Transformations": pages}, {"Decisions": _decisions(config)}]
    return config


def on_files(files, config):
    """The pages that are in no file."""
    rows = [f"| [`{cls.__name__}`]({name}.md) | {_parts(cls)[0]} |" for name, cls in _transformations().items()]
    table = "\n".join(["| transformation | what it does |", "|---|---|", *rows])
    files.append(File.generated(config, f"{_FOLDER}/index.md", content=f"# Transformations\n\n{table}\n"))
    for name, cls in _transformations().items():
        files.append(File.generated(config, f"{_FOLDER}/{name}.md", content=page(name, cls)))
    return files


def on_page_markdown(markdown, **_):
    """A block that the tests do not run says so above it, with its reason."""
    return _NO_RUN.sub(r'\1\2 title="not run in the tests: \3"', markdown)


def page(name, cls):
    """The page of one transformation, from its docstring alone."""
    from regraft import ReversibleTransformation

    summary, rest = _parts(cls)
    facts = [
        f"preserves the computation: {'yes' if cls.preserves_computation is True else 'no'}",
        f"can be reversed: {'yes' if issubclass(cls, ReversibleTransformation) else 'by undo only'}",
        f"on the command line: `-t {name}`",
    ]
    listed = "\n".join(f"- {fact}" for fact in facts)
    return f"# {cls.__name__}\n\n{summary}\n\n{listed}\n\n{_sections(rest)}\n"


def _decisions(config):
    """The index first, then the decisions in the order of their numbers."""
    folder = Path(config.docs_dir) / "decisions"
    names = sorted(path.name for path in folder.glob("[0-9]*.md"))
    return [f"decisions/{name}" for name in ("index.md", *names) if (folder / name).exists()]


def _transformations():
    from regraft.cli.choosing import known

    return known()


def _parts(cls):
    """The first paragraph of the docstring in one line, and the rest."""
    first, _, rest = (inspect.getdoc(cls) or cls.__name__).partition("\n\n")
    return " ".join(first.split()), rest


def _sections(text):
    """Google's sections as Markdown: arguments as a list, examples as code."""
    done = []
    for part in _SECTION.split(text):
        head, colon, body = part.partition(":\n")
        if not colon or "\n" in head or not head.isalpha():
            done.append(part.strip())
        elif head.startswith("Example"):
            done.append(f"## {head}\n\n```pycon\n{textwrap.dedent(body).strip()}\n```")
        else:
            items = re.sub(r"\n\s+(?!\S+:)", " ", textwrap.dedent(body).strip())
            listed = re.sub(r"^(\S+?):\s+", r"- `\1`: ", items, flags=re.MULTILINE)
            done.append(f"## {'Options' if head == 'Args' else head}\n\n{listed}")
    return "\n\n".join(part for part in done if part)

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
_REFERENCE = "reference"


def on_config(config):
    """A page for each transformation, and for all else that is public, under headings of their own."""
    if importlib.util.find_spec("regraft") is None:
        raise SystemExit("the pages of the transformations come from their docstrings: pip install -e . first")
    pages = [{"Overview": f"{_FOLDER}/index.md"}]
    pages += [{cls.__name__: f"{_FOLDER}/{name}.md"} for name, cls in _transformations().items()]
    others = [{name: f"{_REFERENCE}/{name}.md"} for name in _public()]
    config.nav = [
        *(config.nav or []),
        {"Transformations": pages},
        {"Reference": others},
        {"Decisions": _decisions(config)},
    ]
    return config


def on_files(files, config):
    """The pages that are in no file."""
    rows = [f"| [`{cls.__name__}`]({name}.md) | {_parts(cls)[0]} |" for name, cls in _transformations().items()]
    table = "\n".join(["| transformation | what it does |", "|---|---|", *rows])
    files.append(File.generated(config, f"{_FOLDER}/index.md", content=f"# Transformations\n\n{table}\n"))
    for name, cls in _transformations().items():
        files.append(File.generated(config, f"{_FOLDER}/{name}.md", content=page(name, cls)))
    for name, thing in _public().items():
        files.append(File.generated(config, f"{_REFERENCE}/{name}.md", content=reference(name, thing)))
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


def reference(name, thing):
    """The page of a public function or class, from the docstrings of it and of its public members."""
    parts = [f"# {name}", _described(name, thing, "##")]
    for member, value in _members(thing):
        parts += [f"## {member}", _described(member, value, "###")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _described(name, thing, heading):
    summary, rest = _parts(thing)
    return "\n\n".join(part for part in (_call(name, thing), summary, _sections(rest, heading)) if part)


def _call(name, thing):
    """How it is called, a parameter a line where there are many; nothing of a property or of an error."""
    if isinstance(thing, property) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return ""
    given = [each for each in inspect.signature(thing).parameters.values() if each.name != "self"]
    parameters = [re.sub(r""": (['"])(.+?)\1(?= = |$)""", r": \2", str(each)) for each in given]
    kinds = [each.kind for each in given]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    inside = ", ".join(parameters)
    if len(inside) > 80:
        inside = "".join(f"\n    {each}," for each in parameters) + "\n"
    return f"```python\n{name}({inside})\n```"


def _members(thing):
    """The public methods and properties of a class that have a docstring, inherited ones of regraft's included."""
    if not inspect.isclass(thing):
        return []
    homes = [cls for cls in reversed(thing.__mro__) if cls.__module__.startswith("regraft.")]
    names = dict.fromkeys(name for cls in homes for name in vars(cls) if name == "__call__" or not name.startswith("_"))
    found = ((name, inspect.getattr_static(thing, name)) for name in names)
    found = ((name, getattr(value, "__func__", value)) for name, value in found)
    return [(n, v) for n, v in found if (inspect.isfunction(v) or isinstance(v, property)) and inspect.getdoc(v)]


def _public():
    """What is public and no transformation, which have pages of their own."""
    import regraft

    names = sorted(set(regraft.__all__) - {cls.__name__ for cls in regraft.TRANSFORMATIONS}, key=str.lower)
    return {name: getattr(regraft, name) for name in names if callable(getattr(regraft, name))}


def _decisions(config):
    """The index first, then the decisions in the order of their numbers."""
    folder = Path(config.docs_dir) / "decisions"
    names = sorted(path.name for path in folder.glob("[0-9]*.md"))
    return [f"decisions/{name}" for name in ("index.md", *names) if (folder / name).exists()]


def _transformations():
    from regraft.cli.choosing import known

    return known()


def _parts(thing):
    """The first paragraph of the docstring in one line, and the rest."""
    first, _, rest = (inspect.getdoc(thing) or thing.__name__).partition("\n\n")
    return " ".join(first.split()), rest


def _sections(text, heading="##"):
    """Google's sections as Markdown: arguments as a list, examples as code."""
    done = []
    for part in _SECTION.split(text):
        head, colon, body = part.partition(":\n")
        if not colon or "\n" in head or not head.isalpha():
            done.append(part.strip())
        elif head.startswith("Example"):
            done.append(f"{heading} {head}\n\n```pycon\n{textwrap.dedent(body).strip()}\n```")
        else:
            items = re.sub(r"\n\s+(?!\S+:)", " ", textwrap.dedent(body).strip())
            listed = re.sub(r"^(\S+?):\s+", r"- `\1`: ", items, flags=re.MULTILINE)
            done.append(f"{heading} {'Options' if head == 'Args' else head}\n\n{listed}")
    return "\n\n".join(part for part in done if part)

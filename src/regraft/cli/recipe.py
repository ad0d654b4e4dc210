"""The recipe: everything that decides what a run does, in a TOML file or on the command line.

    model = "package.module:factory"
    dtype = "float32"
    keep = "measured"
    transformations = ["merge-linears", { name = "package.module:MyRewrite", limit = 3 }]

Paths in a recipe are relative to its own folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.cli.failure import Failure, did_you_mean
from regraft.cli.parser import DTYPES, DYNAMIC, KEEP, PRESETS, fault_of_engines


@dataclass(frozen=True)
class Choice:
    """One transformation of a recipe: its name, and the arguments of its class."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """All settings of a run; a field's name is its key in the file, and its option on the command line.

    Attributes:
        model: What to work on, as on the command line.
        inputs: An example of its call; None to make one.
        dtype: What to convert both to; None for as they are.
        device: Where to put both; None for where they are.
        seed: Of random weights and inputs.
        dynamic_shapes: `"auto"` or `"none"`.
        preset: What to try where `transformations` names nothing: `"exact"`, `"fast"` or `"compile"`.
        keep: `"measured"` or `"all"`.
        engine: What runs the graph; of several, with commas between them, the fastest.
        seconds: How long each measurement takes.
        verify: Whether the result is verified.
        transformations: What to apply, in order; None for those of the preset.
    """

    model: str | None = None
    inputs: str | None = None
    dtype: str | None = None
    device: str | None = None
    seed: int = 0
    dynamic_shapes: str = "auto"
    preset: str = "exact"
    keep: str = "measured"
    engine: str = "torch"
    seconds: float = 0.5
    verify: bool = True
    transformations: tuple[Choice, ...] | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Recipe:
        """The recipe file, if one is named, with what the command line says in its place.

        Args:
            arguments: the command line.

        Raises:
            Failure: the file cannot be read or has an unknown key or value.
        """
        recipe = read(Path(arguments.recipe)) if arguments.recipe else cls()
        fields = {field.name for field in dataclasses.fields(cls)} - {"transformations"}
        given = {name: getattr(arguments, name, None) for name in fields}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "preset" in changes:
            changes["transformations"] = None
        if arguments.transformation:
            changes["transformations"] = tuple(_choice_of_words(words) for words in arguments.transformation)
        return dataclasses.replace(recipe, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, those that are not set left out."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None}
        if self.transformations is not None:
            plain["transformations"] = [{"name": c.name, **c.options} for c in self.transformations]
        return plain

    def to_toml(self, folder: Path, made_with: Mapping[str, str], comments: tuple[str, ...] = ()) -> str:
        """The settings as the text of a recipe file.

        Args:
            folder: where the file will lie; paths are written relative to it.
            made_with: versions, for people.
            comments: what else people should know.
        """
        lines = [f"# {' '.join(comment.split())}" for comment in comments]
        for key, value in self.to_dict().items():
            if key in ("model", "inputs") and _is_path(value):
                value = Path(os.path.relpath(value, folder)).as_posix()
                value = value if "/" in value else f"./{value}"
            if key == "transformations":
                items = "".join(f"    {_toml(item if len(item) > 1 else item['name'])},\n" for item in value)
                lines.append(f"transformations = [\n{items}]" if items else "transformations = []")
            else:
                lines.append(f"{key} = {_toml(value)}")
        lines += ["", "[made_with]", *(f"{_key(name)} = {_toml(text)}" for name, text in made_with.items())]
        return "\n".join(lines) + "\n"


# TOML's own types: a boolean is no number.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "seed": ((int,), "a whole number"),
    "seconds": ((int, float), "a number"),
    "verify": ((bool,), "true or false"),
    "transformations": ((list,), "a list"),
}


def read(path: Path) -> Recipe:
    """Read a recipe file.

    Args:
        path: of the file.

    Raises:
        Failure: it cannot be read, or has an unknown key or value; the message names it.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(f"cannot read the recipe {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Failure(f"the recipe {path} is not TOML: {error}") from error
    data.pop("made_with", None)
    allowed = {"dtype": DTYPES, "dynamic_shapes": DYNAMIC, "keep": KEEP, "preset": PRESETS}
    for key, value in data.items():
        if key not in {field.name for field in dataclasses.fields(Recipe)}:
            known = [field.name for field in dataclasses.fields(Recipe)]
            raise Failure(f"the recipe {path} has an unknown key {key!r}{did_you_mean(key, known)}")
        kinds, called = _KINDS.get(key, ((str,), "a string"))
        if type(value) not in kinds:
            raise Failure(f"the recipe {path}: {key} is {called}, and not {value!r}")
        if key == "engine" and (fault := fault_of_engines(value)) is not None:
            raise Failure(f"the recipe {path}: engine: {fault}")
        if key in allowed and value not in allowed[key]:
            raise Failure(f"the recipe {path}: {key} is one of {', '.join(allowed[key])}, and not {value!r}")
    for key in ("model", "inputs"):
        if key in data and _is_path(data[key]):
            data[key] = str(path.parent / data[key])
    if "transformations" in data:
        data["transformations"] = tuple(_choice(item, path) for item in data["transformations"])
    return Recipe(**data)


def _choice(item: object, path: Path) -> Choice:
    if isinstance(item, str):
        return Choice(item, {})
    if isinstance(item, dict) and isinstance(item.get("name"), str):
        return Choice(item["name"], {key: value for key, value in item.items() if key != "name"})
    raise Failure(f'the recipe {path}: a transformation is "name" or {{ name = "name", ... }}, and not {item!r}')


def _choice_of_words(words: str) -> Choice:
    """`name`, `module:Class`, each with `:option=value,option=value` behind it."""
    parts = re.fullmatch(r"(.*?):(\w+=.*)", words)  # a value may have colons, too
    if parts is None:
        return Choice(words, {})
    name, rest = parts.groups()
    options = {}
    for part in re.split(r",(?=\w+=)", rest):
        key, _, text = part.partition("=")
        options[key.strip()] = _value(text.strip())
    return Choice(name, options)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)  # as Python writes them, or a word without quotes


def _is_path(text: str) -> bool:
    """Whether it names a file or folder, and not `package.module:factory`."""
    return ":" not in text.replace(":\\", "")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(k)} = {_toml(v)}' for k, v in value.items())} }}"
    return str(value)

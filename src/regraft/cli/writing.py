"""Where results are to go: asked before the work, which may take long, and not after it."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from regraft.cli.failure import Failure


def file_for(option: str, path: str | None, needs: str | None = None) -> Path | None:
    """A file that can be written.

    Args:
        option: that names it, for the error.
        path: of the file, or None.
        needs: the package that writes it, where regraft does not bring it.

    Raises:
        Failure: there is no such folder, it is a folder itself, it cannot be written, or the package is missing.
    """
    if path is None:
        return None
    file = Path(path)
    if file.is_dir():
        raise Failure(f"{option} {path} is a folder; name a file: {option} {file / file.name}")
    if not file.absolute().parent.is_dir():
        raise Failure(
            f"there is no folder {file.parent} to write {file.name} into; make it, or write here: {option} {file.name}"
        )
    _expect_package(option, needs)
    _expect_writable(option, path, file if file.exists() else file.absolute().parent, file.name)
    return file


def folder_for(option: str, path: str | None, needs: str | None = None) -> Path | None:
    """A folder that can be written into, or made.

    Args:
        option: that names it, for the error.
        path: of the folder, or None.
        needs: the package that writes what goes there, where regraft does not bring it.

    Raises:
        Failure: it is a file or in one, it cannot be written, or the package is missing.
    """
    if path is None:
        return None
    folder = Path(path)
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise Failure(f"{option} {path}: {there.name} is a file; name a folder: {option} {there.name}-folder")
    _expect_package(option, needs)
    _expect_writable(option, path, there, folder.name)
    return folder


def _expect_package(option: str, needs: str | None) -> None:
    if needs is not None and importlib.util.find_spec(needs) is None:
        raise Failure(f"{option} needs the package {needs}: pip install 'regraft[report]'")


def _expect_writable(option: str, path: str, there: Path, name: str) -> None:
    # Tried, and not read off the permissions: those tell root nothing, nor of a file system that is read-only. What is
    # neither a file nor a folder, as a pipe, would notice that it is opened and closed.
    try:
        if there.is_dir():
            tempfile.TemporaryFile(dir=there).close()
        elif there.is_file():
            there.open("ab").close()
    except OSError as error:
        raise Failure(
            f"{option} {path} cannot be written: {error.strerror or error}; write elsewhere, as here: {option} {name}"
        ) from error

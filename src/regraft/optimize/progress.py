"""A bar on the terminal for what takes over a second; nothing at all elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO

_WIDTH = 24


class Progress:
    """Shows what is going on, once that has taken a second.

    Args:
        total: How many steps there are; it may grow.
        delay: Seconds before anything is shown.
    """

    def __init__(self, total: int, delay: float = 1.0) -> None:
        self.total = total
        self.done = 0
        self.text = ""
        self._delay = delay
        self._stream = sys.stderr  # as it is now: what is captured meanwhile may be silenced; None without a console
        self._shown = getattr(self._stream, "isatty", lambda: False)()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> Progress:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._shown:
            self._thread.join()

    def next(self, text: str) -> None:
        """The step before is over, and the next one begins.

        Args:
            text: What it is.
        """
        self.done += bool(self.text)
        self.text = text

    def _draw(self) -> None:
        if self._stop.wait(self._delay):
            return
        show = _rich_bar(self._stream) or _PlainBar(self._stream)
        start = time.monotonic() - self._delay
        over = False
        while not over:
            show.update(self.done, max(self.total, self.done + 1), self.text, time.monotonic() - start)
            over = self._stop.wait(0.1)
        show.close()


class _PlainBar:
    """A line that is written over and over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def update(self, done: int, total: int, text: str, seconds: float) -> None:
        filled = _WIDTH * done // total
        bar = "#" * filled + "." * (_WIDTH - filled)
        self._stream.write(f"\r\x1b[2K[{bar}] {done}/{total} {text} {seconds:.0f} s")
        self._stream.flush()

    def close(self) -> None:
        self._stream.write("\r\x1b[2K")
        self._stream.flush()


class _RichBar:
    """The same, by rich."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._progress.start()
        self._task = self._progress.add_task("", total=1)

    def update(self, done: int, total: int, text: str, seconds: float) -> None:
        del seconds  # rich has a clock of its own
        self._progress.update(self._task, completed=done, total=total, description=text)

    def close(self) -> None:
        self._progress.stop()


def _rich_bar(stream: TextIO) -> _RichBar | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (BarColumn(_WIDTH), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return _RichBar(Progress(*columns, console=Console(file=stream), transient=True))

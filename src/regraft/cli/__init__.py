"""The command line, `regraft`: `optimize`, `explain`, `verify`, `bisect`, `bench`, `diff`, `list`, `show`, `env`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from regraft.cli.failure import Failure
from regraft.cli.parser import COMMANDS, parser

OK, FAILED, USAGE, CRASHED, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `regraft`; those of this process by default.

    Returns:
        0 where all went well, 1 where a check failed, 2 where the command, a file or the model cannot be used; 3 and a
        traceback where regraft itself failed, or a transformation of the user's.
    """
    # Only now, when there is something to do, is the command's own module loaded, and torch with it.
    arguments = parser().parse_args(argv)
    try:
        command = importlib.import_module(f"regraft.cli.{COMMANDS[arguments.command].module}")
        status = int(getattr(command, arguments.command)(arguments))
        sys.stdout.flush()
        return status
    except Failure as failure:
        return _told(arguments, failure, failure)
    except BrokenPipeError:  # `regraft list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _unforeseen(arguments, error)


def _told(arguments: argparse.Namespace, sentence: object, error: Exception) -> int:
    if arguments.traceback:
        traceback.print_exception(error)
    else:
        print(f"regraft {arguments.command}: {sentence}", file=sys.stderr)
    return USAGE


def _unforeseen(arguments: argparse.Namespace, error: Exception) -> int:
    from regraft.core.errors import RegraftError

    # The model is asked only now: a call of it may take long, and where all goes well it says nothing.
    job = getattr(arguments, "job", None)
    fault = job.fault() if job is not None else None
    if fault is not None or isinstance(error, RegraftError):
        return _told(arguments, fault or error, error)
    traceback.print_exception(error)
    return CRASHED

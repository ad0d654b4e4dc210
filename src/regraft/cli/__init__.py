"""The command line, `regraft`: `optimize`, `explain`, `verify`, `bisect`, `bench`, `diff`, `list`, `show`, `env`."""

from __future__ import annotations

import importlib
import os
import sys
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
        traceback where regraft itself failed.
    """
    # Only now, when there is something to do, is the command's own module loaded, and torch with it.
    arguments = parser().parse_args(argv)
    try:
        command = importlib.import_module(f"regraft.cli.{COMMANDS[arguments.command].module}")
        status = int(getattr(command, arguments.command)(arguments))
        sys.stdout.flush()
        return status
    except Failure as failure:
        if arguments.traceback:
            raise
        print(f"regraft {arguments.command}: {failure}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `regraft list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _unforeseen(arguments.command, error, arguments.traceback)


def _unforeseen(command: str, error: Exception, traceback: bool) -> int:
    from regraft.core.errors import RegraftError

    if isinstance(error, RegraftError) and not traceback:
        print(f"regraft {command}: {error}", file=sys.stderr)
        return USAGE
    import traceback as tracebacks

    tracebacks.print_exception(error)
    return CRASHED

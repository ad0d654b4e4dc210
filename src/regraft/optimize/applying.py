"""A transformation applied to a graph of the caller's model."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from torch.fx import GraphModule

from regraft.core.errors import RegraftError
from regraft.core.history import history, undo
from regraft.core.journal import Step
from regraft.core.transformation import Transformation

logger = logging.getLogger("regraft")


def applied(transformation: Transformation, gm: GraphModule) -> tuple[GraphModule, tuple[Step, ...]]:
    """What a transformation makes of a graph, and what the history says of it.

    Args:
        transformation: The transformation.
        gm: The graph, which is changed in place.

    Raises:
        RegraftError: The transformation writes to weights in place, which are the caller's; it has been taken back.
    """
    known = {step.id for step in history(gm)}
    with _without_remarks():
        made = transformation(gm)
    records = tuple(step for step in history(made) if step.id not in known)
    written = [".".join(filter(None, key)) for step in records for site in step.applied for key in site.written]
    if written:
        for step in reversed(records):
            undo(made, step)
        raise RegraftError(
            f"{type(transformation).__name__} writes to {written[0]!r} in place, a weight of the model, which optimize "
            "leaves as it is, and was taken back: let it put new weights there, as a regraft.Rewrite does by "
            "edit.put_module, or apply it to the model before"
        )
    return made, records


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Without the warning that a transformation found nothing: of a preset most do not, and the steps say so."""
    thread = threading.get_ident()

    def remark(record: logging.LogRecord) -> bool:
        return record.thread != thread or "rewrote nothing" not in record.msg

    logger.addFilter(remark)
    try:
        yield
    finally:
        logger.removeFilter(remark)

"""The exports that a capture tries of a call: with all axes varying that may, or fewer, where torch cannot do so."""

from __future__ import annotations

from torch import nn

from regraft.capture import transformers_adapter
from regraft.capture.exporting import Exported, export
from regraft.capture.failures import capture_error, decides_by_value, refuse_example
from regraft.capture.shapes import Axes
from regraft.capture.signature import Call
from regraft.capture.untouched import untouched
from regraft.core.errors import CaptureError


class Exports:
    """The exports of one call of a model.

    Args:
        model: the model.
        call: the call.
        decided: whether what the model decides by the values of its inputs is decided as for these.
    """

    def __init__(self, model: nn.Module, call: Call, decided: bool) -> None:
        self._model, self._call, self._decided = model, call, decided
        self._ways = transformers_adapter.ways(model)
        self._fixed: Exported | None = None

    def one(self, axes: Axes, quick: bool = False, hasty: bool = False) -> Exported:
        """Export with these axes varying.

        Args:
            axes: the axes of each tensor.
            quick: see `export`.
            hasty: see `export`.

        Raises:
            CaptureError: it cannot be.
        """
        try:
            with untouched(self._model):
                return export(self._model, self._call, axes, self._ways, quick, self._decided, hasty)
        except Exception as error:
            raise capture_error(self._model, error) from error

    def widest(self, axes: Axes) -> Exported:
        """Where export cannot make out, or not soon, how all sizes hang together, with the batch alone, or none.

        Args:
            axes: the axes of each tensor that may vary.

        Raises:
            CaptureError: it cannot be exported with none, either.
        """
        batch: Axes = [{0: varying[0]} if varying and 0 in varying else None for varying in axes]
        none: Axes = [None] * len(axes)
        tries = [each for each in ([axes] if batch == axes else [axes, batch]) if each != none]
        if self._decided:
            self._with_none(none)  # where it fails, the rest does as well
        while tries:
            try:
                return self.one(tries[0], quick=True, hasty=self._fixed is None)
            except CaptureError as error:
                refuse_example(self._model, self._call)  # other axes would not help
                if self._fixed is None and decides_by_value(error.__cause__):
                    self._with_none(none)  # where this fails as well, the axes have no part in it
                else:
                    del tries[0]
        return self._with_none(none)

    def _with_none(self, none: Axes) -> Exported:
        if self._fixed is None:
            self._fixed = self.one(none)
            self._ways = self._ways[self._fixed.way :]  # what fails for fixed sizes does so where they vary
        return self._fixed

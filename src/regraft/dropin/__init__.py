"""The drop-in: a model of the original's class that runs captured graphs where they hold, and else the original."""

from regraft.dropin.entries import Entry, floats
from regraft.dropin.grafts import Grafts
from regraft.dropin.model import grafts_of, make_dropin, without_grafts
from regraft.dropin.reading import Reader
from regraft.dropin.sharing import share
from regraft.dropin.watch import expect_counted

__all__ = [
    "Entry",
    "Grafts",
    "Reader",
    "expect_counted",
    "floats",
    "grafts_of",
    "make_dropin",
    "share",
    "without_grafts",
]

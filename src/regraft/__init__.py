"""regraft rewrites the graph of a PyTorch model so that it runs faster, proves that the result computes the same thing,
says what it did and what it refused and why, and can take any of it back, bit for bit.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regraft._public import *  # noqa: F403
    from regraft._public import __all__ as __all__

# The names stand in `regraft/_public.py`, which is imported when the first of them is asked for: that loads torch, and
# `regraft --help` should not wait for it. Type checkers see the names, and no `__getattr__` that would allow any other.
if not TYPE_CHECKING:

    def __getattr__(name):
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = importlib.import_module("regraft._public")
        globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=_module) from None

    def __dir__():
        return sorted({*globals(), *importlib.import_module("regraft._public").__all__})

    class _Module(types.ModuleType):
        def __setattr__(self, name, value):
            # `import regraft.verify` binds the package to the name of the function `regraft.verify`: don't let it.
            if not (isinstance(value, types.ModuleType) and hasattr(value, name)):
                self.__dict__[name] = value

    _module = sys.modules[__name__]
    _module.__class__ = _Module

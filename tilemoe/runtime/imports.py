"""`after_import`: a callback that runs when a module is first imported, without importing it.

The operators' FLOP formulas need it: to import PyTorch's counter imports Triton, 0.2 s, and logs a warning without one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Then = Callable[[ModuleType], None]


def after_import(name: str, then: Then) -> None:
    """Call ``then`` with the module called ``name``: now if it is imported, else as soon as it has been."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and has its loader call ``then`` afterwards; it serves once."""

    def __init__(self, name: str, then: Then) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load, then = spec.loader.exec_module, self.then

            def load_then(module: ModuleType) -> None:
                load(module)
                then(module)

            spec.loader.exec_module = load_then  # type: ignore[method-assign]
        return spec

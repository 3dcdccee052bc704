"""`after_import`: a callback that runs when a module is first imported, without importing it.

The operators' FLOP formulas need it: to import PyTorch's counter imports Triton, 0.2 s, and logs a warning without one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any


def after_import(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call ``then`` with the module called ``name``: now if it is imported, else as soon as it has been."""
    if name in sys.modules:
        then(sys.modules[name])
        return

    def find(fullname: str, *_: Any) -> ModuleSpec | None:
        """The module as the other finders find it, with a loader that calls ``then`` afterwards."""
        if fullname != name:
            return None
        sys.meta_path.remove(finder)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_then(module: ModuleType) -> None:
                load(module)
                then(module)

            spec.loader.exec_module = load_then  # type: ignore[method-assign]
        return spec

    finder: Any = SimpleNamespace(find_spec=find)
    sys.meta_path.insert(0, finder)

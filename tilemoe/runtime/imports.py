"""`after_import`: a callback that runs when a module is first imported, without importing it.

The operators' FLOP formulas need it: importing PyTorch's FLOP counter also imports Triton, which takes 0.2 s, or logs a
warning if there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any


def after_import(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call ``then`` with the module ``name``: now if it is already imported, else right after its import."""
    if name in sys.modules:
        then(sys.modules[name])
        return

    def find(fullname: str, *_: Any) -> ModuleSpec | None:
        """The spec that the other finders give for the module, with a loader that then calls ``then``."""
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

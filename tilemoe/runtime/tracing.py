"""What differs where PyTorch traces, or tensors have no values: torch.compile, fake tensors, the meta device.

A leaf: it imports nothing of the package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

P = ParamSpec("P")
Out = TypeVar("Out")


def constant_when_traced(function: Callable[P, Out]) -> Callable[P, Out]:
    """Have torch.compile run ``function`` once, while it traces: what is installed and which GPU there is stay.

    The mark is that of ``torch.compiler.assume_constant_result``, which imports all of the compiler to set it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced  # a warning is given while tracing, or never
def warn_once(message: str) -> None:
    """A `UserWarning` that each process gives once."""
    _warn(message)


@cache
def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)


def specialised(*numbers: Any) -> tuple[Any, ...]:
    """``numbers``, each a number or None. Traced, where one may be a symbol, its value, by which the graph is guarded.

    For what goes into a string or a function whose result is constant: with ``dynamic=True`` every number that does
    not come from a module is a symbol, and without it one that has had two values. Also for a number that is read in
    several checkpointed parts: a symbol would belong to the first, and PyTorch's tracer fails in the next.
    """
    if not torch.compiler.is_compiling():
        return numbers
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # an import that only a compiler should pay for

    return tuple([None if number is None else guard_scalar(number) for number in numbers])


def can_be_read(values: Tensor) -> bool:
    """Whether the host may look at ``values`` and wait for nothing: on CPU, outside torch.compile, not faked."""
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None and not is_fake(values)


def is_in_backward() -> bool:
    """Whether a backward runs in this thread: a forward then is one that activation checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast casts to on devices of this kind ("cpu", "cuda", ...); None where it is off, or there is none."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():  # quicker than asking for one
        return None
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Inside, nothing is cast on devices of this kind."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@constant_when_traced  # PyTorch 2.11 cannot trace this
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)  # not on the meta device

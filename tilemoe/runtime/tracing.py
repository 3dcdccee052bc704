"""Helpers for code that PyTorch may trace, or whose tensors may have no values: torch.compile, fake and meta tensors.

This module imports nothing of the package.
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
    """Have torch.compile call ``function`` while it traces and use the result as a constant. So it may depend only on
    things that stay the same, such as installed packages and the GPU.

    This sets the mark of ``torch.compiler.assume_constant_result``, which would import the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced  # under torch.compile the warning is given while tracing, or never
def warn_once(message: str) -> None:
    """A `UserWarning` that each process gives once."""
    _warn(message)


@cache
def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)


def specialised(*numbers: Any) -> tuple[Any, ...]:
    """``numbers``, each a number or None. While tracing, a symbol is replaced by its value, and the graph is guarded.

    For numbers that go into a string, or into a function whose result is constant. With ``dynamic=True`` every number
    that is not from a module is a symbol; without it, every number that has had two values. Also for a number that
    several checkpointed parts read: a symbol would belong to the first part, and PyTorch's tracer fails in the next.
    """
    if not torch.compiler.is_compiling():
        return numbers
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # imported only when compiling

    return tuple([None if number is None else guard_scalar(number) for number in numbers])


def can_be_read(values: Tensor) -> bool:
    """Whether the host can read ``values`` without waiting: on a CPU, not fake, outside torch.compile."""
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None and not is_fake(values)


def is_in_backward() -> bool:
    """Whether this thread runs a backward; a forward is then one that activation checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on this kind of device ("cpu", "cuda", ...); None if it is off or does not exist."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():  # faster than asking for one kind
        return None
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """A context in which autocast is off for devices of this kind."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@constant_when_traced  # PyTorch 2.11 cannot trace the call below
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)  # False for the meta device

"""Operators that remember what they launched for operands of a layout: see `tilemoe.kernels.triton.replay`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

MAX_LAYOUTS = 256  # of one operator; beyond, it forgets the oldest, which are recorded again if they are still in use
_UNKNOWN = object()


class Replayed:
    """``run``, an operator's implementation; its first argument is a tensor, and all tensors are on one device.

    A layout that is seen for the second time is recorded, and repeated from then on: lengths that vary from call to
    call are not worth the recording. ``ahead`` is called before a layout is run for the first time.
    """

    def __init__(self, run: Callable[..., Any], ahead: Callable[..., None] | None = None) -> None:
        self.run = run
        self._ahead = ahead
        self._known: dict[Any, Any] = {}  # layouts of the operands to a recording, or None where there is none

    def __call__(self, *args: Any) -> Any:
        if not is_replayable(args[0]):
            return self.run(*args)
        replay = _replay()
        key = [replay.layout(arg) if isinstance(arg, Tensor) else arg for arg in args]
        layouts = (args[0].device, *key, _precision(args[0].dtype))
        known = self._known
        recording = known.get(layouts, _UNKNOWN)  # asked once: another thread may forget it
        if recording is _UNKNOWN:
            remember(known, layouts, False, MAX_LAYOUTS)
            if self._ahead is not None:
                self._ahead(*args)
            return self.run(*args)
        if replay.is_hooked():
            return self.run(*args)
        if recording is False:
            results, known[layouts] = replay.record(self.run, args)
            return results
        return self.run(*args) if recording is None else recording(args)


def remember(known: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """``known[key] = value``; of ``limit`` keys, the oldest is forgotten first."""
    if len(known) >= limit:
        for oldest in tuple(known)[:1]:  # none, where other threads have forgotten all
            known.pop(oldest, None)
    known[key] = value


def is_replayable(first: Tensor) -> bool:
    """Whether launches for this operand start on the current device, and nobody watches what is allocated for them.

    Not on AMD's GPUs, whose kernels also depend on the size of the memory that a tensor is part of.
    """
    return (
        first.is_cuda
        and torch.version.hip is None
        and torch._C._len_torch_dispatch_stack() == 0
        and first.device.index == torch.cuda.current_device()
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _replay() -> Any:
    from tilemoe.kernels.triton import replay  # not on every machine

    return replay


def _precision(dtype: torch.dtype) -> Any:
    """How fp32 is multiplied, where there is any."""
    return torch.backends.cuda.matmul.fp32_precision if dtype == torch.float32 else None

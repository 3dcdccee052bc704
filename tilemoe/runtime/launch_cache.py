"""The cache of an operator's recorded launches by layout of the operands; see `tilemoe.runtime.launch_trace`."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilemoe.runtime.precompile import Precompile, active

if TYPE_CHECKING:
    from tilemoe.runtime.launch_trace import LaunchTrace, LaunchTracer

MAX_LAYOUTS = 256  # per operator; beyond, the oldest is forgotten, and recorded again if it is still in use
_UNKNOWN = object()


class LaunchCache:
    """The recordings of one operator. The first call with a layout compiles missing kernels, the second is recorded,
    and later ones replay it. The first is not recorded, since lengths that vary from call to call are not worth it.
    """

    def __init__(self, compiles_first: bool = True) -> None:
        self._compiles_first = compiles_first
        # Layouts of the operands -> a recording; False: seen once; None: the call cannot be replayed.
        self.known: dict[Any, LaunchTrace | bool | None] = {}

    def look_up(self, operands: tuple[Any, ...]) -> tuple[LaunchTrace | None, LaunchTracer | Precompile | None]:
        """(the recording to replay, or None; the context manager that watches this call, or None).

        ``operands``: a tensor on the current GPU, then all other tensors and values that launches depend on.
        """
        if active() is not None:
            return None, None
        first = operands[0]
        traces = _launch_trace()
        layouts = (
            first.device,
            *[traces.layout(operand) if isinstance(operand, Tensor) else operand for operand in operands],
            # For fp32, how it is multiplied.
            torch.backends.cuda.matmul.fp32_precision if first.dtype == torch.float32 else None,
        )
        known: Any = self.known.get(layouts, _UNKNOWN)  # looked up once: another thread may remove it
        if known is _UNKNOWN:
            if len(self.known) >= MAX_LAYOUTS:
                for oldest in tuple(self.known)[:1]:  # none, if other threads have removed all
                    self.known.pop(oldest, None)
            self.known[layouts] = False
            return None, None if traces.is_hooked() or not self._compiles_first else Precompile(first.device)
        if known is None or traces.is_hooked():
            return None, None
        if known is not False:
            return known, None
        return None, traces.LaunchTracer(operands, partial(self.known.__setitem__, layouts))


@cache
def _launch_trace() -> Any:
    from tilemoe.runtime import launch_trace  # here, because it imports Triton

    return launch_trace

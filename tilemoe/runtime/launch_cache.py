"""What operators launched for operands of a layout, to be repeated: see `tilemoe.runtime.launch_trace`."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilemoe.runtime.precompile import Precompile, active

if TYPE_CHECKING:
    from tilemoe.runtime.launch_trace import LaunchTrace, LaunchTracer

MAX_LAYOUTS = 256  # of one operator; beyond, it forgets the oldest, which are recorded again if they are still in use
_UNKNOWN = object()


class LaunchCache:
    """Of one operator. The first call with a layout compiles what is missing, the second is recorded, and repeated from
    then on: lengths that vary from call to call are not worth the recording.
    """

    def __init__(self, compiles_first: bool = True) -> None:
        self._compiles_first = compiles_first
        # Layouts of the operands to a recording; False where they were seen once, None where it cannot be repeated.
        self.known: dict[Any, LaunchTrace | bool | None] = {}

    def look_up(self, operands: tuple[Any, ...]) -> tuple[LaunchTrace | None, LaunchTracer | Precompile | None]:
        """(the recording to repeat, or None; what is to watch this call and keep its output, or None).

        ``operands``: a tensor of the current GPU, then all other tensors and all else that launches depend on.
        """
        if active() is not None:
            return None, None
        first = operands[0]
        traces = _launch_trace()
        layouts = (
            first.device,
            *[traces.layout(operand) if isinstance(operand, Tensor) else operand for operand in operands],
            # How fp32 is multiplied, where there is any.
            torch.backends.cuda.matmul.fp32_precision if first.dtype == torch.float32 else None,
        )
        known: Any = self.known.get(layouts, _UNKNOWN)  # asked once: another thread may forget it
        if known is _UNKNOWN:
            if len(self.known) >= MAX_LAYOUTS:
                for oldest in tuple(self.known)[:1]:  # none, where other threads have forgotten all
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
    from tilemoe.runtime import launch_trace  # not on every machine

    return launch_trace

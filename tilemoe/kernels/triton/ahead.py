"""Kernels are compiled before they are launched, all of an operator's at the same time.

A kernel takes 0.1 to 2 s to compile, most of it in MLIR, LLVM, ptxas and gcc, which leave Python's lock to others: only
the first step, from Python to Triton's IR, does not. So an operator that meets operands of a new kind is rehearsed: it
runs on tensors without data, where its launches begin to be compiled, each in a thread of its own. A launch waits for
its own kernel. Nothing but the compiler runs in these threads, and a compilation that fails there is done again by the
launch that needs it, which raises what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from tilemoe.kernels.tiling import Device

# In a thread that compiles: to be set when the IR is made.
_ir_is_made: ContextVar[Event | None] = ContextVar("tilemoe_ir_is_made", default=None)


class Rehearsal(TorchDispatchMode):
    """Inside, tensors are on the meta device and stand for those of ``device``, and launches compile.

    ``gpu``: what the device offers.
    """

    def __init__(self, device: torch.device, gpu: Device) -> None:
        super().__init__()
        self.device, self.gpu = device, gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def rehearsal() -> Rehearsal | None:
    """The one that this thread is in."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Rehearsal) else None


def without_data(arg: Any) -> Any:
    """A tensor of the same layout on the meta device, where every allocation is aligned; anything else as it is."""
    if not isinstance(arg, Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")


def begin(compile_one: Callable[[], None]) -> Future[None]:
    """Run ``compile_one`` in a thread of its own; returns when its kernel's IR is made, or when it has ended.

    IR is made by Python code that is not meant for several threads (it sets and resets Python's filters of warnings),
    and that would wait for Python's lock anyway: until it is done, the caller does nothing else.
    """
    made = Event()

    def run() -> None:
        _ir_is_made.set(made)
        compile_one()

    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tilemoe-compile")
    future = executor.submit(run)
    future.add_done_callback(lambda _: made.set())
    executor.shutdown(wait=False)  # no further work: the thread ends with this one
    made.wait()
    return future


def announce_ir(source: Any) -> None:
    """In a thread of `begin`, have Triton's ``source`` of a kernel say when its IR is made."""
    made = _ir_is_made.get()
    if made is None:
        return
    make_ir = source.make_ir

    def make_and_say(*args: Any, **options: Any) -> Any:
        try:
            return make_ir(*args, **options)
        finally:
            made.set()

    source.make_ir = make_and_say

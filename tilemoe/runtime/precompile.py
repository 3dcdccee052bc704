"""Compiles the kernels that a call lacks in parallel, by threads, before any of them is launched: a layer's first
forward and backward then take 8 s in place of 21 (H200, results/cold.jsonl).

A GEMM takes Triton's compiler up to 3 s, and a layer has eight. Triton compiles in parallel what is launched inside its
AsyncCompileMode, but gives no values there. So in the first call of an operator for a layout, the first launch whose
kernel is not compiled and all that follow are withheld: they only compile. What such a call returns has no values, and
the operator runs again.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import ContextVar, Token, copy_context
from typing import Any
from warnings import catch_warnings

import torch

_MAX_THREADS = 16
_active: ContextVar[Precompile | None] = ContextVar("tilemoe_precompile", default=None)


class WithheldError(Exception):
    """The values of something are wanted that was not launched."""


class Precompile:
    """Of one call of an operator on ``device``; left when all that it began to compile is compiled and loaded."""

    def __init__(self, device: torch.device) -> None:
        self.withheld = False
        self._device = device
        self._compiling = ExitStack()
        self._triton = copy_context()  # where Triton's mode is active: one that Ctrl-C leaves half closed stays there

    def __enter__(self) -> Precompile:
        self._token: Token[Precompile | None] = _active.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool:
        _active.reset(self._token)
        self._triton.run(self._compiling.close)
        return kind is WithheldError  # the operator runs again

    def keep(self, results: Any) -> None:
        """There is nothing to keep of a call that launched what it launched."""

    def withholds(self, launch: Any, is_compiled: bool) -> bool:
        """Whether ``launch``, a `Launch`, is not to be: the first whose kernel is not compiled, or a later one."""
        if is_compiled:
            return self.withheld
        if not self.withheld:
            self.withheld = True
            self._triton.run(self._begin)
        # What is wrong is the launch's to raise. CPython before 3.11.9 and 3.12.3 may refuse to parse beside a thread.
        with suppress(Exception):
            given = {**launch.args, **launch.constants, **launch.options}
            self._triton.run(launch.kernel.warmup, grid=launch.grid, **given)
        return True

    def _begin(self) -> None:
        from triton import AsyncCompileMode  # not on every machine

        # Triton's code generator sets and resets Python's filters of warnings, which threads share.
        self._compiling.enter_context(catch_warnings())
        threads = self._compiling.enter_context(_Loading(self._device))
        self._compiling.enter_context(AsyncCompileMode(threads, ignore_errors=True))


def require_values() -> None:
    """Between a launch and what reads its results as indices, or on the host: leave a call that launches nothing."""
    if withholds_values():
        raise WithheldError


def withholds_values() -> bool:
    """Whether what this call launches now is not: nothing that it makes has values."""
    precompile = active()
    return precompile is not None and precompile.withheld


def active() -> Precompile | None:
    """The one that this thread's launches belong to."""
    return _active.get()


class _Loading(ThreadPoolExecutor):
    """Runs compilations, each followed by what else comes before a launch: the launcher's C, and the way to the GPU."""

    def __init__(self, device: torch.device) -> None:
        threads = min(os.cpu_count() or 1, _MAX_THREADS)
        super().__init__(threads, "tilemoe-compile", initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, compile_kernel: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_loaded, compile_kernel)


def _loaded(compile_kernel: Any) -> Any:
    kernel = compile_kernel()
    assert kernel.run is not None, "reading it loads the kernel"
    return kernel

"""Compiles a call's missing kernels in parallel threads, before any of them is launched: a layer's first forward and
backward then take 8 s instead of 21 (H200, results/cold.jsonl).

Triton takes up to 3 s to compile a GEMM, and a layer has eight. Inside AsyncCompileMode Triton compiles launches in
parallel, but does not run them. So in an operator's first call for a layout, the first launch whose kernel is not
compiled and all later ones are withheld: they only compile. Such a call returns tensors without values, and the
operator runs again.
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
    """Values are needed whose launch was withheld."""


class Precompile:
    """A context for one call of an operator on ``device``. It exits when all kernels are compiled and loaded."""

    def __init__(self, device: torch.device) -> None:
        self.withheld = False
        self._device = device
        self._compiling = ExitStack()
        self._triton = copy_context()  # Triton's mode is active only in this copy, even if Ctrl-C leaves it half closed

    def __enter__(self) -> Precompile:
        self._token: Token[Precompile | None] = _active.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool:
        _active.reset(self._token)
        self._triton.run(self._compiling.close)
        return kind is WithheldError  # the operator runs again

    def keep(self, results: Any) -> None:
        """Nothing: unlike `LaunchTracer`, this stores no recording."""

    def withholds(self, launch: Any, is_compiled: bool) -> bool:
        """Whether ``launch``, a `Launch`, is withheld: it, or one before it, has a kernel that is not compiled."""
        if is_compiled:
            return self.withheld
        if not self.withheld:
            self.withheld = True
            self._triton.run(self._begin)
        # Errors are left to the real launch. CPython before 3.11.9 and 3.12.3 may fail to parse beside another thread.
        with suppress(Exception):
            given = {**launch.args, **launch.constants, **launch.options}
            self._triton.run(launch.kernel.warmup, grid=launch.grid, **given)
        return True

    def _begin(self) -> None:
        from triton import AsyncCompileMode  # here, because Triton is not on every machine

        # Triton's code generator sets and resets Python's warning filters, which threads share.
        self._compiling.enter_context(catch_warnings())
        threads = self._compiling.enter_context(_Loading(self._device))
        self._compiling.enter_context(AsyncCompileMode(threads, ignore_errors=True))


def require_values() -> None:
    """Leave the call if its launches are withheld. Call this before reading results on the host or as indices."""
    if withholds_values():
        raise WithheldError


def withholds_values() -> bool:
    """Whether this call's launches are withheld at present, so that its new tensors have no values."""
    precompile = active()
    return precompile is not None and precompile.withheld


def active() -> Precompile | None:
    """The `Precompile` that this thread's launches belong to, if any."""
    return _active.get()


class _Loading(ThreadPoolExecutor):
    """Compiles kernels in threads, and also compiles each kernel's C launcher and loads the kernel on the GPU."""

    def __init__(self, device: torch.device) -> None:
        threads = min(os.cpu_count() or 1, _MAX_THREADS)
        super().__init__(threads, "tilemoe-compile", initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, compile_kernel: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_loaded, compile_kernel)


def _loaded(compile_kernel: Any) -> Any:
    kernel = compile_kernel()
    assert kernel.run is not None, "reading it loads the kernel"
    return kernel

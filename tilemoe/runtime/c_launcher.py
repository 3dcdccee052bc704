"""The C function with which Triton 3.6 launches a kernel, called without Triton's Python code around it.

That saves a sixth of the host time of a layer's forward and a quarter of its backward's (results/host_time.jsonl).

Triton's Python code encodes every tensor descriptor for the GPU again in each launch, 8 to 10 microseconds each on an
H200's host, although for a repeated launch the encoding depends on the address alone. Other releases of Triton launch
differently; for them `direct` returns None.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars, isfunction
from typing import Any, NamedTuple

import triton

_RELEASE = "3.6."
_MAX_ENCODED = 256  # cached addresses of one operand of one launch: layers times addresses of their activations


class Direct(NamedTuple):
    """``launch(x, y, z, stream, *fixed, *args)``, and the ``metadata`` of the descriptor arguments, in order."""

    launch: Callable[..., None]
    fixed: tuple[Any, ...]
    metadata: list[Any]


def direct(kernel: Any) -> Direct | None:
    """How to launch a compiled kernel that needs no scratch memory; None if that is not known."""
    if not triton.__version__.startswith(_RELEASE):
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = kernel.run
    if not isinstance(launcher, CudaLauncher):
        return None
    launch = launcher.launch
    if isfunction(launch):  # it unpacks descriptors, then calls the C function
        launch = getclosurevars(launch).nonlocals["launcher"]
    switches = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    # No scratch memory for the kernel or a profiler, and no hooks.
    fixed = (kernel.function, *switches, None, None, kernel.packed_metadata, None, None, None)
    return Direct(launch, fixed, list(getattr(kernel.metadata, "tensordesc_meta", None) or ()))


class Encoded:
    """A descriptor encoded for the GPU, cached by the address of its base. ``described(address)``: Triton's object."""

    def __init__(self, described: Any, metadata: Any) -> None:
        self._described, self._metadata = described, metadata
        self._known: dict[int, Any] = {}

    def sizes(self) -> list[int]:
        """The kernel arguments that follow the descriptor: its shape, then its strides."""
        descriptor = self._described(0)
        return [*descriptor.shape, *descriptor.strides]

    def at(self, address: int) -> Any:
        found = self._known.get(address)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            if len(self._known) >= _MAX_ENCODED:
                self._known.clear()
            found = self._known[address] = make_tensordesc_arg(self._described(address), self._metadata)[0]
        return found

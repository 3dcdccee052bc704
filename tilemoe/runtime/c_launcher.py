"""The C function by which Triton 3.6 starts a kernel, called without the Python around it.

That saves a sixth of the host's time of a layer's forward, a quarter of its backward's (results/host_time.jsonl).

That Python encodes every tensor descriptor for the GPU anew, 8 to 10 microseconds each on the host of an H200, though
the encoding is a function of the address for a kernel that is launched again. Other releases of Triton launch their
own way: `direct` is None there.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars, isfunction
from typing import Any, NamedTuple

import triton

_RELEASE = "3.6."
_MAX_ENCODED = 256  # addresses of one operand of one launch: layers times the places where their activations come


class Direct(NamedTuple):
    """``launch(x, y, z, stream, *fixed, *args)``; ``metadata`` of the arguments that are descriptors, in order."""

    launch: Callable[..., None]
    fixed: tuple[Any, ...]
    metadata: list[Any]


def direct(kernel: Any) -> Direct | None:
    """How to start a compiled kernel that asks for no memory of its own; None where that is not known."""
    if not triton.__version__.startswith(_RELEASE):
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = kernel.run
    if not isinstance(launcher, CudaLauncher):
        return None
    launch = launcher.launch
    if isfunction(launch):  # takes descriptors apart, then calls the C function
        launch = getclosurevars(launch).nonlocals["launcher"]
    switches = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    # No memory for the kernel or a profiler, and no hooks.
    fixed = (kernel.function, *switches, None, None, kernel.packed_metadata, None, None, None)
    return Direct(launch, fixed, list(getattr(kernel.metadata, "tensordesc_meta", None) or ()))


class Encoded:
    """A descriptor as the GPU takes it, by the address of its base: ``described(address)`` as Triton takes it."""

    def __init__(self, described: Any, metadata: Any) -> None:
        self._described, self._metadata = described, metadata
        self._known: dict[int, Any] = {}

    def sizes(self) -> list[int]:
        """The arguments that follow it: its shape, then its strides."""
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

"""Compile a `Launch` for a GPU that is not there, and read what came out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from tilemoe.kernels.triton.launch import Launch

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel, specialised on the arguments as a launch would be."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.constants[name] if name in launch.constants else launch.args[name]
        specialised = isinstance(value, int) and not parameter.do_not_specialize
        if name in launch.constants or value is None or (specialised and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = "fp32" if isinstance(value, float) else mangle_type(value)
        if (isinstance(value, Tensor) and value.data_ptr() % 16 == 0) or (specialised and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )


def count_spill_loads(compiled: Any, folder: Path) -> int:
    """Loads from local memory in the machine code: what registers could not hold."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    dump = subprocess.run(
        [os.fspath(_CUOBJDUMP), "-sass", os.fspath(path)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "EXIT" in dump, "no machine code in the dump"
    return len(re.findall(r"\bLDL", dump))

"""The portable row GEMMs compiled for weights of either stride order, gate and up in both layouts, and biases.

Every value of every factor, not all combinations. Concatenated swiglu without bias, untransposed, is among the launches
of test_triton_compiled.py. A kernel is compiled once for the cells that its code does not tell apart.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

import re
from pathlib import Path

import pytest
from triton_compile import (
    MATRIX_UNIT,
    NVIDIA,
    bytes_of_copies,
    compile_launch,
    count_loads_of_two_bytes,
    make_operands,
    row_gemm_launch,
    stack_bytes,
)

from tilemoe.kernels.experts.triton import host

CELLS = {  # activation, gate_up, transposed, bias
    "interleaved": ("swiglu", "interleaved", False, False),
    "transposed": ("swiglu", "concatenated", True, False),
    "bias": ("swiglu", "concatenated", False, True),
    "interleaved, transposed, bias": ("swiglu", "interleaved", True, True),
    "clamped, interleaved, transposed, bias": ("swiglu_oai", "interleaved", True, True),
    "ungated, transposed, bias": ("relu2", "concatenated", True, True),
}
COMPILED = {
    "up_proj_act": tuple(CELLS),
    "down_proj_dgrad_dact": tuple(name for name in CELLS if name != "bias"),
    "down_proj": ("transposed", "bias", "interleaved, transposed, bias"),
    "up_proj_dgrad": ("bias", "transposed"),
}
# What is compiled for the newer GPUs, too, which no one has run.
FOR_ALL = ("transposed", "interleaved, transposed, bias")
LAUNCHES = [
    pytest.param(
        name,
        cell,
        capability,
        marks=() if cell == FOR_ALL[1] and capability in (80, 90) else pytest.mark.thorough,
    )
    for capability in NVIDIA
    for name, cells in COMPILED.items()
    for cell in cells
    if capability in (80, 90) or cell in FOR_ALL
]
# Bytes of a thread's stack, by kernel, capability and cell; 0 where none is named, and 8 of the newest are no spill.
STACK = {
    ("down_proj_dgrad_dact", 90, "interleaved"): 88,
    ("down_proj_dgrad_dact", 90, "transposed"): 16,
    ("down_proj_dgrad_dact", 90, "interleaved, transposed, bias"): 88,
    ("down_proj_dgrad_dact", 90, "clamped, interleaved, transposed, bias"): 120,
    ("down_proj_dgrad_dact", 90, "ungated, transposed, bias"): 24,
    ("up_proj_act", 100, "interleaved, transposed, bias"): 160,
    ("down_proj_dgrad_dact", 100, "transposed"): 152,
    ("down_proj_dgrad_dact", 100, "interleaved, transposed, bias"): 128,
    ("down_proj", 120, "transposed"): 32,
}
# Loads of a bias by 2 bytes: a thread's columns of an accumulator are not known to be next to each other.
BIAS_LOADS = {("up_proj_act", 90, "bias"): 32}


@pytest.mark.parametrize(("name", "cell", "capability"), LAUNCHES)
def test_layout(name: str, cell: str, capability: int, tmp_path: Path) -> None:
    device, (activation, gate_up, transposed, bias) = NVIDIA[capability], CELLS[cell]
    operands = make_operands(activation, gate_up, transposed=transposed, bias=bias)
    compiled = compile_launch(row_gemm_launch(host, name, operands, device), capability)
    ptx = compiled.asm["ptx"]
    assert MATRIX_UNIT[capability] in ptx
    assert bool(re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global", ptx)) == device.has_tma, "the weight"
    copies = name in ("up_proj_act", "down_proj_dgrad_dact") or not device.has_tma
    assert bytes_of_copies(ptx) == ({16} if copies else set())
    most = BIAS_LOADS.get((name, capability, cell), 3) if bias else 0
    assert count_loads_of_two_bytes(ptx) <= most, "by element: a bias, never a weight"
    assert compiled.metadata.shared <= device.shared_bytes
    most = STACK.get((name, capability, cell), 8 if capability == 120 else 0)
    assert stack_bytes(compiled, tmp_path) <= most

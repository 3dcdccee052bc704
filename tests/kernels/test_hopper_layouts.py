"""The Hopper kernels compiled for every layout, bias and activation: weights come by TMA, and little else one by one.

Each pair of values of two factors is there, not each product of all. What the registers do not hold is bounded.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from hopper_cells import H200, assert_moves_as_promised
from triton_compile import compile_launch, count_spill_loads, make_operands, row_gemm_launch

from tilemoe.config import GATED_ACTIVATIONS
from tilemoe.kernels.experts.hopper import host
from tilemoe.kernels.experts.triton.configs import Kernel

GATED, UNGATED = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh", "reglu", "swiglu_clamped"), ("relu2", "gelu", "silu")


class Cell(NamedTuple):
    """even: d and n are multiples of the tile's sides."""

    activation: str
    gate_up: str
    transposed: bool
    bias: bool
    even: bool


def cells() -> list[Cell]:
    found = []
    for i, activation in enumerate(GATED):
        transposed, bias, even = i % 2 == 0, i // 2 % 2 == 0, i % 3 == 0
        found.append(Cell(activation, "concatenated", transposed, bias, even))
        found.append(Cell(activation, "interleaved", not transposed, not bias, not even))
    for i, activation in enumerate(UNGATED):
        bias, even = i % 2 == 0, i < 2
        found.append(Cell(activation, "none", True, bias, even))
        found.append(Cell(activation, "none", False, not bias, not even))
    return found


ON_36 = triton.__version__.startswith("3.6.")
CELLS = cells()
COMPILED = CELLS if ON_36 else CELLS[2:4]  # of another release, swiglu_oai's: compiling all takes minutes
# down_proj knows of the activation nothing.
OF_DOWN_PROJ = [
    Cell("silu", "none", transposed, bias, transposed != bias) for transposed, bias in product((False, True), repeat=2)
]
CELLS_OF: dict[Kernel, list[Cell]] = {
    "up_proj_act": COMPILED,
    "down_proj_dgrad_dact": COMPILED,
    "down_proj": OF_DOWN_PROJ if ON_36 else OF_DOWN_PROJ[-1:],
}
# Spill loads in the code of all threads, once per tile; 0 where none is named.
SPILLS_OF_36 = {
    ("up_proj_act", "geglu", "interleaved"): 26,
    ("up_proj_act", "swiglu_clamped", "concatenated"): 2,
    ("up_proj_act", "gelu", "none"): 20,
    ("up_proj_act", "silu", "none"): 10,
    ("down_proj_dgrad_dact", "swiglu_oai", "concatenated"): 2,
    ("down_proj_dgrad_dact", "geglu", "concatenated"): 2,
}
SPILLS_OF_39 = {
    ("up_proj_act", "swiglu_oai", "interleaved"): 6,
    ("down_proj_dgrad_dact", "swiglu_oai", "concatenated"): 11,
}
SPILLS = SPILLS_OF_36 if ON_36 else SPILLS_OF_39


def assert_as_promised(kernel: Kernel, cell: Cell, dtype: torch.dtype, folder: Path) -> None:
    widths = (1536, 512) if cell.even else (1000, 456)  # down_proj of 256 and less: `test_hopper_compiled`
    gate_up = cell.gate_up if cell.activation in GATED_ACTIVATIONS else "concatenated"
    layout = {"transposed": cell.transposed, "bias": cell.bias, "widths": widths, "dtype": dtype}
    operands = make_operands(cell.activation, gate_up, **layout)
    launch = row_gemm_launch(host, kernel, operands, H200, tall=True)
    compiled = compile_launch(launch, 90)
    assert_moves_as_promised(compiled, launch, kernel, cell.gate_up, cell.bias)
    assert count_spill_loads(compiled, folder) <= SPILLS.get((kernel, cell.activation, cell.gate_up), 0)


@pytest.mark.parametrize(("kernel", "cell"), [(k, cell) for k, found in CELLS_OF.items() for cell in found], ids=str)
def test_every_layout_bias_and_activation(kernel: Kernel, cell: Cell, tmp_path: Path) -> None:
    assert_as_promised(kernel, cell, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("kernel", CELLS_OF)
def test_of_float16(kernel: Kernel, tmp_path: Path) -> None:
    assert_as_promised(kernel, CELLS_OF[kernel][-1], torch.float16, tmp_path)


def test_no_pair_is_left_out() -> None:
    values = [set(column) for column in zip(*CELLS, strict=True)]
    for (i, first), (j, second) in combinations(enumerate(values), 2):
        pairs = set(product(first, second))
        if (i, j) == (0, 1):
            pairs = {(name, layout) for name, layout in pairs if (layout == "none") == (name in UNGATED)}
        assert {(cell[i], cell[j]) for cell in CELLS} == pairs, Cell._fields[i] + " and " + Cell._fields[j]

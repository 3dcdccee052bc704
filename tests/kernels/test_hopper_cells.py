"""up_proj and down_proj_dgrad compiled for every cell that the Hopper backend serves: wgmma, the weight by TMA, spills
within a bound.

A cell is an activation, the order of gate and up, the weights' stride order, biases or none, widths and a dtype, as
`hopper_cells.every_cell` lists them. `make test` compiles two; ``TILEMOE_CELLS=all`` (`make every-cell`) compiles all.
Cells that Triton does not tell apart are compiled once: down_proj_dgrad with and without b2, which another kernel adds.
fp16 is not left out: up_proj spills what it spills in bf16, wherever both were counted, but down_proj_dgrad up to three
values more or fewer.

T tokens · d hidden_size · n intermediate_size · E experts
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from hopper_cells import (
    H200,
    Cell,
    Family,
    assert_moves_as_promised,
    assert_no_pointer_to_weight,
    every_cell,
    launch_of_cell,
)
from triton_compile import code_key, compile_launch, count_spill_loads, make_operands

from tilemoe.kernels.experts.triton import host as portable
from tilemoe.runtime.launch import Launch

ALL = os.environ.get("TILEMOE_CELLS") == "all"
BF16, FP16 = torch.bfloat16, torch.float16
SELECTION = [
    Cell("up_proj_act", "swiglu", "interleaved", True, True, "wide", BF16),
    Cell("down_proj_dgrad_dact", "swiglu", "concatenated", False, True, "wide", FP16),
]
ON_36 = triton.__version__.startswith("3.6.")
# Spill loads in the code of all threads, once per tile, of a family's worst cell; 0 where none is named.
SPILLS_OF_36: dict[Family, int] = {
    ("up_proj_act", "geglu", "concatenated"): 2,
    ("up_proj_act", "geglu", "interleaved"): 26,
    ("up_proj_act", "swiglu_clamped", "concatenated"): 2,
    ("up_proj_act", "silu", "none"): 21,
    ("up_proj_act", "gelu", "none"): 20,
    ("up_proj_act", "gelu_tanh", "none"): 14,
    ("down_proj_dgrad_dact", "swiglu", "concatenated"): 2,
    ("down_proj_dgrad_dact", "geglu", "concatenated"): 9,
    ("down_proj_dgrad_dact", "geglu_tanh", "concatenated"): 7,
    ("down_proj_dgrad_dact", "reglu", "concatenated"): 3,
    ("down_proj_dgrad_dact", "swiglu_oai", "concatenated"): 3,
    ("down_proj_dgrad_dact", "swiglu_clamped", "concatenated"): 2,
}
SPILLS_OF_39: dict[Family, int] = {  # of the selection
    ("up_proj_act", "swiglu", "interleaved"): 11,
    ("down_proj_dgrad_dact", "swiglu", "concatenated"): 24,
}
SPILLS = SPILLS_OF_36 if ON_36 else SPILLS_OF_39


def served() -> dict[Cell, Launch]:
    """The cells whose launch is one of the Hopper backend's own kernels, with it."""
    launches = {cell: launch_of_cell(cell) for cell in every_cell()}
    return {cell: launch for cell, launch in launches.items() if launch is not None}


def compiled_alike(launches: dict[Cell, Launch]) -> list[list[Cell]]:
    """The cells in lists of those that have the same code."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell, launch in launches.items():
        found.setdefault(code_key(launch), []).append(cell)
    return list(found.values())


def name_of(cells: list[Cell]) -> str:
    return cells[0].name


def chosen() -> list[Any]:
    """What is compiled: lists of cells of one code."""
    if ALL:
        return compiled_alike(served())
    return [[cell] for cell in SELECTION]


@pytest.mark.parametrize("cells", chosen(), ids=name_of)
def test_cell(
    cells: list[Cell], tmp_path: Path, record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, *_ = cells
    launch = launch_of_cell(cell)
    assert launch is not None, "a portable kernel serves it"
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **said: record_property("cached", said["cache_hit"])
    )
    compiled = compile_launch(launch, 90)
    spills = count_spill_loads(compiled, tmp_path)
    for name, value in (("cells", len(cells)), ("family", " ".join(cell.family)), ("spills", spills)):
        record_property(name, value)
    assert_moves_as_promised(compiled, launch, cell.kernel, cell.gate_up, cell.bias)
    assert spills <= SPILLS.get(cell.family, 0)


@pytest.fixture(scope="module")
def launches() -> dict[Cell, Launch]:
    return served()


def test_the_backend_serves_every_cell(launches: dict[Cell, Launch]) -> None:
    assert [cell.name for cell in every_cell() if cell not in launches] == []
    assert set(SELECTION) <= launches.keys()


def test_only_b2_makes_a_cell_without_code_of_its_own(launches: dict[Cell, Launch]) -> None:
    found = compiled_alike(launches)
    for first, *others in found:
        assert others == ([first._replace(bias=True)] if first.kernel == "down_proj_dgrad_dact" else [])
    assert {cell for cells in found for cell in cells} == launches.keys()


def test_bounds_are_of_families_that_exist(launches: dict[Cell, Launch]) -> None:
    assert {cell.family for cell in launches} >= SPILLS_OF_36.keys() | SPILLS_OF_39.keys()


def test_a_weight_by_pointer_is_seen() -> None:
    """As the portable kernel reads one of which no dimension is contiguous."""
    of = make_operands()
    w2 = of.w2.new_zeros(*of.w2.shape[:2], 2 * of.w2.shape[2])[..., ::2]
    launch, *_ = portable.dgrad_dact_launch(of.x, w2, of.h, of.s, of.plan, of.tiles, of.spec, H200)
    with pytest.raises(AssertionError, match="by pointer"):
        assert_no_pointer_to_weight("", launch)
    launch = launch_of_cell(SELECTION[0])
    assert launch is not None
    tensors = sum(isinstance(value, torch.Tensor) for value in launch.args.values())
    entry = ".visible .entry kernel({}\n)\n{{"
    assert_no_pointer_to_weight(entry.format("\n.param .u64 .ptr .global" * (tensors + 2)), launch)
    with pytest.raises(AssertionError):
        assert_no_pointer_to_weight(entry.format("\n.param .u64 .ptr .global" * (tensors + 3)), launch)

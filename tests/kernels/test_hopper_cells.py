"""up_proj and down_proj_dgrad compiled for every cell that the Hopper backend serves: wgmma, the weight by TMA, spills
within a bound.

A cell is an activation, the order of gate and up, the weights' stride order, biases or none, widths and a dtype, as
`every_cell` lists them. `make test` compiles two; ``TILEMOE_CELLS=all`` (`make every-cell`) compiles all.
Cells that Triton does not tell apart are compiled once: down_proj_dgrad with and without b2, which another kernel adds.
fp16 is not left out: up_proj spills what it spills in bf16, wherever both were counted, but down_proj_dgrad up to three
values more or fewer.

T tokens · d hidden_size · n intermediate_size · E experts · w = 2n gated, n ungated
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton_compile import (
    NVIDIA,
    Cell,
    assert_threads_meet_after_tile_info,
    assert_threads_meet_before_tma_stores,
    bytes_of_copies,
    cells_with_activation,
    code_key,
    compile_launch,
    count_loads_of_two_bytes,
    count_spill_loads,
    launch_of_cell,
)

from tilemoe.kernels.experts.hopper.backend import DTYPES, HopperBackend
from tilemoe.kernels.experts.hopper.configs import tile_of
from tilemoe.kernels.experts.triton.configs import ROW_MAJOR_K, ROW_MAJOR_TILES_OF_B1, Kernel
from tilemoe.runtime.launch import Launch

H200 = NVIDIA[90]
# Hidden and intermediate size. Uneven: multiples of neither the tile's sides nor 16. Wide: column tiles enough,
# and a contraction long enough, for bands.
EVEN, UNEVEN = (128, 256), (200, 136)
WIDE = (ROW_MAJOR_K + 64, (ROW_MAJOR_TILES_OF_B1 + 1) * tile_of("up_proj_act", ROW_MAJOR_K).block_n)
# The order of tiles is the producer's, which knows of an activation only whether and where there is a gate.
ACTIVATIONS_OF_WIDE = ("swiglu", "relu2")
# Single elements stored to shared memory: an interleaved up_proj stores its activation so, 64 by each consumer.
STORES_OF_TWO_BYTES = MappingProxyType({("up_proj_act", "interleaved"): 128})
COPIES = MappingProxyType({"up_proj_act": {16}, "down_proj_dgrad_dact": {4, 16}})
Family = tuple[Kernel, str, str]  # kernel, activation, gate_up


def every_cell() -> list[Cell]:
    """Of all activations of the registry and all dtypes of the backend, wherever a kernel of either kind serves it."""
    return [
        cell
        for dtype, widths in product(DTYPES, (EVEN, UNEVEN, WIDE))
        for cell in cells_with_activation(dtype, widths)
        if widths != WIDE or cell.activation in ACTIVATIONS_OF_WIDE
    ]


def assert_moves_as_promised(compiled: Any, launch: Launch, kernel: Kernel, gate_up: str, bias: bool) -> None:
    """Matrix units; the weight by TMA alone, rows by 16 bytes, little else one by one; threads that meet in time."""
    ptx = str(compiled.asm["ptx"])
    assert f"wgmma.mma_async.sync.aligned.m64n{tile_of(kernel, ROW_MAJOR_K).block_n}k16" in ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global", ptx), "the weight"
    assert_no_pointer_to_weight(ptx, launch)
    assert bytes_of_copies(ptx) == COPIES[kernel], "rows, and for the scores' gradient their pairs"
    # Of the bias, each of a consumer's threads has an entry or two. Tiles, tokens and scores are loads of 4 bytes.
    assert count_loads_of_two_bytes(ptx) <= (4 if bias and kernel == "up_proj_act" else 0)
    assert len(re.findall(r"\bld\.global", ptx)) <= 32
    stores = len(re.findall(r"\bst\.shared\.b16\b", ptx))
    assert stores <= STORES_OF_TWO_BYTES.get((kernel, gate_up), 0)
    assert not re.search(r"\bld\.shared\.b16\b", ptx)
    assert_threads_meet_before_tma_stores(ptx)
    assert_threads_meet_after_tile_info(ptx)
    assert compiled.metadata.shared <= H200.shared_bytes


def assert_no_pointer_to_weight(ptx: str, launch: Launch) -> None:
    """The kernel is given TMA's descriptor of its weight, and a pointer for each tensor, the weight not among them.

    So no load by pointer, of whatever width, can reach it.
    """
    tensors = [name for name, value in launch.args.items() if isinstance(value, Tensor)]
    assert "weight" in launch.args
    assert "weight" not in tensors, "it is given by pointer"
    entry = ptx.partition(".entry")[2].partition("{")[0]
    scratch = 2  # Triton's own: global, and its profiler's
    assert entry.count(".ptr .global") == len(tensors) + scratch


ALL = os.environ.get("TILEMOE_CELLS") == "all"
SELECTION = [
    Cell("up_proj_act", "swiglu", "interleaved", True, True, torch.bfloat16, WIDE),
    Cell("down_proj_dgrad_dact", "swiglu", "concatenated", False, True, torch.float16, WIDE),
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
    launches = {cell: launch_of_cell(cell, HopperBackend(), H200) for cell in every_cell()}
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
    launch = launch_of_cell(cell, HopperBackend(), H200)
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

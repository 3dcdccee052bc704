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
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton_compile import (
    NVIDIA,
    assert_threads_meet_after_tile_info,
    assert_threads_meet_before_tma_stores,
    bytes_of_copies,
    code_key,
    compile_launch,
    count_loads_of_two_bytes,
    count_spill_loads,
    make_operands,
    recorded_launches,
)

from tilemoe.activations import REGISTRY
from tilemoe.kernels.experts.hopper.backend import DTYPES, HopperBackend
from tilemoe.kernels.experts.hopper.configs import tile_of
from tilemoe.kernels.experts.triton import host as portable
from tilemoe.kernels.experts.triton.configs import ROW_MAJOR_K, ROW_MAJOR_TILES_OF_B1, Kernel
from tilemoe.runtime.launch import Launch

H200 = NVIDIA[90]
GATHERS: tuple[Kernel, ...] = ("up_proj_act", "down_proj_dgrad_dact")
# Hidden and intermediate size. Uneven: multiples of neither the tile's sides nor 16. Wide: column tiles enough,
# and a contraction long enough, for bands.
WIDTHS = MappingProxyType(
    {
        "even": (128, 256),
        "uneven": (200, 136),
        "wide": (ROW_MAJOR_K + 64, (ROW_MAJOR_TILES_OF_B1 + 1) * tile_of("up_proj_act", ROW_MAJOR_K).block_n),
    }
)
# The order of tiles is the producer's, which knows of an activation only whether and where there is a gate.
ACTIVATIONS_OF_WIDE = ("swiglu", "relu2")
# Single elements stored to shared memory: an interleaved up_proj stores its activation so, 64 by each consumer.
STORES_OF_TWO_BYTES = MappingProxyType({("up_proj_act", "interleaved"): 128})
COPIES = MappingProxyType({"up_proj_act": {16}, "down_proj_dgrad_dact": {4, 16}, "down_proj": set()})
DTYPE_NAMES = MappingProxyType({torch.bfloat16: "bf16", torch.float16: "fp16"})
Family = tuple[Kernel, str, str]  # kernel, activation, gate_up


class Cell(NamedTuple):
    """gate_up: "none" without a gate. transposed: the other stride order. bias: with b1 and b2. widths: `WIDTHS`."""

    kernel: Kernel
    activation: str
    gate_up: str
    transposed: bool
    bias: bool
    widths: str
    dtype: torch.dtype

    @property
    def family(self) -> Family:
        return self.kernel, self.activation, self.gate_up

    @property
    def name(self) -> str:
        flags = [name for name in ("transposed", "bias") if getattr(self, name)]
        return "-".join((*self.family, *flags, self.widths, DTYPE_NAMES[self.dtype]))


def every_cell() -> list[Cell]:
    """Of all activations of the registry and all dtypes of the backend, wherever a kernel of either kind serves it."""
    return [
        Cell(kernel, activation, gate_up, transposed, bias, widths, dtype)
        for dtype, kernel, (activation, entry) in product(DTYPES, GATHERS, REGISTRY.items())
        for gate_up in (("concatenated", "interleaved") if entry.is_gated else ("none",))
        for transposed, bias, widths in product((False, True), (False, True), WIDTHS)
        if widths != "wide" or activation in ACTIVATIONS_OF_WIDE
    ]


def launch_of_cell(cell: Cell) -> Launch | None:
    """What the Hopper backend launches for it on an H200, in a training; None where that is a portable kernel."""
    gate_up = "concatenated" if cell.gate_up == "none" else cell.gate_up
    layout = {"transposed": cell.transposed, "bias": cell.bias, "widths": WIDTHS[cell.widths], "dtype": cell.dtype}
    of, backend = make_operands(cell.activation, gate_up, **layout), HopperBackend()
    with recorded_launches(H200) as launches:
        if cell.kernel == "up_proj_act":
            backend.up_proj_act(of.x, of.w1, of.b1, of.plan, of.spec)
        else:
            backend.down_proj_dgrad_dact(of.x, of.w2, of.b2, of.h, of.s, of.plan, of.spec)
    found = [launch for launch in launches if launch.kernel.is_gluon()]
    assert len(found) <= 1
    return found[0] if found else None


def assert_moves_as_promised(compiled: Any, launch: Launch, kernel: Kernel, gate_up: str, bias: bool) -> None:
    """Matrix units; the weight by TMA alone, rows by 16 bytes, little else one by one; threads that meet in time."""
    ptx = str(compiled.asm["ptx"])
    assert f"wgmma.mma_async.sync.aligned.m64n{tile_of(kernel, ROW_MAJOR_K).block_n}k16" in ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global", ptx), "the weight"
    assert_no_pointer_to_weight(ptx, launch)
    assert bytes_of_copies(ptx) == COPIES[kernel], "rows, and for the scores' gradient their pairs"
    # Of the bias, each of a consumer's threads has an entry or two. Tiles, tokens and scores are loads of 4 bytes.
    bias_loads = {"up_proj_act": 4, "down_proj": 2}.get(kernel, 0) if bias else 0
    assert count_loads_of_two_bytes(ptx) <= bias_loads
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
    launch, *_ = portable.dgrad_dact_launch(of.x, w2, of.h, of.s, of.plan, of.spec, H200)
    with pytest.raises(AssertionError, match="by pointer"):
        assert_no_pointer_to_weight("", launch)
    launch = launch_of_cell(SELECTION[0])
    assert launch is not None
    tensors = sum(isinstance(value, torch.Tensor) for value in launch.args.values())
    entry = ".visible .entry kernel({}\n)\n{{"
    assert_no_pointer_to_weight(entry.format("\n.param .u64 .ptr .global" * (tensors + 2)), launch)
    with pytest.raises(AssertionError):
        assert_no_pointer_to_weight(entry.format("\n.param .u64 .ptr .global" * (tensors + 3)), launch)

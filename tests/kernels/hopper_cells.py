"""The cells of up_proj and down_proj_dgrad: every combination that their Hopper kernels are compiled for, and what
each promises.

T tokens · d hidden_size · n intermediate_size · E experts · w = 2n gated, n ungated
"""

from __future__ import annotations

import re
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton_compile import (
    NVIDIA,
    assert_threads_meet_after_tile_info,
    assert_threads_meet_before_tma_stores,
    bytes_of_copies,
    count_loads_of_two_bytes,
    make_operands,
    recorded_launches,
)

from tilemoe.activations import REGISTRY
from tilemoe.kernels.experts.hopper.backend import DTYPES, HopperBackend
from tilemoe.kernels.experts.hopper.configs import tile_of
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

"""The Blackwell kernels compiled without a GPU, for every cell that the backend serves: tcgen05 and gather4, no
spills, and what tensor memory, shared memory and registers hold.

A cell is a GEMM, an activation, the order of gate and up, the weights' stride order, biases or none, a dtype, and how
rows are gathered. `make test` compiles a few; all of them are `thorough`.

T tokens · d hidden_size · n intermediate_size · E experts · w = 2n gated, n ungated
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from triton_compile import (
    NVIDIA,
    Cell,
    assert_threads_meet_before_tma_stores,
    bytes_of_copies,
    cells_with_activation,
    compile_launch,
    count_loads_of_two_bytes,
    in_order,
    launch_of_cell,
    stack_bytes,
)

from tilemoe.kernels.experts.blackwell.backend import BlackwellBackend
from tilemoe.kernels.experts.blackwell.configs import EPILOGUE_WARPS, SHARED_BYTES, TMEM_COLUMNS
from tilemoe.kernels.experts.hopper.backend import DTYPES
from tilemoe.kernels.experts.triton.configs import KERNELS, WITH_ACTIVATION, Kernel

BF16, FP16 = DTYPES
IDLE = 24  # registers per thread of the other warps before the roles part
OF_ROWS: tuple[Kernel, ...] = ("down_proj", "up_proj_dgrad")

RAGGED = (200, 136)
SIZES = ((BF16, (1536, 256)), (FP16, RAGGED))
SELECTION = [
    Cell("up_proj_act", "swiglu", "interleaved", True, True, BF16),
    Cell("down_proj_dgrad_dact", "swiglu_clamped", "concatenated", False, False, BF16, RAGGED),
    Cell("up_proj_act", "relu2", "none", False, True, FP16, RAGGED, described=False),
    Cell("down_proj", bias=True, widths=RAGGED),
    Cell("up_proj_wgrad", transposed=True, adds=True),
]


def every_cell() -> list[Cell]:
    """Of all activations of the registry and all dtypes of the backend."""
    found = [
        cell
        for dtype, widths in SIZES
        for cell in cells_with_activation(dtype, widths)
        if not (cell.bias and cell.kernel == "down_proj_dgrad_dact")  # which another kernel adds
    ]
    found += [
        Cell(kernel, transposed=transposed, bias=bias, dtype=dtype, widths=widths)
        for (dtype, widths), kernel in product(SIZES, OF_ROWS)
        for transposed, bias in product((False, True), repeat=2)
        if not (bias and kernel == "up_proj_dgrad")
    ]
    found += [
        Cell(kernel, transposed=transposed, dtype=dtype, adds=adds, described=described)
        for kernel, dtype in product(KERNELS, DTYPES)
        if kernel.endswith("wgrad")
        for transposed, adds, described in product((False, True), repeat=3)
    ]
    return found + [
        Cell(kernel, activation, transposed=transposed, described=False)
        for kernel, activation, transposed in product(WITH_ACTIVATION, ("swiglu", "swiglu_oai"), (False, True))
    ]


def assert_fits(compiled: Any, folder: Path) -> None:
    """Tensor memory, shared memory, registers; nothing spilled."""
    ptx = str(compiled.asm["ptx"])
    assert 0 < compiled.metadata.tmem_size <= TMEM_COLUMNS
    assert compiled.metadata.shared <= SHARED_BYTES
    assert stack_bytes(compiled, folder) == 0
    assert not re.search(r"\btrap\b", ptx), "what Triton puts in place of a kernel that does not fit"
    threads, registers = (int(re.findall(rf"\.{name} (\d+)", ptx)[0]) for name in ("reqntid", "maxnreg"))
    pool = threads * registers  # what the CTA is launched with; setmaxnreg gives from one warp group to another
    assert pool <= 1 << 16
    idle, others, epilogue, alone = sorted({int(count) for count in re.findall(r"setmaxnreg\S+\s+(\d+)", ptx)})
    of_epilogue = 32 * EPILOGUE_WARPS
    assert idle == IDLE
    assert alone * of_epilogue + idle * (threads - of_epilogue) <= pool
    assert epilogue * of_epilogue + others * (threads - of_epilogue) <= pool


def assert_protocol(ptx: str) -> None:
    """One thread starts a TMA store, or arrives, for all warps of its role: these must have met before.

    Of an accumulator: after its last load has come. Of copies: after all have waited for them; and there is a fence, as
    there is behind the barriers' initialisation.
    """
    assert_threads_meet_before_tma_stores(ptx, at_least=1)  # of a loop over slices
    letters = {r"tcgen05\.ld": "l", r"tcgen05\.wait::ld": "w", r"bar\.sync": "|", r"mbarrier\.arrive\.shared": "a"}
    order = in_order(ptx, letters | {r"cp\.async\.wait_group": "g", r"fence\.proxy\.async": "f"})
    assert {"l", "w", "|", "a"} <= set(order)
    assert re.search(r"l[^w]*a", order) is None, "an arrival with a load in flight"
    assert re.search(r"w[^|]*a", order) is None, "an arrival that the warps do not meet before"
    assert re.search(r"g(?!\|f)", order) is None, "after copies: a barrier, and a fence of the thread that arrives"


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=cell.name) for cell in SELECTION),
        *(
            pytest.param(cell, id=cell.name, marks=pytest.mark.thorough)
            for cell in every_cell()
            if cell not in SELECTION
        ),
    ],
)
def test_cell(cell: Cell, tmp_path: Path) -> None:
    launch = launch_of_cell(cell, BlackwellBackend(), NVIDIA[100])
    assert launch is not None, "a portable kernel serves it"
    compiled = compile_launch(launch, 100)
    ptx, gathers = str(compiled.asm["ptx"]), cell.kernel not in OF_ROWS
    assert "tcgen05.mma.cta_group::1.kind::f16" in ptx
    assert ("tile::gather4" in ptx) == (gathers and cell.described)
    assert bytes_of_copies(ptx) == (set() if cell.described else {16})
    assert ("cp.reduce.async.bulk.tensor" in ptx) == cell.adds
    assert count_loads_of_two_bytes(ptx) == 0, "of a bias, 16 bytes at a time"
    assert_protocol(ptx)
    assert_fits(compiled, tmp_path)

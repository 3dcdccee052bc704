"""The Triton kernels compiled for GPUs that are not here: what `compiled_rows.ROWS` says of each, and what is said of
one kernel alone. The GEMMs and what a layer launches: test_triton_every_kernel.py.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import compiled_rows as rows
import pytest
import torch
from compiled_rows import DEVICES, NO_SPILL, ROWS, SIZES, few_row_gemms, name_of
from triton_compile import (
    CAPABILITIES,
    GFX942,
    MATRIX_UNIT,
    MI300,
    NVIDIA,
    amd_spills,
    compile_launch,
    compile_launches,
    compiled_key,
    count_spill_loads,
    machine_code,
    make_operands,
    recorded_launches,
    row_gemm_launch,
    stack_bytes,
)

from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton import host
from tilemoe.kernels.experts.triton.configs import choose_small_m_tile, shared_bytes
from tilemoe.kernels.experts.triton.formats.transpose import SLICE
from tilemoe.kernels.router import triton as router
from tilemoe.kernels.router.triton import RouterSpec, select_launch
from tilemoe.runtime.launch import Launch, ceil_div

NEWER = (100, 120)  # GPUs that nobody has run these kernels on
# Whose other dtypes and sizes are compiled always.
SELDOM = {
    "packed nf4 torch.float16",
    "packed nf4 torch.float32",
    "packed mxfp4 torch.float16",
    "packed mxfp4 torch.float32",
    "packing torch.float16",
    "whole rows 7168",
    "loss 100352 torch.float16",
}
# Of the rows that share their kernels, other sizes are compiled for one GPU: 8.0 has the first row of each.
FIRST = {re.match(r"[a-z ']+", name)[0]: name for name in reversed(ROWS)}.values()  # type: ignore[index]


def is_seldom(name: str, capability: int) -> bool:
    return capability in NEWER or name in SELDOM or (capability == 80 and name not in FIRST)


COMPILED = [
    pytest.param(name, capability, marks=pytest.mark.thorough if is_seldom(name, capability) else ())
    for name, row in ROWS.items()
    for capability in row.capabilities
]


@pytest.mark.parametrize(("name", "capability"), COMPILED)
def test_row(name: str, capability: int, tmp_path: Path) -> None:
    row, device = ROWS[name], DEVICES[capability]
    launches = list(row.launches(device))
    assert row.kernels <= set(map(name_of, launches)), "a kernel is left out"
    assert {kernel for *_, kernel in row.has} <= {"", *map(name_of, launches)}
    for launch, compiled in compile_launches(launches, capability):
        where, ptx = f"{name_of(launch)} for sm_{capability}", str(compiled.asm["ptx"])
        programs = 1 if launch.max_registers is None else 2
        assert programs * compiled.metadata.shared <= (row.shared or device.shared_bytes), where
        if (stack := stack_bytes(compiled, tmp_path)) > row.stack:
            assert capability == 120, where
            assert stack <= NO_SPILL, where
            assert count_spill_loads(compiled, tmp_path) <= row.loads_on_120, where
        assert re.search(row.lacks, ptx) is None, where
        for pattern, least, kernel in row.has:
            if kernel in ("", name_of(launch)):
                pattern = re.escape(MATRIX_UNIT[capability]) if pattern == rows.MATRIX_UNIT else pattern
                assert len(re.findall(pattern, ptx)) >= least, f"{where}: {pattern}"


AMD = [
    pytest.param(name, marks=pytest.mark.thorough if name.startswith("packed mxfp4") else ())
    for name, row in ROWS.items()
    if row.amd and name not in SELDOM
]


@pytest.mark.parametrize("name", AMD)
def test_amd(name: str) -> None:
    for launch, compiled in compile_launches(ROWS[name].launches(MI300), GFX942):
        assert compiled.metadata.shared <= MI300.shared_bytes, name_of(launch)
        assert amd_spills(compiled) == 0, name_of(launch)


# Many numbers of tokens, one code.


def dgrad(tokens: int) -> Launch:
    """Of 2 experts and 2 per token."""
    of = make_operands(widths=(64, 32), tokens=tokens)
    return row_gemm_launch(host, "down_proj_dgrad_dact", of, NVIDIA[80])


OF_TOKENS: dict[str, tuple[Callable[[int], Iterable[Launch]], tuple[int, ...]]] = {
    "rounding": (lambda tokens: rows.rounded(8, 2, "nearest", "softmax", tokens)(NVIDIA[90]), (128, 129, 1000, 4096)),
    "bias gradients": (lambda tokens: rows.bias_grads(NVIDIA[90], "gpt-oss", tokens=tokens).values(), (16, 17, 1000)),
    "exchange": (lambda tokens: rows.recorded(rows.sent(4, torch.float32, tokens))(NVIDIA[90]), (1, 48, 77, 202)),
    "window": (
        lambda tokens: rows.recorded(rows.through_a_window(4, torch.bfloat16, 64, tokens, tokens % 4))(NVIDIA[90]),
        (1, 48, 77, 202),
    ),
    "down_proj_dgrad": (lambda tokens: [dgrad(tokens)], (1, 17, 64, 1000)),
    "few rows": (lambda tokens: few_row_gemms(tokens, NVIDIA[90], widths=(64, 32)), (1, 2, 7, 16)),
    "not so few": (lambda tokens: few_row_gemms(tokens, NVIDIA[90], widths=(64, 32)), (17, 32, 33, 64)),
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_the_number_of_tokens_is_in_no_key(name: str) -> None:
    launches_of, numbers = OF_TOKENS[name]
    assert len({tuple(map(compiled_key, launches_of(tokens))) for tokens in numbers}) == 1


@pytest.mark.parametrize("d", [2176, 2304, 3072, 7168])
def test_nothing_has_to_be_compiled_once_a_slice_was_added(d: int) -> None:
    """Else an operator's first call would add the slice twice: it launches until it lacks a binary, then runs again."""
    kernels, x, dh, total = (
        backend_named("hopper_fp8"),
        rows.zeros(256, d),
        rows.zeros(512, 2048),
        torch.zeros(4, 2048, d),
    )
    with recorded_launches(NVIDIA[90]) as launches:
        kernels.up_proj_wgrad(x, dh, rows.topk_plan(256, 2, 4), False, total)
    keys = [(launch.kernel, launch._key()) for launch in launches]
    adds = [at for at, launch in enumerate(launches) if launch.constants.get("ADDS")]
    assert len(adds) == ceil_div(d, SLICE)
    assert set(keys[adds[0] :]) <= set(keys[: adds[0] + 1])


# One kernel alone.


def test_all_logits_have_their_gradient_before_the_chosen_do() -> None:
    """Other threads store those."""
    for name in ("select 512 10 softmax True 1.0 1 1 True True", "select 256 8 sigmoid True 2.5 8 4 True True"):
        backward = list(ROWS[name].launches(NVIDIA[90]))[1]
        ptx = str(compile_launch(backward, 90).asm["ptx"])
        stores = re.findall(r"(st\.global\.v4|st\.global|bar\.sync)", ptx)
        of_all = len(stores) - stores[::-1].index("st.global.v4")
        assert stores[of_all] == "bar.sync"
        assert set(stores[of_all:]) == {"bar.sync", "st.global"}


def test_groups_never_fill_more_columns_than_fit() -> None:
    for groups in range(1, router.MAX_EXPERTS // 2 + 1):
        logits = torch.empty(1, router.MAX_EXPERTS // groups * groups, device="meta")
        tile = select_launch(logits, None, None, RouterSpec(1, "softmax", True, 1.0, groups, 1, False, False))
        assert tile.constants["GROUPS"] * tile.constants["GROUP"] <= 8192
        assert tile.num_warps <= 16


def test_two_ctas_of_packed_weights_share_a_hopper() -> None:
    for name, row in ROWS.items():
        if name.startswith("packed") and "float32" not in name:
            assert [launch.max_registers for launch in row.launches(NVIDIA[90])] == [128] * 4
            assert {launch.max_registers for launch in row.launches(NVIDIA[80])} == {None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.thorough)])
def test_a_sum_of_rows_has_wide_loads_in_flight(capability: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """16 bytes of each thread's, several asked for before the first is added: 64 KB with 8 programs at a time."""
    launch = rows.bias_grads(NVIDIA[capability], "gpt-oss", dtype)["tile_sums"]
    compiled = compile_launch(launch, capability)
    code = machine_code(compiled, tmp_path)
    loads = [found.start() for found in re.finditer(r"\bLDG\.E\.128\b", code)]
    first_sum = re.search(r"\bFADD\b", code)
    assert first_sum is not None
    ahead = sum(place < first_sum.start() for place in loads)
    assert 8 * ahead * 16 * 32 * launch.num_warps >= 64 * 1024
    height, width = launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]
    assert len(loads) * 16 * 32 * launch.num_warps == height * width * dtype.itemsize, "no narrower loads"
    assert count_spill_loads(compiled, tmp_path) == 0


def test_every_program_of_a_bias_gradient_has_work_on_an_h200() -> None:
    """Of the product that sums over tokens: one wave, and most multiprocessors in it."""
    for size, (d, _, experts, _) in SIZES.items():
        tiles, splits = rows.bias_grads(NVIDIA[90], size)["scores_times_grad"].grid
        assert tiles == -(-d // 128) * max(1, experts // 128), size
        assert 0.85 * 132 <= tiles * splits <= 2 * 132, size


# up_proj and down_proj for few rows.

LAYOUTS = [
    ("swiglu_oai", "interleaved", True),
    *(
        pytest.param(*layout, marks=pytest.mark.thorough)
        for layout in (
            ("swiglu", "concatenated", False),
            ("swiglu", "concatenated", True),
            ("geglu", "interleaved", False),
            ("gelu_tanh", "concatenated", False),
        )
    ),
]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tokens", [1, 60])
@pytest.mark.parametrize(("activation", "gate_up", "transposed"), LAYOUTS)
def test_weights_of_every_layout_are_loaded_ahead_and_wide(
    activation: str, gate_up: str, transposed: bool, tokens: int, capability: int, tmp_path: Path
) -> None:
    device = NVIDIA[capability]
    launches = few_row_gemms(tokens, device, activation, gate_up, transposed)
    for launch, compiled in compile_launches(launches, capability):
        ptx, tile = compiled.asm["ptx"], launch.constants
        copies = re.findall(r"cp\.async\.\w+\.shared\.global [^;]*, 0x([0-9a-f]+)", ptx)
        assert len(copies) >= 3 * tile["BLOCK_K"] * tile["BLOCK_N"] // (8 * 32 * launch.num_warps), "stages in flight"
        assert set(copies) == {"10"}, "16 bytes each"
        # 16 rows are fewer than the newer instructions take.
        assert (MATRIX_UNIT[capability] if tile["BLOCK_M"] == 64 else "mma.sync") in ptx
        assert stack_bytes(compiled, tmp_path) <= NO_SPILL
        assert compiled.metadata.shared <= device.shared_bytes // 2, "two programs share a multiprocessor"


def test_every_tile_for_few_rows_fits_twice() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        device = rng.choice([*NVIDIA.values(), MI300])
        kernel = rng.choice(["up_proj_act", "down_proj"])
        widths = [8 * rng.randint(1, 2 ** rng.randint(0, 11)) for _ in range(2)]
        itemsize, block_m = rng.choice([2, 4]), rng.choice([16, 64])
        gate_up = rng.choice([None, "concatenated", "interleaved"]) if kernel == "up_proj_act" else None
        tile = choose_small_m_tile(kernel, block_m, *widths, itemsize, device, gate_up)  # type: ignore[arg-type]
        assert tile.block_m == block_m
        assert min(tile.block_n, tile.block_k) >= 16
        assert shared_bytes(kernel, tile, itemsize, gate_up) <= device.shared_bytes // 2  # type: ignore[arg-type]

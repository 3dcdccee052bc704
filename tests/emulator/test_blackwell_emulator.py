"""The emulator's Blackwell side by a small GEMM of its own: what it computes, and that it finds each kind of mistake.

out (M, N) = x[rows] (M, K) w^T, one tile of BM x BN after the other, into two accumulators in turn.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import pytest
import torch
from blackwell_emulator import BlackwellEmulator
from gluon_emulator import Edits
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    async_copy,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from tilemoe.kernels.experts.hopper.descriptors import described
from tilemoe.kernels.experts.hopper.gluon_compat import cp_async, tma_load, tma_store
from tilemoe.runtime.launch import Launch, launch_of

M, N, K, TOKENS = 256, 96, 144, 50
BM, BK, BN, STAGES = (gl.constexpr(value) for value in (64, 64, 32, 2))
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
THREADS = gl.constexpr(128)  # that copy


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def producer(x, described_x, weight, rows, tiles, column_tiles, k_size, ring, GATHERS: gl.constexpr):
    a_smem, b_smem, full, empty, copied = ring
    layout: gl.constexpr = gl.SliceLayout(1, COPIES)
    step = 0
    for tile in range(tiles):
        row = gl.load(rows + tile // column_tiles * BM + gl.arange(0, BM, layout))
        for k in range(0, k_size, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), step // STAGES % 2 ^ 1)
            mbarrier.expect(full.index(stage), weight.block_type.nbytes + (BM * BK * 2 if GATHERS else 0))
            tma_load(weight, [tile % column_tiles * BN, k], full.index(stage), b_smem.index(stage))
            if GATHERS:
                tma.async_gather(described_x, row, k, full.index(stage), a_smem.index(stage))
            else:
                columns = k + gl.arange(0, BK, gl.SliceLayout(0, COPIES))
                pointers = x + (row * k_size)[:, None] + columns[None, :]
                cp_async(a_smem.index(stage), pointers, mask=(columns < k_size)[None, :])
                async_copy.mbarrier_arrive(copied.index(stage), increment_count=False)
            step += 1


@gluon.jit
def relay(steps, full, copied):
    for step in range(steps):
        mbarrier.wait(copied.index(step % STAGES), step // STAGES % 2)
        fence_async_shared()
        mbarrier.arrive(full.index(step % STAGES), count=1)


@gluon.jit
def mma(tiles, k_size, ring, acc, acc_full, acc_empty):
    a_smem, b_smem, full, empty, _copied = ring
    step = 0
    for tile in range(tiles):
        mbarrier.wait(acc_empty.index(tile % 2), tile // 2 % 2 ^ 1)
        for k in range(0, k_size, BK):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES % 2)
            right = b_smem.index(stage).permute([1, 0])
            tcgen05_mma(a_smem.index(stage), right, acc.index(tile % 2), use_acc=k > 0, mbarriers=[empty.index(stage)])
            step += 1
        tcgen05_commit(acc_full.index(tile % 2))


@gluon.jit
def epilogue(out, tiles, column_tiles, acc, acc_full, acc_empty, staging):
    for tile in range(tiles):
        mbarrier.wait(acc_full.index(tile % 2), tile // 2 % 2)
        value = acc.index(tile % 2).load()
        mbarrier.arrive(acc_empty.index(tile % 2), count=1)
        tma.store_wait(0)
        staging.store(value.to(out.dtype))
        fence_async_shared()
        tma_store(out, [tile // column_tiles * BM, tile % column_tiles * BN], staging)
    tma.store_wait(0)


@gluon.jit
def gemm_kernel(x, described_x, weight, out, rows, row_tiles, column_tiles, k_size, k_steps, GATHERS: gl.constexpr):
    a_smem = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, BM, BK], LAYOUT)
    b_smem = gl.allocate_shared_memory(weight.dtype, [STAGES, BN, BK], LAYOUT)
    staging = gl.allocate_shared_memory(out.dtype, [BM, BN], out.layout)
    full, copied = barriers(STAGES, 1 if GATHERS else 2), barriers(STAGES, THREADS)
    ring = (a_smem, b_smem, full, barriers(STAGES, 1), copied)
    acc = allocate_tensor_memory(gl.float32, [2, BM, BN], TensorMemoryLayout([BM, BN], col_stride=1))
    acc_full, acc_empty = barriers(2, 1), barriers(2, 1)
    tiles = row_tiles * column_tiles
    fence_async_shared()
    gl.warp_specialize(
        [
            (epilogue, (out, tiles, column_tiles, acc, acc_full, acc_empty, staging)),
            (producer, (x, described_x, weight, rows, tiles, column_tiles, k_size, ring, GATHERS)),
            (mma, (tiles, k_size, ring, acc, acc_full, acc_empty)),
            (relay, (0 if GATHERS else tiles * k_steps, full, copied)),
        ],
        [4, 1, 1],
        [80, 48, 24],
    )


def launch(gathers: bool) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Of the GEMM, its output, and what that is to be."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, K, generator=generator).half() for size in (TOKENS, N))
    rows = torch.randint(TOKENS, (M,), generator=generator, dtype=torch.int32)
    out = torch.full((M, N), torch.nan, dtype=torch.float16)
    args: tuple[Any, ...] = (x, described(x, [1, BK.value]), described(weight, [BN.value, BK.value]))
    args += (described(out, [BM.value, BN.value]), rows, M // BM.value, N // BN.value, K, -(-K // BK.value))
    return launch_of(gemm_kernel, (1,), args, {"GATHERS": gathers}), out, x[rows.long()].float() @ weight.float().T


def run(gathers: bool, seed: int = 0, late: float = 0.9, edits: Edits | None = None) -> None:
    given, out, expected = launch(gathers)
    BlackwellEmulator(seed, late, edits).run(given)
    torch.testing.assert_close(out.float(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathers", "copies"])
@pytest.mark.parametrize("late", [0.3, 0.9, 1.0])
def test_a_gemm_is_right_in_any_order(late: float, gathers: bool) -> None:
    for seed in range(3):
        run(gathers, seed, late)


COMMITTED = "mbarriers=[empty.index(stage)]"
WAITED = "mbarrier.wait(copied.index(step % STAGES), step // STAGES % 2)"
FAULTS = {  # does it gather, (function, text, replacement), what is said
    "no commit of a stage": (True, ("mma", COMMITTED, "mbarriers=[]"), "deadlock"),
    "a stage is released before its product has read it": (
        True, ("mma", COMMITTED, "mbarriers=[]); mbarrier.arrive(empty.index(stage)"), "not close|NaN",
    ),
    "no commit of an accumulator": (True, ("mma", "tcgen05_commit(acc_full.index(tile % 2))", "pass"), "deadlock"),
    "an accumulator is given away before it is done": (
        True, ("mma", "tcgen05_commit(", "mbarrier.arrive("), "product that writes it is in flight",
    ),
    "an accumulator is read before it is full": (
        True, ("epilogue", "mbarrier.wait(acc_full.index(tile % 2), tile // 2 % 2)", "pass"), "in flight|not close",
    ),
    "an accumulator is overwritten before it is read": (
        True, ("mma", "mbarrier.wait(acc_empty.index(tile % 2), tile // 2 % 2 ^ 1)", "pass"), "not close|in flight",
    ),
    "the accumulator before is kept": (True, ("mma", "use_acc=k > 0", "use_acc=True"), "not close"),
    "a gather is not expected": (True, ("producer", "BM * BK * 2", "0"), "more bytes"),
    "a gather of other columns": (True, ("producer", "row, k, full", "row, 0, full"), "not close"),
    "a wait for copies is missing": (False, ("relay", WAITED, "pass"), "before a fence|more arrivals"),
    "no fence behind copies": (False, ("relay", "fence_async_shared()", "pass"), "before a fence"),
    "no arrival of copies": (False, ("producer", "async_copy.mbarrier_arrive(", "(lambda *_, **__: 0)("), "deadlock"),
    "copies change no count": (False, ("producer", "increment_count=False", "increment_count=True"), "deadlock"),
    "the MMA warp reads an accumulator": (
        True, ("mma", "        tcgen05_commit(", "        acc.index(0).load(); tcgen05_commit("), "a quarter of",
    ),
    "barriers without a fence": (True, ("gemm_kernel", "fence_async_shared()", "pass"), "before a fence of its init"),
    "too much tensor memory": (
        True, ("gemm_kernel", "[2, BM, BN], Ten", "[17, BM, BN], Ten"), "more columns than tensor memory",
    ),
    "too much shared memory": (
        True, ("gemm_kernel", "[STAGES, BM, BK], LAY", "[28, BM, BK], LAY"), "more shared memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_mistakes_are_found(name: str) -> None:
    gathers, (function, text, instead), message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        run_often(gathers, {function: (text, instead)})


def run_often(gathers: bool, edits: Edits) -> None:
    """With each warp group the slow one."""
    for seed in range(4):
        for late in (0.9, 0.3):
            run(gathers, seed, late, edits)

"""down_proj_dgrad fused with the activation's backward and the scores' gradient:
``da' = do w2``, ``dh = act'(h) s da'``, ``a_scaled = s act(h)``, and each row's ``<da', act(h)>``.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · BM, BN tile

do is gathered like x in up_proj. A separate warp loads h, gate and up, for one slice of 64 columns of a at a time, into
a ring of two buffers. Each barrier, who waits for it, and what completes its phase:

h_full (2)    the epilogue: TMA's bytes
h_empty (2)   h's loader: an arrival of the epilogue, once the TMA stores have read the dh that it wrote over h

The epilogue processes a slice in two halves, so that a thread's columns fit in registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilemoe.kernels.experts.blackwell import configs
from tilemoe.kernels.experts.blackwell.gluon_compat import tmem_load, tmem_slices, tmem_zeros
from tilemoe.kernels.experts.blackwell.pipeline import (
    BM,
    EPILOGUE_N,
    new_accumulators,
    new_ring,
    release_accumulator,
    row_mma,
    row_producer,
    wait_accumulator,
)
from tilemoe.kernels.experts.hopper.gemm_dgrad_dact import gate_up_grad, interleaved_half_grad
from tilemoe.kernels.experts.hopper.gluon_compat import tma_load, tma_store
from tilemoe.kernels.experts.hopper.pipeline import RAGGED_EXTENT, new_barriers, row_pointers, tile_coords
from tilemoe.kernels.experts.triton.activations import inner

HALF = gl.constexpr(configs.EPILOGUE_N // 2)
H_STAGES = gl.constexpr(configs.H_STAGES)
ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [configs.EPILOGUE_WARPS], [0]))


@gluon.jit
def new_h_ring(dtype: gl.constexpr, GATE_UP: gl.constexpr):
    """(h_smem, h_full, h_empty); a stage is (2 BM, 64), gate above up, two blocks (BM, 64) of pairs, or one."""
    BLOCKS: gl.constexpr = 2 if GATE_UP == "interleaved" else 1
    ROWS: gl.constexpr = 2 * BM if GATE_UP == "concatenated" else BM
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    h_smem = gl.allocate_shared_memory(dtype, [H_STAGES * BLOCKS, ROWS, EPILOGUE_N], layout)
    return h_smem, new_barriers(H_STAGES, 1), new_barriers(H_STAGES, 1)


@gluon.jit
def h_loader(
    h, tiles, row_tiles, column_tiles, h_ring, BN: gl.constexpr, BAND: gl.constexpr, GATE_UP: gl.constexpr
):  # fmt: skip
    """h's loader, one warp. h: for concatenated gate and up, a descriptor of (2, R_max, n) with boxes (2, BM, 64); else
    of (R_max, w) with boxes (BM, 64), two for each slice if interleaved."""
    h_smem, h_full, h_empty = h_ring
    BLOCKS: gl.constexpr = 2 if GATE_UP == "interleaved" else 1
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        _expert, row, _end, col = tile_coords(index, row_tiles, column_tiles, tiles, BN, BAND)
        for i in range(BN // EPILOGUE_N):
            stage = step % H_STAGES
            mbarrier.wait(h_empty.index(stage), ((step // H_STAGES) & 1) ^ 1)
            mbarrier.expect(h_full.index(stage), BLOCKS * h.block_type.nbytes)
            for block in gl.static_range(BLOCKS):
                column = BLOCKS * (col + i * EPILOGUE_N) + block * EPILOGUE_N
                place = [0, row, column] if GATE_UP == "concatenated" else [row, column]
                buffer = h_smem.index(BLOCKS * stage + block)
                tma_load(h, place, h_full.index(stage), buffer.reshape(h.block_shape))
            step += 1


@gluon.jit
def half_grad(
    acc, half: gl.constexpr, first, last, score, limit, alpha, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr
):
    """(da', a), (BM, HALF) each, of half a slice of the accumulator. Overwrites h, in ``first`` and ``last``, by dh."""
    da = tmem_load(acc.slice(half * HALF, HALF))
    if GATE_UP == "concatenated":
        gate, up = first.slice(0, BM).slice(half * HALF, HALF, 1), first.slice(BM, BM).slice(half * HALF, HALF, 1)
        a = gate_up_grad(gate, up, da, score, limit, alpha, ACTIVATION)
    elif GATE_UP == "interleaved":
        a = interleaved_half_grad(first if half == 0 else last, da, score, limit, alpha, ACTIVATION)
    else:
        buffer = first.slice(half * HALF, HALF, 1)
        a, slope = inner(buffer.load(da.type.layout).to(gl.float32), ACTIVATION, False)
        scale = gl.convert_layout(score, gl.SliceLayout(1, da.type.layout))
        buffer.store((da * scale[:, None] * slope).to(buffer.dtype))
    return da, a


@gluon.jit
def dact_slice(
    acc, dh, a_scaled, score, end, row, column, limit, alpha, h_ring, step, a_smem,
    GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The epilogue of a slice ``acc`` of the accumulator, with its h in the stage of ``step``. Returns the products
    da' a (BM, HALF) of the left half plus those of the right half, for <da', a>.

    It starts the TMA stores of dh and a_scaled, and releases h's stage of the slice before.
    """
    h_smem, h_full, h_empty = h_ring
    BLOCKS: gl.constexpr = 2 if GATE_UP == "interleaved" else 1
    stage = step % H_STAGES
    mbarrier.wait(h_full.index(stage), (step // H_STAGES) & 1)
    first, last = h_smem.index(BLOCKS * stage), h_smem.index(BLOCKS * stage + BLOCKS - 1)
    for half in gl.static_range(2):
        da, a = half_grad(acc, half, first, last, score, limit, alpha, GATE_UP, ACTIVATION)
        if half == 0:  # after the stores to shared memory, since ptxas hoists a wait above plain arithmetic
            tma.store_wait(0)
            mbarrier.arrive(h_empty.index((step + H_STAGES - 1) % H_STAGES), count=1, pred=step > 0)
            products = da * a
        else:
            products += da * a
        scale = gl.convert_layout(score, gl.SliceLayout(1, a.type.layout))
        a_smem.slice(half * HALF, HALF, 1).store((a * scale[:, None]).to(a_smem.dtype))
    last_row = RAGGED_EXTENT - end + row
    fence_async_shared()
    tma_store(a_scaled, [RAGGED_EXTENT, end, last_row, column], a_smem.reshape(a_scaled.block_shape))
    if GATE_UP == "concatenated":
        tma_store(dh, [RAGGED_EXTENT, end, 0, last_row, column], first.reshape(dh.block_shape))
    else:
        tma_store(dh, [RAGGED_EXTENT, end, last_row, BLOCKS * column], first.reshape(dh.block_shape))
    if GATE_UP == "interleaved":
        tma_store(dh, [RAGGED_EXTENT, end, last_row, BLOCKS * column + EPILOGUE_N], last.reshape(dh.block_shape))
    return products


@gluon.jit
def dact_epilogue(
    dh, a_scaled, s, partial, pair_of_row, capacity, limit, alpha, tiles, row_tiles, column_tiles, accumulators, h_ring,
    a_smem, BN: gl.constexpr, BAND: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The epilogue warps of down_proj_dgrad."""
    tile, step = 0, 0
    rows = gl.arange(0, BM, ROW_LAYOUT)
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        _expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, BN, BAND)
        score = gl.load(s + gl.load(row_pointers(pair_of_row, row, end, rows))).to(gl.float32)
        slices = tmem_slices(wait_accumulator(accumulators, tile), EPILOGUE_N)
        sums = tmem_zeros(slices.index(0).slice(0, HALF))
        for i in range(BN // EPILOGUE_N):
            sums += dact_slice(
                slices.index(i), dh, a_scaled, score, end, row, col + i * EPILOGUE_N, limit, alpha, h_ring, step + i,
                a_smem, GATE_UP, ACTIVATION,
            )  # fmt: skip
        release_accumulator(accumulators, tile)
        # Columns past n add 0, since the weight, and so da', is 0 there.
        ds = gl.sum(sums, axis=1)
        stored = row + gl.arange(0, BM, ds.type.layout)
        gl.store(partial + (col // BN).to(gl.int64) * capacity + stored, ds, mask=stored < end)
        step += BN // EPILOGUE_N
        tile += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity"])
def gemm_dgrad_dact_kernel(
    do,
    weight,
    h,
    dh,
    a_scaled,
    s,
    partial,
    token_of_row,
    pair_of_row,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    capacity,
    d,
    n,
    stride_do,
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    BAND: gl.constexpr,
    ACCESS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """down_proj_dgrad: do (T, d) gathered, weight (E, 1, d, n), s (pairs) in the caller's order, a_scaled (R_max, n).

    h and dh: (2, R_max, n) if gate and up are concatenated, else (R_max, w); GATE_UP is "none" without a gate.
    partial (column tiles, R_max) fp32: <da', a> over a tile's columns.
    """
    column_tiles = gl.cdiv(n, BN)
    ring, h_ring = new_ring(weight, weight.dtype, STAGES, ACCESS), new_h_ring(weight.dtype, GATE_UP)
    a_smem = gl.allocate_shared_memory(weight.dtype, [BM, EPILOGUE_N], gl.NVMMASharedLayout(128, 16, 2))
    accumulators, tiles = new_accumulators(BN), (expert_of_tile, row_of_tile, end_of_tile)
    row_tiles = gl.load(num_tiles)
    fence_async_shared()  # a thread has initialised the barriers, at which TMA and tcgen05 arrive
    gl.warp_specialize(
        [
            (dact_epilogue, (dh, a_scaled, s, partial, pair_of_row, capacity, limit, alpha, tiles, row_tiles,
                             column_tiles, accumulators, h_ring, a_smem, BN, BAND, GATE_UP, ACTIVATION)),
            (row_producer, (do, stride_do, token_of_row, weight, tiles, row_tiles, d, n, ring, BN, B_K_MAJOR, BAND,
                            ACCESS)),
            (row_mma, (row_tiles, column_tiles, d, ring, accumulators, BN, B_K_MAJOR)),
            (h_loader, (h, tiles, row_tiles, column_tiles, h_ring, BN, BAND, GATE_UP)),
        ],
        [4, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip

"""Faults to be planted in the Blackwell kernels' sources, each with the errors by which the emulator shows it.

Each is (function, a text that is once in its source, what is put in its place, the errors), in the form of
`hopper_faults`. Those in functions that kernels share must be shown by each of them: see `GROUPS`.
"""

from dataclasses import replace

import torch
from hopper_faults import ANOTHER, EITHER, FENCE, NUMBERS, PROTOCOL, UNFINISHED, Fault
from triton_checks import Case

# More k-blocks than stages, and more tiles than accumulators.
SWIGLU = Case(torch.float16, hidden_size=320, intermediate_size=264)
INTERLEAVED = replace(SWIGLU, gate_up="interleaved")
UNGATED = replace(SWIGLU, activation="relu2")
BIAS = replace(SWIGLU, bias=True)

IN_FLIGHT = "in flight"
ANY = f"{EITHER}|{IN_FLIGHT}|{FENCE}|{ANOTHER}"
READY = f"{EITHER}|{IN_FLIGHT}"
FULL = "mbarrier.wait(full.index(stage), (step // full.shape[0]) & 1)"
ACC_FULL = "mbarrier.wait(acc_full.index(tile % ACCUMULATORS), (tile // ACCUMULATORS) & 1)"
ACC_EMPTY = "mbarrier.wait(acc_empty.index(buffer), ((tile // ACCUMULATORS) & 1) ^ 1)"
COMMITTED = "mbarriers=[empty.index(stage)]"
STORED = "tma.store_wait(0)"
SLICES, COLUMNS = "for i in range(SLICES):", "for i in range(BN // EPILOGUE_N):"
RELEASE = "release_accumulator(accumulators, tile)\n        "
EARLY = f"{ANY}|{PROTOCOL}"
# The mainloop and both of its ends, in every GEMM.
OF_ALL: dict[str, Fault] = {
    "a stage is filled while it is read": ("producer_acquire", "mbarrier.wait(empty.", "(empty.", ANY),
    "the producer's first phase": ("producer_acquire", " & 1) ^ 1)", " & 1))", "deadlock"),
    "the producer's phase stays": ("producer_acquire", "(step // full.shape[0])", "0", ANY),
    "a stage is read before it is full": ("mma_tile", FULL, "pass", ANY),
    "the MMA warp's phase stays": ("mma_tile", "(step // full.shape[0]) & 1", "0", ANY),
    "a stage is not released": ("mma_tile", COMMITTED, "mbarriers=[]", "deadlock"),
    "a stage is released with its product in flight": (
        "mma_tile", COMMITTED, "mbarriers=[]); mbarrier.arrive(empty.index(stage)", ANY,
    ),
    "an accumulator is overwritten while it is read": ("mma_tile", ACC_EMPTY, "pass", READY),
    "an accumulator's phase stays": ("mma_tile", "(tile // ACCUMULATORS)", "0", READY),
    "an accumulator is given away in flight": ("mma_tile", "tcgen05_commit(", "mbarrier.arrive(", READY),
    "one accumulator for all tiles": ("mma_tile", "buffer = tile % ACCUMULATORS", "buffer = 0", READY),
    "an accumulator is read before it is full": ("wait_accumulator", ACC_FULL, "pass", READY),
    "the epilogue's phase stays": ("wait_accumulator", "(tile // ACCUMULATORS) & 1", "0", READY),
    "the other accumulator is read": ("wait_accumulator", "acc.index(tile % ACC", "acc.index((tile + 1) % ACC", READY),
    "an accumulator is not released": (
        "release_accumulator", "mbarrier.arrive(acc_empty.index(tile % ACCUMULATORS), count=1)", "pass", "deadlock",
    ),
    "an accumulator is released twice": ("release_accumulator", "count=1)", "count=2)", PROTOCOL),
}  # fmt: skip
# What a CTA and its warps may do, each with one error alone.
OF_LIMITS: dict[str, Fault] = {
    "too much tensor memory": (
        "new_accumulators", "[ACCUMULATORS, BM", "[9 * ACCUMULATORS, BM", "more columns than tensor memory",
    ),
    "too much shared memory": ("blackwell.pipeline.new_ring", "[STAGES, BM", "[9 * STAGES, BM", "more shared memory"),
    "the MMA warp reads an accumulator": (
        "mma_tile", "    tcgen05_commit(", "    tmem_load(acc.index(buffer)); tcgen05_commit(", "a quarter of",
    ),
    "an accumulator is given away": ("mma_tile", "tcgen05_commit(", "mbarrier.arrive(", "writes it is in flight"),
}  # fmt: skip
OF_ROWS: dict[str, Fault] = {
    "fewer bytes than come": ("row_producer", "else BM * BK * 2", "else BM * BK", "more bytes"),
    "more bytes than come": ("row_producer", "else BM * BK * 2", "else 2 * BM * BK * 2", "deadlock"),
    "another tile's step": ("row_mma", "BK), tile, BN", "BK) - 1, tile, BN", ANY),
    "the MMA warp stays with an accumulator": ("row_mma", "tile += 1", "pass", READY),
}  # fmt: skip
STAGED: dict[str, Fault] = {
    "a staging buffer is overwritten": ("store_staged", "tma.store_wait(1)", "pass", NUMBERS),
    "one store too many in flight": ("store_staged", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "a store without a fence": ("fence_and_store", "fence_async_shared()", "pass", FENCE),
    "one staging buffer": ("store_staged", "count % 2", "0", NUMBERS),
}
OF_ACT: dict[str, Fault] = {
    "barriers without a fence": ("blackwell.gemm_gather_act.up_proj_act_kernel", "fence_async_shared()", "pass", FENCE),
    "up_proj releases an accumulator before it reads it, too": ("act_epilogue", SLICES, f"{RELEASE}{SLICES}", EARLY),
    "up_proj ends before its stores": ("act_epilogue", STORED, "pass", UNFINISHED),
    "up_proj stays with an accumulator": ("act_epilogue", "tile += 1", "pass", READY),
}
OF_PAIRS: dict[str, Fault] = {
    "a staging buffer is overwritten": ("store_pairs", "tma.store_wait(1)", "pass", NUMBERS),
    "one store too many in flight": ("store_pairs", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "one staging buffer": ("store_pairs", "count % 2", "0", NUMBERS),
    "a slice of pairs without a fence": ("fence_and_store", "fence_async_shared()", "pass", FENCE),
}
RELAYED = "mbarrier.arrive(full.index((step + 1) % full.shape[0]), count=1, pred=step >= LAG)"
OF_COPIES: dict[str, Fault] = {
    "no stage of copies is committed": ("relay", RELAYED, "pass", "deadlock"),
    "copies are committed before they land": ("relay", "wait_group(LAG)", "wait_group(LAG + 1)", f"{ANY}|outside"),
    "copies without a fence": ("relay", "fence_async_shared()", "pass", FENCE),
    "a stage is committed too early": ("relay", "(step + 1)", "(step + 2)", ANY),
    "copies are not committed": ("relay", "async_copy.commit_group()", "pass", f"{ANY}|{UNFINISHED}"),
    "the first steps arrive": ("relay", "step >= LAG", "step >= LAG - 1", ANY),
    "the last copies": ("relay_rest", "async_copy.wait_group(0)", "pass", f"{UNFINISHED}|{ANY}"),
    "the last copies without a fence": ("relay_rest", "fence_async_shared()", "pass", FENCE),
    "a stage counts one arrival": (
        "blackwell.pipeline.new_ring", '2 if ACCESS == "copy" else 1', "1", f"{ANY}|more arrivals",
    ),
}  # fmt: skip
NO_REST = f"deadlock|{UNFINISHED}"
OF_ROW_COPIES: dict[str, Fault] = {
    "copies are not relayed": ("row_producer", "                relay(ring, step)", "                pass", NO_REST),
    "the last copies are not relayed": ("row_producer", "relay_rest(ring, step)", "pass", NO_REST),
}
WGRAD_PRODUCER = "blackwell.gemm_wgrad.wgrad_producer"
OF_WGRAD_COPIES: dict[str, Fault] = {
    "copies are not relayed": (WGRAD_PRODUCER, "                relay(ring, step)", "                pass", NO_REST),
    "the last copies are not relayed": (WGRAD_PRODUCER, "relay_rest(ring, step)", "pass", NO_REST),
}
BYTES = "by_row.block_type.nbytes + A_BYTES"
OF_WGRAD: dict[str, Fault] = {
    "barriers without a fence": ("blackwell.gemm_wgrad.gemm_wgrad_kernel", "fence_async_shared()", "pass", FENCE),
    "fewer bytes than come": (WGRAD_PRODUCER, BYTES, f"{BYTES} - BK * 2", "more bytes"),
    "more bytes than come": (WGRAD_PRODUCER, BYTES, f"{BYTES} + BK * 2", "deadlock"),
    "rows of the expert behind": (
        WGRAD_PRODUCER, "[RAGGED_EXTENT, end, RAGGED_EXTENT - end + k, col]",
        "[RAGGED_EXTENT, end + 8, RAGGED_EXTENT - end - 8 + k, col]", f"{NUMBERS}|TMA outside",
    ),
    "fewer steps than come": ("wgrad_mma", "gl.cdiv(end - start, BK)", "(end - start) // BK", ANY),
    "the MMA warp stays with an accumulator": ("wgrad_mma", "tile += 1", "pass", READY),
    "an accumulator is released early": ("wgrad_epilogue", "if i == BN // COLUMNS - 1:", "if i == 0:", READY),
    "the epilogue stays with an accumulator": ("wgrad_epilogue", "tile += 1", "pass", READY),
    "it ends before its stores": ("wgrad_epilogue", STORED, "pass", UNFINISHED),
    "a staging buffer is overwritten": ("blackwell.gemm_wgrad.store_gradient", "tma.store_wait(1)", "pass", NUMBERS),
    "one store too many in flight": (
        "blackwell.gemm_wgrad.store_gradient", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS,
    ),
    "a store without a fence": ("blackwell.gemm_wgrad.store_gradient", "fence_async_shared()", "pass", FENCE),
    "one staging buffer": ("wgrad_epilogue", "staging.index(i % 2)", "staging.index(0)", NUMBERS),
}  # fmt: skip
OF_DOWN: dict[str, Fault] = {
    "barriers without a fence": ("blackwell.gemm_rows.gemm_rows_kernel", "fence_async_shared()", "pass", FENCE),
    "it releases an accumulator before it reads it, too": ("rows_epilogue", COLUMNS, f"{RELEASE}{COLUMNS}", EARLY),
    "it ends before its stores": ("rows_epilogue", STORED, "pass", UNFINISHED),
    "it stays with an accumulator": ("rows_epilogue", "tile += 1", "pass", READY),
}
DACT_SLICE, DACT_EPILOGUE = (f"blackwell.gemm_dgrad_dact.dact_{part}" for part in ("slice", "epilogue"))
H_FULL = "mbarrier.wait(h_full.index(stage), (step // H_STAGES) & 1)"
H_EMPTY = "mbarrier.wait(h_empty.index(stage), ((step // H_STAGES) & 1) ^ 1)"
H_RELEASE = "mbarrier.arrive(h_empty.index((step + H_STAGES - 1) % H_STAGES), count=1, pred=step > 0)"
OF_DACT: dict[str, Fault] = {
    "barriers without a fence": (
        "blackwell.gemm_dgrad_dact.gemm_dgrad_dact_kernel", "fence_async_shared()", "pass", FENCE,
    ),
    "h is overwritten while dh is stored": ("h_loader", H_EMPTY, "pass", ANY),
    "the loader's first phase": ("h_loader", "H_STAGES) & 1) ^ 1)", "H_STAGES) & 1))", "deadlock"),
    "the loader's phase stays": ("h_loader", "(step // H_STAGES)", "0", ANY),
    "fewer bytes of h than come": ("h_loader", "BLOCKS * h.block_type.nbytes", "BLOCKS * 64", "more bytes"),
    "h's loader stays in a stage": ("h_loader", "step += 1", "pass", ANY),
    "h is read before it is there": (DACT_SLICE, H_FULL, "pass", ANY),
    "the epilogue's phase of h stays": (DACT_SLICE, "(step // H_STAGES) & 1", "0", ANY),
    "h's stage is not released": (DACT_SLICE, H_RELEASE, "pass", "deadlock"),
    "h's stage is released too early": (
        DACT_SLICE, "(step + H_STAGES - 1) % H_STAGES", "stage", ANY,
    ),
    "h's first stage is released before": (
        DACT_SLICE, "pred=step > 0", "pred=True", EARLY,
    ),
    "a buffer is overwritten while it is stored": (DACT_SLICE, STORED, "pass", NUMBERS),
    "dh without a fence": (DACT_SLICE, "fence_async_shared()", "pass", FENCE),
    "it releases an accumulator before it reads it, too": (
        DACT_EPILOGUE, COLUMNS, f"{RELEASE}{COLUMNS}", EARLY,
    ),
    "it ends before its stores": (DACT_EPILOGUE, STORED, "pass", UNFINISHED),
    "it stays with an accumulator": (DACT_EPILOGUE, "tile += 1", "pass", READY),
    "h's steps begin again": (DACT_EPILOGUE, "step += BN // EPILOGUE_N", "pass", ANY),
}  # fmt: skip
# Of each group the case, the kernel of its layer that the faults are in, and whether its rows come by cp.async.
GROUPS: dict[str, tuple[Case, str, bool, dict[str, Fault]]] = {
    "limits": (SWIGLU, "up_proj_act_kernel", False, OF_LIMITS),
    "limits of copies": (
        SWIGLU, "up_proj_act_kernel", True, {"no fence": ("relay", "fence_async_shared()", "pass", FENCE)},
    ),
    "up_proj": (SWIGLU, "up_proj_act_kernel", False, {**OF_ALL, **OF_ROWS, **STAGED, **OF_ACT}),
    "down_proj": (BIAS, "gemm_rows_kernel", False, {**OF_ALL, **OF_ROWS, **STAGED, **OF_DOWN}),
    "down_proj_dgrad": (SWIGLU, "gemm_dgrad_dact_kernel", False, {**OF_ALL, **OF_ROWS, **OF_DACT}),
    "down_proj_dgrad, interleaved": (INTERLEAVED, "gemm_dgrad_dact_kernel", False, OF_DACT),
    "down_proj_dgrad, ungated": (UNGATED, "gemm_dgrad_dact_kernel", False, OF_DACT),
    "up_proj, interleaved": (INTERLEAVED, "up_proj_act_kernel", False, OF_PAIRS),
    "up_proj by copies": (SWIGLU, "up_proj_act_kernel", True, {**OF_COPIES, **OF_ROW_COPIES}),
    "wgrad": (SWIGLU, "gemm_wgrad_kernel", False, {**OF_ALL, **OF_WGRAD}),
    "wgrad by copies": (SWIGLU, "gemm_wgrad_kernel", True, {**OF_COPIES, **OF_WGRAD_COPIES}),
}  # fmt: skip

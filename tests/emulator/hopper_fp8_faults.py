"""Faults to be planted in what the FP8 Hopper kernels add, each with the errors by which the emulator shows it.

Each is a case and (function, a text that is once in its source, what is put in its place, the errors). Functions that
`hopper` has, too, are named with their module.
"""

from dataclasses import replace

import torch
from hopper_faults import (
    ANOTHER,
    EITHER,
    FENCE,
    NUMBERS,
    OTHERS,
    PROTOCOL,
    PUBLISHED,
    RELEASE_PENDING,
    SOONER,
    TAKE,
    UNFINISHED,
    WAIT_FULL,
    Fault,
)
from triton_checks import Case

SWIGLU = Case(torch.float16, hidden_size=384, intermediate_size=256)
INTERLEAVED = replace(SWIGLU, gate_up="interleaved")
UNGATED = replace(SWIGLU, activation="relu2")
BIAS = replace(SWIGLU, bias=True)
# No contraction of down_proj and up_proj_dgrad for a stationary weight, and two tiles of columns, one of them of a
# half.
LONG = replace(UNGATED, intermediate_size=384)
LONG_BIAS = replace(BIAS, intermediate_size=640)
# One step of up_proj for each of five tiles of columns: the consumers' tiles differ.
SHORT = replace(SWIGLU, hidden_size=128, intermediate_size=640)
# Three tiles of down_proj_dgrad, of two steps and four slices each.
WIDE = replace(SWIGLU, hidden_size=256, intermediate_size=640)

RELEASE = "mbarrier.arrive(empty.index(stage), count=1)"
WAIT = "product = warpgroup_mma_wait(0, deps=(product,))"
COPY = "cp_async(scale_smem.index(stage), first_scale + k // BK)"
TOKENS = "scale_token = load_tokens(token_of_row, next_row, next_end, gl.arange(0, BM, THREAD_LAYOUT))"
MAINLOOP, UP_PROJ, DOWN_PROJ = "scaled_mainloop", "hopper_fp8.gemm.act_consumer", "rows_consumer"
MMA, ISSUE = "hopper_fp8.mainloop.mma_mainloop", "hopper_fp8.mainloop.issue_mma"
UP_PROJ_DGRAD, ROWS_KERNEL = DOWN_PROJ, "hopper_fp8.gemm.gemm_rows_kernel"
DACT, STORE_ACT = "hopper_fp8.gemm.dact_consumer", "hopper_fp8.gemm.store_act"
LAST_WAIT = "ring, tile_info, step)\n    tma.store_wait(0)"
OF_ROWS = "row_scale.index(stage).slice(CONSUMER * WARPGROUP_M"
WAIT_IN_LOOP = "(1, deps=(acc,))\n        consumer_release_previous(ring, step)"
LAST_RELEASE = "(0, deps=(acc,))\n    consumer_release_previous(ring, step)"
BUFFER, ANOTHER_EXPERT = "scale_smem.index(CONSUMER)", ("weight_scale, expert", "weight_scale, 0 * expert")
FAULTS: dict[str, tuple[Case, Fault]] = {
    # Of down_proj, with block scales.
    "nobody copies the rows' scales": (LONG, ("load_gathered", COPY, "pass", NUMBERS)),
    "the rows' scales in another stage": (LONG, ("load_gathered", COPY, COPY.replace("stage", "0"), NUMBERS)),
    "the rows' scales of the first step": (LONG, ("load_gathered", COPY, COPY.replace(" + k // BK", ""), NUMBERS)),
    "the rows' scales of the step before": (
        LONG, ("load_gathered", COPY, COPY.replace("k // BK", "gl.maximum(k // BK - 1, 0)"), NUMBERS),
    ),
    "the rows' scales of the tile before": (LONG, ("gather_producer", TOKENS, "pass", NUMBERS)),
    "the first row's scale": (
        LONG, ("gather_producer", TOKENS, TOKENS.replace("gl.arange", "0 * gl.arange"), NUMBERS),
    ),
    "another stage's scales": (LONG, (MAINLOOP, OF_ROWS, OF_ROWS.replace("stage", "(stage + 3) % 4"), NUMBERS)),
    "the first consumer's scales": (LONG, (MAINLOOP, OF_ROWS, OF_ROWS.replace("CONSUMER", "0"), NUMBERS)),
    "the left half's weight scale": (LONG, (MAINLOOP, "scale * right_weight", "scale * left_weight", NUMBERS)),
    "the right half's weight scale": (LONG, (MAINLOOP, "scale * left_weight", "scale * right_weight", NUMBERS)),
    "the weight scale of the first step": (LONG, (MAINLOOP, "left_pointer + k * stride_in", "left_pointer", NUMBERS)),
    "the weight scale of the next step": (
        LONG,
        (MAINLOOP, "right_pointer + k * stride_in", "right_pointer + (k + 1) % steps * stride_in", NUMBERS),
    ),
    "another expert's weight scale": (SWIGLU, ("scale_pointers", "scale + expert", "scale + 0 * expert", NUMBERS)),
    "the weight scale of the first columns": (
        SWIGLU, ("scale_pointers", "left_column // BLOCK", "0", NUMBERS),
    ),
    "weight scales past the last column": (
        SWIGLU, ("scale_pointers", "gl.minimum(right_column // BLOCK, width // BLOCK - 1)", "right_column // BLOCK",
                 "outside the tensor"),
    ),
    "down_proj copies no rows' scales": (
        LONG, (ROWS_KERNEL, "row_scale = (rows_scale, scale_smem)", "row_scale = None", NUMBERS),
    ),
    "down_proj reads a stage before it is full": (LONG, (MAINLOOP, WAIT_FULL, TAKE, SOONER)),
    "down_proj releases a stage before its second product": (
        LONG, (MAINLOOP, f"{WAIT}\n        {RELEASE}", f"{RELEASE}\n        {WAIT}", NUMBERS),
    ),
    "down_proj releases no stage": (LONG, (MAINLOOP, RELEASE, "pass", "deadlock")),
    "down_proj releases a stage twice": (LONG, (MAINLOOP, RELEASE, f"{RELEASE}; {RELEASE}", PROTOCOL)),
    "down_proj does not count a step": (LONG, (MAINLOOP, "        step += 1", "        pass", f"{PROTOCOL}|{ANOTHER}")),
    "the left half twice": (LONG, (MAINLOOP, "b.slice(BLOCK, BLOCK)", "b.slice(0, BLOCK)", NUMBERS)),
    "the first consumer's rows for down_proj": (
        LONG, (MAINLOOP, "a_smem.shape[1]).slice(CONSUMER", "a_smem.shape[1]).slice(0", NUMBERS),
    ),
    # With scales by row and by column: up_proj, down_proj_dgrad and up_proj_dgrad.
    "a stage is read before it is full": (SWIGLU, (ISSUE, WAIT_FULL, TAKE, f"{SOONER}|{NUMBERS}")),
    "a stage is released with its product in flight": (
        SWIGLU, (MMA, WAIT_IN_LOOP, WAIT_IN_LOOP.replace("(1,", "(2,"), NUMBERS),
    ),
    "a stage is not released": (SWIGLU, (MMA, WAIT_IN_LOOP, WAIT_IN_LOOP.partition("\n")[0], "deadlock")),
    "the last stage is not released": (SWIGLU, (MMA, LAST_RELEASE, LAST_RELEASE.partition("\n")[0], "deadlock")),
    "a stage is released though no release is pending": (
        SWIGLU, (MMA, RELEASE_PENDING, RELEASE_PENDING.replace("pending_release", "True"), PROTOCOL),
    ),
    "a pending release is forgotten": (
        SWIGLU, (MMA, RELEASE_PENDING, RELEASE_PENDING.replace("pending_release", "False"), "deadlock"),
    ),
    "a stage is released while a tile is stored from it": (SWIGLU, (MMA, "tma.store_wait(0)", "pass", NUMBERS)),
    "a step is not counted": (SWIGLU, (MMA, "        step += 1", "        pass", f"{SOONER}|{ANOTHER}")),
    "the last step is not counted": (SWIGLU, (MMA, "    step += 1\n    acc", "    acc", f"{SOONER}|{ANOTHER}")),
    "the first consumer's rows": (
        SWIGLU, (ISSUE, "a_smem.shape[1]).slice(CONSUMER", "a_smem.shape[1]).slice(0", NUMBERS),
    ),
    "one row's scale for all": (SWIGLU, ("row_scale_pointers", "end, rows)", "end, 0 * rows)", NUMBERS)),
    "the scales of the first rows": (
        SWIGLU, ("row_scale_pointers", "load_tokens(token_of_row, row", "load_tokens(token_of_row, 0", NUMBERS),
    ),
    "the first consumer's row scales for up_proj": (
        SWIGLU, (UP_PROJ, "token_of_row, row, end", "token_of_row, row - CONSUMER * WARPGROUP_M, end", NUMBERS),
    ),
    "the first consumer's row scales for down_proj_dgrad": (
        SWIGLU, (DACT, "token_of_row, first, end", "token_of_row, row, end", NUMBERS),
    ),
    "the first consumer's row scales for up_proj_dgrad": (
        LONG, (UP_PROJ_DGRAD, "None, row, end", "None, row - CONSUMER * WARPGROUP_M, end", NUMBERS),
    ),
    "up_proj gathers no row scales": (SWIGLU, (UP_PROJ, "x_scale, token_of_row", "x_scale, None", NUMBERS)),
    "down_proj_dgrad gathers no row scales": (SWIGLU, (DACT, "do_scale, token_of_row", "do_scale, None", NUMBERS)),
    "another expert's column scales for up_proj": (SWIGLU, (UP_PROJ, *ANOTHER_EXPERT, NUMBERS)),
    "another expert's column scales for down_proj_dgrad": (SWIGLU, (DACT, *ANOTHER_EXPERT, NUMBERS)),
    "another expert's column scales for up_proj_dgrad": (
        LONG, (UP_PROJ_DGRAD, "load_columns(weight_scale, expert", "load_columns(weight_scale, 0 * expert", NUMBERS),
    ),
    "the first columns' scales for up_proj": (SWIGLU, (UP_PROJ, "stride_se, col,", "stride_se, 0,", NUMBERS)),
    "the first columns' scales for down_proj_dgrad": (LONG, (DACT, "col + gl.arange", "gl.arange", NUMBERS)),
    "the first columns' scales for up_proj_dgrad": (LONG, (UP_PROJ_DGRAD, "col + gl.arange", "gl.arange", NUMBERS)),
    "gate's column scales for up": (SWIGLU, ("load_tile_columns", " + column // RUN % 2 * n", "", NUMBERS)),
    "the next columns' scales for up": (SWIGLU, (UP_PROJ, "BN, True, GATE_UP", 'BN, True, "none"', NUMBERS)),
    "column scales past the last of down_proj_dgrad": (
        LONG, (DACT, "PAIR_LAYOUT), n)", "PAIR_LAYOUT), 2 * n)", "past the tensor"),
    ),
    "column scales past the last of up_proj_dgrad": (
        LONG, (UP_PROJ_DGRAD, "columns, width_out)", "columns, 2 * width_out)", "past the tensor"),
    ),
    "nobody passes on the columns' scales": (SWIGLU, ("scale_slices", "buffer.store(column_scale)", "pass", NUMBERS)),
    "both consumers pass columns' scales on in one place": (SHORT, (UP_PROJ, BUFFER, "scale_smem.index(0)", NUMBERS)),
    **{
        f"the {slice} slice without its rows' scales": (
            SWIGLU, ("scale_slices", f"{slice} * (rows * ", f"{slice} * (", NUMBERS),
        )
        for slice in ("first", "second", "third", "fourth")
    },
    "the first slice's column scales for the second": (
        SWIGLU, ("scale_slices", "buffer.slice(EPILOGUE_N,", "buffer.slice(0,", NUMBERS),
    ),
    "the first slice's column scales for the third": (
        SWIGLU, ("scale_slices", "buffer.slice(2 * EPILOGUE_N,", "buffer.slice(0,", NUMBERS),
    ),
    "the third slice's column scales for the fourth": (
        SWIGLU, ("scale_slices", "buffer.slice(3 * EPILOGUE_N,", "buffer.slice(2 * EPILOGUE_N,", NUMBERS),
    ),
    "up_proj_dgrad copies row scales with each stage": (
        LONG,
        (ROWS_KERNEL, "row_scale: gl.constexpr = None", "row_scale = (rows_scale, scale_smem)", "past the tensor"),
    ),
    # Of all.
    "rows are loaded past the expert's end": (
        LONG_BIAS, ("load_tokens", "gl.minimum(row + rows, end - 1)", "row + rows", "past the tensor"),
    ),
    "a slice is overwritten": (SWIGLU, ("store_slices", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS)),
    "up's columns where gate's are": (SWIGLU, ("store_slices", "last, i // 2, col", "last, i % 2, col", ANOTHER)),
    "h is overwritten by a": (SWIGLU, ("store_quantized", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS)),
    "a is overwritten by the next h": (SWIGLU, (UP_PROJ, "tma.store_wait(0)  # of", "# of", NUMBERS)),
    "a's right block in the left one's buffer": (
        UNGATED, (STORE_ACT, "staging.index(2 * CONSUMER + 1)", "staged", NUMBERS),
    ),
    "a store without a fence": (SWIGLU, ("fence_and_store", "fence_async_shared()", "pass", FENCE)),
    "up_proj ends before its stores": (SWIGLU, (UP_PROJ, LAST_WAIT, LAST_WAIT.partition("\n")[0], UNFINISHED)),
    "down_proj ends before its stores": (LONG_BIAS, (DOWN_PROJ, LAST_WAIT, LAST_WAIT.partition("\n")[0], UNFINISHED)),
    "down_proj_dgrad ends before its stores": (SWIGLU, (DACT, "tma.store_wait(0)", "pass", UNFINISHED)),
    "down_proj_dgrad has no pending release": (SWIGLU, (DACT, "pending_release = True", "pass", "deadlock")),
    "down_proj_dgrad releases what is not pending": (
        WIDE, (DACT, "            pending_release = False", "            pass", EITHER),
    ),
    "down_proj_dgrad skips no slices": (SWIGLU, (DACT, "steps + BN // EPILOGUE_N", "steps", f"{SOONER}|{ANOTHER}")),
    "the largest of half a block": (SWIGLU, ("largest_of", "range(1, len(parts))", "range(0)", NUMBERS)),
    "the largest, not of magnitudes": (SWIGLU, ("largest_of", "gl.max(gl.abs(parts[0])", "gl.max((parts[0])", NUMBERS)),
    "a is multiplied by its scale": (SWIGLU, ("store_quantized", "1.0 / of_row", "of_row", NUMBERS)),
    "a's halves in one place": (SWIGLU, ("store_quantized", "i * WIDTH, WIDTH", "0, WIDTH", NUMBERS)),
    "a where h is": (SWIGLU, ("store_quantized", "col // 2]", "col]", f"{NUMBERS}|{ANOTHER}")),
    "a's scales in the first block's place": (SWIGLU, ("store_quantized", "+ col // BLOCK,", ",", NUMBERS)),
    "scales past the expert's end": (
        SWIGLU, ("store_quantized", "rows < end", "rows == rows", "past the tensor"),
    ),
    "scales past the last column": (
        replace(UNGATED, intermediate_size=384),
        ("store_quantized", " & (col < width)", "", f"{NUMBERS}|past the tensor|{OTHERS}"),
    ),
    "gate and up exchanged": (SWIGLU, (STORE_ACT, "gated_value(second, fourth", "gated_value(fourth, second", NUMBERS)),
    "pairs out of order": (INTERLEAVED, (STORE_ACT, "pairs_value(third", "pairs_value(second", NUMBERS)),
    "a of pairs where h is": (INTERLEAVED, (STORE_ACT, "col // 2, n", "col, n", f"{NUMBERS}|{ANOTHER}")),
    "up_proj stores the slope": (UNGATED, ("hopper_fp8.gemm.value", "act, _slope", "_slope, act", NUMBERS)),
    "a's left block twice": (UNGATED, (STORE_ACT, "col + BLOCK, n", "col, n", f"{NUMBERS}|{ANOTHER}")),
    "nobody adds the bias": (BIAS, (UP_PROJ, "slices = add_bias", "_ = add_bias", NUMBERS)),
    "down_proj adds no bias": (LONG_BIAS, (DOWN_PROJ, "slices = add_bias", "_ = add_bias", NUMBERS)),
    "another expert's bias": (BIAS, ("hopper_fp8.mainloop.add_bias", "bias + expert", "bias + 0 * expert", NUMBERS)),
    "the next columns' bias for up": (BIAS, (UP_PROJ, 'n if GATE_UP == "concatenated" else BLOCK', "BLOCK", NUMBERS)),
    "the gate's bias for up": (BIAS, (UP_PROJ, "stride_bias, col, col + apart", "stride_bias, col, col", NUMBERS)),
    "one slice's bias twice": (
        BIAS, ("add_bias_to_slices", "stride, left_column + EPILOGUE_N", "stride, left_column", NUMBERS),
    ),
    "the bias past the last column": (
        BIAS, ("hopper_fp8.mainloop.add_bias", ", mask=columns < width, other=0.0", "", "past the tensor"),
    ),
}  # fmt: skip

# Of a weight that stays in shared memory: as many steps as stages hold of two blocks; two; one.
STATIONARY = OF_FOUR = replace(UNGATED, bias=True, hidden_size=384, intermediate_size=512)
OF_TWO, OF_ONE = replace(STATIONARY, intermediate_size=256), replace(STATIONARY, intermediate_size=128)
PRODUCER, OF_ITEM, KEPT = "scaled_producer", "scaled_mainloop_stationary", "scaled_consumer"
NEXT = "expert, row, end, col, count = next_expert, next_row, next_end, next_col, next_count"
PUBLISH = "publish_tile(tile_info, stage, 8 * expert"
ROW_SCALE = "row_scale.index(producer_acquire(ring, step))"
SECOND = "product = warpgroup_mma(a, b.slice(BLOCK, BLOCK).permute([1, 0]), product, use_acc=False, is_async=True)"
B_FULL = "mbarrier.wait(b_full.index(k_block), phase)"
BY_ROWS = "hopper_fp8.gemm_stationary.mma_mainloop_stationary"
STATIONARY_KERNEL = "hopper_fp8.gemm_stationary.gemm_stationary_kernel"
OF_STEP = "hopper_fp8.gemm_stationary.issue_mma_stationary"
LOOKED_UP = "left_pointer + k_block * stride_in", "right_pointer + k_block * stride_in"
OF_STATIONARY: dict[str, tuple[Case, Fault]] = {
    "scales past the expert's end": (
        STATIONARY, ("load_row_scales", "gl.minimum(row + gl.arange(0, WARPGROUP_M, WARP_LAYOUT), end - 1)",
                     "row + gl.arange(0, WARPGROUP_M, WARP_LAYOUT)", "past the tensor"),
    ),
    "a second step's scale of one step": (OF_ONE, ("load_row_scales", "gl.minimum(1, last)", "1", "past the tensor")),
    "a third step's scale of one step": (OF_ONE, ("load_row_scales", "gl.minimum(2, last)", "2", "past the tensor")),
    "the last step's scale is the first's": (OF_FOUR, ("load_row_scales", "pointers + last)", "pointers)", NUMBERS)),
    "steps' scales exchanged": (
        STATIONARY, ("load_row_scales", "return first, second", "return second, first", NUMBERS),
    ),
    "rows' scales lie closer": (
        STATIONARY, ("load_row_scales", "rows.to(gl.int64) * steps", "rows.to(gl.int64)", NUMBERS),
    ),
    "tile_info before the stage is free": (
        OF_FOUR, (PRODUCER, f"stage = producer_acquire(ring, step)\n            {PUBLISH}",
                  f"stage = {TAKE}\n            {PUBLISH}", PUBLISHED),
    ),
    "another expert is published": (STATIONARY, (PRODUCER, "8 * expert", "8 * next_expert", NUMBERS)),
    "B is released by each block": (STATIONARY, (PRODUCER, "2 * arrivals_of(block, count)", "2", EITHER)),
    "B's phase is not published": (STATIONARY, (PRODUCER, "(item & 1), row", "0, row", EITHER)),
    "a stage's scales are overwritten": (
        OF_FOUR, (PRODUCER, ROW_SCALE, f"row_scale.index({TAKE})", NUMBERS),
    ),
    "the first stage's scales": (
        STATIONARY, (PRODUCER, ROW_SCALE, "row_scale.index(0 * producer_acquire(ring, step))", NUMBERS),
    ),
    "one step's scales for all": (STATIONARY, (PRODUCER, "scales[k_block]", "scales[0]", NUMBERS)),
    "B is loaded with each block": (STATIONARY, (PRODUCER, "if block == 0", "if block >= 0", EITHER)),
    "B is not loaded": (STATIONARY, (PRODUCER, "if block == 0", "if block < 0", EITHER)),
    "a step too many": (OF_TWO, (PRODUCER, "if k_block < steps", "if k_block <= steps", PUBLISHED)),
    "one step's A for all": (STATIONARY, (PRODUCER, "row, k_block * BK", "row, 0 * k_block", NUMBERS)),
    "the producer's steps are not counted": (
        STATIONARY, (PRODUCER, "                    step += 1", "                    pass", PUBLISHED),
    ),
    "the first block's rows, always": (STATIONARY, (PRODUCER, "row += WARPGROUP_M", "pass", PUBLISHED)),
    "items are not counted": (STATIONARY, (PRODUCER, "item += 1", "pass", EITHER)),
    "the first item's blocks, always": (
        STATIONARY, (PRODUCER, NEXT, "expert, row, end, col = next_expert, next_row, next_end, next_col", PUBLISHED),
    ),
    "an item twice": (STATIONARY, (PRODUCER, "index + gl.num_programs(0)", "index", PUBLISHED)),
    "the end is published to one consumer": (
        STATIONARY, (PRODUCER, "gl.static_range(CONSUMERS)", "gl.static_range(1)", "deadlock"),
    ),
    "the end is not published": (
        STATIONARY, (PRODUCER, "publish_tile(tile_info, stage, -1, 0, 0, 0)", "pass", PUBLISHED),
    ),
    "the end does not arrive": (
        STATIONARY, (PRODUCER, "mbarrier.arrive(ring[2].index(stage), count=1)", "pass", "deadlock"),
    ),
    "both ends in one stage": (STATIONARY, (PRODUCER, "        step += steps", "        pass", PUBLISHED)),
    "A is read before it is there": (STATIONARY, (OF_ITEM, WAIT_FULL, TAKE, f"{SOONER}|{NUMBERS}")),
    "B is read before it is there": (STATIONARY, (OF_ITEM, B_FULL, "pass", EITHER)),
    "the left half's scale of the first step": (STATIONARY, (OF_ITEM, LOOKED_UP[0], "left_pointer", NUMBERS)),
    "the right half's scale of the first step": (STATIONARY, (OF_ITEM, LOOKED_UP[1], "right_pointer", NUMBERS)),
    "the right half's scale for the left": (
        STATIONARY, (OF_ITEM, "scale * left_weight", "scale * right_weight", NUMBERS),
    ),
    "the left half's scale for the right": (
        STATIONARY, (OF_ITEM, "scale * right_weight", "scale * left_weight", NUMBERS),
    ),
    "the left half twice": (STATIONARY, (OF_ITEM, "b.slice(BLOCK, BLOCK)", "b.slice(0, BLOCK)", NUMBERS)),
    "another stage's scales": (
        STATIONARY, (OF_ITEM, "row_scale.index(stage)", "row_scale.index((stage + 7) % 8)", NUMBERS),
    ),
    "a stage is not released": (STATIONARY, (OF_ITEM, RELEASE, "pass", "deadlock")),
    "a stage is released twice": (STATIONARY, (OF_ITEM, RELEASE, f"{RELEASE}; {RELEASE}", PUBLISHED)),
    "a stage is released before its second product": (
        replace(OF_FOUR, hidden_size=1152), (OF_ITEM, f"{SECOND}\n        {WAIT}\n        {RELEASE}",
                  f"{RELEASE}\n        {SECOND}\n        {WAIT}", NUMBERS),
    ),
    "B is not released": (STATIONARY, (OF_ITEM, "release_b(b_ring, k_block, arrivals)", "pass", "deadlock")),
    "B's first slice is released for all": (
        STATIONARY, (OF_ITEM, "release_b(b_ring, k_block,", "release_b(b_ring, 0,", EITHER),
    ),
    "a step is not counted": (STATIONARY, (OF_ITEM, "        step += 1", "        pass", PUBLISHED)),
    "both consumers begin with the first block": (STATIONARY, (KEPT, "step = CONSUMER * steps", "step = 0", PUBLISHED)),
    "a consumer takes the other's block": (STATIONARY, (KEPT, "step += CONSUMERS * steps", "step += steps", PUBLISHED)),
    "the consumer's expert": (STATIONARY, (KEPT, "block // 8,", "block // 16,", NUMBERS)),
    "the consumer's arrivals": (STATIONARY, (KEPT, "block // 2 % 4", "block // 2 % 2", "deadlock")),
    "the consumer's phase of B": (STATIONARY, (KEPT, "block & 1", "0", EITHER)),
    "the left columns' scale for the right": (
        STATIONARY, (KEPT, "expert, col, col + BLOCK, width_out, stride_se",
         "expert, col, col, width_out, stride_se", NUMBERS),
    ),
    "the left columns' bias for the right": (
        STATIONARY, (KEPT, "stride_bias, col, col + BLOCK", "stride_bias, col, col", NUMBERS),
    ),
    "nobody adds the bias": (STATIONARY, (KEPT, "slices = add_bias", "_ = add_bias", NUMBERS)),
    "down_proj's producer stores no row scales": (
        STATIONARY, (STATIONARY_KERNEL, "row_scale = scale_smem", "row_scale = None", NUMBERS),
    ),
    "up_proj_dgrad's producer stores row scales": (
        STATIONARY,
        (STATIONARY_KERNEL, "row_scale: gl.constexpr = None", "row_scale = scale_smem", "what the buffer holds"),
    ),
    "up_proj_dgrad reads A before it is there": (STATIONARY, (OF_STEP, WAIT_FULL, TAKE, f"{SOONER}|{NUMBERS}")),
    "up_proj_dgrad reads B before it is there": (STATIONARY, (OF_STEP, B_FULL, "pass", EITHER)),
    "up_proj_dgrad reads B's first slice, always": (
        STATIONARY, (OF_STEP, "b_smem.index(k_block)", "b_smem.index(0)", NUMBERS),
    ),
    "up_proj_dgrad forgets all products but the last": (
        STATIONARY, (BY_ROWS, "phase, acc, True)", "phase, acc, False)", "forgets others in flight"),
    ),
    "up_proj_dgrad does not count a step": (
        STATIONARY, (BY_ROWS, "range(1, steps):\n        step += 1", "range(1, steps):\n        pass", EITHER),
    ),
    "up_proj_dgrad releases a stage before its product": (
        OF_FOUR, (BY_ROWS, f"acc = warpgroup_mma_wait{LAST_RELEASE}",
                  "consumer_release_previous(ring, step)\n    acc = warpgroup_mma_wait(0, deps=(acc,))", NUMBERS),
    ),
    "up_proj_dgrad releases no stage": (
        STATIONARY, (BY_ROWS, WAIT_IN_LOOP, WAIT_IN_LOOP.partition("\n")[0], "deadlock"),
    ),
    "up_proj_dgrad releases a stage twice": (
        STATIONARY, (BY_ROWS, WAIT_IN_LOOP, f"{WAIT_IN_LOOP}; consumer_release_previous(ring, step)", PUBLISHED),
    ),
    "up_proj_dgrad does not release B": (
        STATIONARY, (BY_ROWS, "release_b(b_ring, steps - 1, arrivals)", "pass", "deadlock"),
    ),
    "up_proj_dgrad releases B's first slice for all": (
        STATIONARY, (BY_ROWS, "release_b(b_ring, k_block - 1,", "release_b(b_ring, 0,", EITHER),
    ),
    "up_proj_dgrad's scales of the first rows": (
        STATIONARY, (KEPT, "(rows_scale, None, row", "(rows_scale, None, 0", NUMBERS),
    ),
    "another expert's column scales": (
        STATIONARY, (KEPT, "load_columns(weight_scale, expert", "load_columns(weight_scale, 0 * expert", NUMBERS),
    ),
    "the first columns' scales": (STATIONARY, (KEPT, "col + gl.arange", "gl.arange", NUMBERS)),
    "column scales past the last": (
        STATIONARY, (KEPT, "columns, width_out)", "columns, 2 * width_out)", "past the tensor"),
    ),
    "it ends before its stores": (STATIONARY, (KEPT, "tma.store_wait(0)", "pass", UNFINISHED)),
}  # fmt: skip

# Of a weight gradient: down_proj_wgrad's last slice of columns.
TRANSPOSES, GRADIENT, WGRAD_KERNEL = "transposed_producer", "transposed_consumer", "gemm_transposed_kernel"
ACQUIRE, FIRST_BLOCK = "stage = producer_acquire(ring, step)", "(start // BLOCK + expert)"
STEPS = "gl.cdiv(end - start, BLOCK)"
PARTIAL, MORE_STEPS, NEVER = "partial_pointers", "if steps > 0:\n                ", "if False:\n                "
A_PLACE, B_PLACE = "[first, place + k * BK]", "[col, place + k * BK]"
LOAD_A = f"tma_load(by_token, {A_PLACE}, full.index(stage), a_smem.index(stage))"
LOAD_B = f"tma_load(by_row, {B_PLACE}, full.index(stage), b_smem.index(stage))"
BYTES = "by_token.block_type.nbytes + by_row.block_type.nbytes"
ARRIVE_EMPTY = "mbarrier.arrive(full.index(stage), count=1)"
OF_WGRAD: dict[str, Fault] = {
    "tile_info before the stage is free": (
        TRANSPOSES, f"{ACQUIRE}\n        publish", f"stage = {TAKE}\n        publish", PUBLISHED,
    ),
    "a stage is filled while it is read": (
        TRANSPOSES, f"{ACQUIRE}\n            mbarrier", f"stage = {TAKE}\n            mbarrier", PROTOCOL,
    ),
    "no tile is published": (
        TRANSPOSES, "publish_tile(tile_info, stage, expert, first, col, steps)", "pass", PUBLISHED,
    ),
    "a stage without operands does not arrive": (TRANSPOSES, ARRIVE_EMPTY, "pass", "deadlock"),
    "a stage without operands arrives twice": (TRANSPOSES, ARRIVE_EMPTY, f"{ARRIVE_EMPTY}; {ARRIVE_EMPTY}", PROTOCOL),
    "a stage without operands is not counted": (
        TRANSPOSES, "            step += 1\n        for", "            pass\n        for", PROTOCOL,
    ),
    "other stages are not counted": (
        TRANSPOSES, "b_smem.index(stage))\n            step += 1", "b_smem.index(stage))", PROTOCOL,
    ),
    "the producer leaves out half a tile": (TRANSPOSES, "gl.cdiv(q, BN)", "(q // BN)", "deadlock"),
    "an expert's first block without the expert": (TRANSPOSES, FIRST_BLOCK, "(start // BLOCK)", NUMBERS),
    "an expert's first block without its rows": (TRANSPOSES, FIRST_BLOCK, "expert", NUMBERS),
    "the block after an expert's first": (TRANSPOSES, "BLOCK + expert)", "BLOCK + expert + 1)", NUMBERS),
    "an expert's first block rounded up": (TRANSPOSES, "start // BLOCK +", "gl.cdiv(start, BLOCK) +", NUMBERS),
    "no last, ragged block": (TRANSPOSES, STEPS, "((end - start) // BLOCK)", NUMBERS),
    "a block for an expert without rows": (TRANSPOSES, STEPS, "((end - start) // BLOCK + 1)", NUMBERS),
    "the first rows of A": (TRANSPOSES, A_PLACE, A_PLACE.replace("first", "0"), NUMBERS),
    "the first rows of B": (TRANSPOSES, B_PLACE, B_PLACE.replace("col", "0"), NUMBERS),
    "one block of A for all": (TRANSPOSES, A_PLACE, "[first, place]", NUMBERS),
    "one block of B for all": (TRANSPOSES, B_PLACE, "[col, place]", NUMBERS),
    "fewer bytes than come": (TRANSPOSES, BYTES, "by_token.block_type.nbytes", "more bytes"),
    "more bytes than come": (TRANSPOSES, BYTES, f"2 * {BYTES}", "deadlock"),
    "A is not loaded": (TRANSPOSES, LOAD_A, "pass", "deadlock"),
    "B is not loaded": (TRANSPOSES, LOAD_B, "pass", "deadlock"),
    "A in the first stage, always": (TRANSPOSES, "a_smem.index(stage)", "a_smem.index(0)", NUMBERS),
    "B in the first stage, always": (TRANSPOSES, "b_smem.index(stage)", "b_smem.index(0)", NUMBERS),
    "the consumers leave out half a tile": (GRADIENT, "gl.cdiv(q, BN)", "(q // BN)", "deadlock"),
    "an expert without rows has the tile before's sum": (GRADIENT, "            acc = zero_tile()\n", "", NUMBERS),
    "an expert without rows is multiplied": (
        GRADIENT, f"{MORE_STEPS}count", f"{MORE_STEPS.replace('>', '>=')}count", NUMBERS,
    ),
    "the stage without operands is not released": (GRADIENT, "step, 1, False", "step, 0, False", PUBLISHED),
    "two stages without operands are released": (
        GRADIENT, "step, 1, False", "step, 2, False", f"{PROTOCOL}|stored twice",
    ),
    "a stage before the one without operands is pending": (GRADIENT, "step, 1, False", "step, 1, True", PROTOCOL),
    "a stage before a chunk's is pending": (GRADIENT, "count, False", "count, True", PROTOCOL),
    "skipping a stage is not counted": (GRADIENT, "step = skip_stages", "_ = skip_stages", PUBLISHED),
    "a chunk's steps are not counted": (GRADIENT, "of_rows, step = ", "of_rows, _ = ", PROTOCOL),
    "the first consumer's rows of A": (GRADIENT, "False, CONSUMER)", "False, 0)", NUMBERS),
    "nobody scales": (GRADIENT, "acc *= of_rows[:, None]", "pass", NUMBERS),
    "the first expert's scale": (GRADIENT, "scale + expert", "scale + 0 * expert", NUMBERS),
    "the next expert's scale": (GRADIENT, "scale + expert", "scale + expert + 1", "past the tensor"),
    "a slice where the first is": (GRADIENT, "first_of_slice + first", "first", NUMBERS),
    "the first consumer's rows of the gradient": (GRADIENT, "CONSUMER * WARPGROUP_M", "0", "stored twice"),
    "a slice's columns for all": (GRADIENT, "col + i * EPILOGUE_N", "col", "stored twice"),
    "the left slice for all": (GRADIENT, "slices[i]", "slices[0]", NUMBERS),
    "the consumers' slices in one place": (GRADIENT, "staging, i, CONSUMER", "staging, i, 0", f"{FENCE}|{NUMBERS}"),
    "it ends before its stores": (GRADIENT, "    tma.store_wait(0)", "", UNFINISHED),
    "a chunk is added to none": (GRADIENT, "chunk > 0", "False", NUMBERS),
    "the first chunk is added to the tile before": (GRADIENT, "chunk > 0", "True", NUMBERS),
    "the third chunk is added to none": (GRADIENT, "chunk > 0", "chunk == 1", NUMBERS),
    "each chunk is the gradient": (GRADIENT, f"{MORE_STEPS}    gl", f"{NEVER}    gl", "stored twice"),
    "no chunk is the gradient": (GRADIENT, f"{MORE_STEPS}    gl", f"{NEVER.replace('False', 'True')}    gl", NUMBERS),
    "all steps are the first chunk": (GRADIENT, "gl.cdiv(steps, chunks - chunk)", "steps", f"{PROTOCOL}|{PUBLISHED}"),
    "the steps left are not counted": (GRADIENT, "steps -= count", "pass", f"{PROTOCOL}|deadlock"),
    "the consumers' chunks in one place": (PARTIAL, "+ CONSUMER", "", OTHERS),
    "the CTAs' chunks in one place": (PARTIAL, "gl.program_id(0) * CONSUMERS", "0", OTHERS),
    "the slices' chunks in one place": (PARTIAL, "i * EPILOGUE_N", "0", NUMBERS),
    "two arrivals fill a stage": (WGRAD_KERNEL, "new_barriers(STAGES, 1)", "new_barriers(STAGES, 2)", "deadlock"),
    "one consumer releases a stage": (
        WGRAD_KERNEL, "new_barriers(STAGES, CONSUMERS)", "new_barriers(STAGES, 1)", PROTOCOL,
    ),
}  # fmt: skip

"""Faults to be planted in what the FP8 Hopper kernels add, each with the errors by which the emulator shows it.

Each is a case and (function, a text that is once in its source, what is put in its place, the errors). What 16-bit
operands run, too, is planted by `hopper_faults`.
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
    SOONER,
    TAKE,
    UNFINISHED,
    WAIT_FULL,
    Fault,
)
from triton_checks import Case

SWIGLU = Case(torch.float16, hidden_size=384, intermediate_size=256)
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
MAINLOOP, UP_PROJ, DOWN_PROJ = "scaled_mainloop", "act_consumer", "rows_consumer"
DACT, STORE_ACT = "dact_consumer", "store_quantized_act"
LAST_WAIT = "ring, tile_info, step)\n    tma.store_wait(0)"
BUFFER = "buffer = column_smem.index(CONSUMER)"
FAULTS: dict[str, tuple[Case, Fault]] = {
    # Of down_proj, with block scales.
    "weight scales past the last column": (
        SWIGLU, ("scale_pointers", "gl.minimum(right_column // BLOCK, width // BLOCK - 1)", "right_column // BLOCK",
                 "outside the tensor"),
    ),
    "down_proj reads a stage before it is full": (LONG, (MAINLOOP, WAIT_FULL, TAKE, SOONER)),
    "down_proj releases a stage before its second product": (
        LONG, (MAINLOOP, f"{WAIT}\n        {RELEASE}", f"{RELEASE}\n        {WAIT}", NUMBERS),
    ),
    "down_proj does not count a step": (LONG, (MAINLOOP, "        step += 1", "        pass", f"{PROTOCOL}|{ANOTHER}")),
    # With scales by row and by column: up_proj, down_proj_dgrad and up_proj_dgrad.
    "column scales past the last of down_proj_dgrad": (
        LONG, (DACT, "PAIR_LAYOUT), n)", "PAIR_LAYOUT), 2 * n)", "past the tensor"),
    ),
    "both consumers pass columns' scales on in one place": (
        SHORT, (UP_PROJ, BUFFER, BUFFER.replace("CONSUMER", "0"), NUMBERS),
    ),
    # Of all.
    "rows are loaded past the expert's end": (
        LONG_BIAS, ("load_tokens", "gl.minimum(row + rows, end - 1)", "row + rows", "past the tensor"),
    ),
    "h is overwritten by a": (SWIGLU, ("store_quantized", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS)),
    "a is overwritten by the next h": (SWIGLU, (UP_PROJ, "tma.store_wait(0)  # the", "# the", NUMBERS)),
    "a's right block in the left one's buffer": (
        UNGATED, (STORE_ACT, "staging.index(2 * CONSUMER + 1)", "staged", NUMBERS),
    ),
    "down_proj ends before its stores": (LONG_BIAS, (DOWN_PROJ, LAST_WAIT, LAST_WAIT.partition("\n")[0], UNFINISHED)),
    "down_proj_dgrad releases what is not pending": (
        WIDE, (DACT, "            pending_release = False", "            pass", EITHER),
    ),
    "scales past the expert's end": (
        SWIGLU, ("store_quantized", "rows < end", "rows == rows", "past the tensor"),
    ),
    "scales past the last column": (
        replace(UNGATED, intermediate_size=384),
        ("store_quantized", " & (col < width)", "", f"{NUMBERS}|past the tensor|{OTHERS}"),
    ),
    "the bias past the last column": (
        BIAS, ("add_bias", ", mask=columns < width, other=0.0", "", "past the tensor"),
    ),
}  # fmt: skip

# Of a weight that stays in shared memory: as many steps as stages hold of two blocks; two; one.
STATIONARY = OF_FOUR = replace(UNGATED, bias=True, hidden_size=384, intermediate_size=512)
OF_TWO, OF_ONE = replace(STATIONARY, intermediate_size=256), replace(STATIONARY, intermediate_size=128)
PRODUCER, OF_ITEM, KEPT = "scaled_producer", MAINLOOP, "scaled_consumer"
PUBLISH = "publish_tile(tile_info, stage, 8 * expert"
ROW_SCALE = "row_scale.index(producer_acquire(ring, step))"
B_FULL = "mbarrier.wait(b_ring[2].index(k), phase)"
BY_ROWS = "mma_mainloop_stationary"
OF_STATIONARY: dict[str, tuple[Case, Fault]] = {
    "scales past the expert's end": (
        STATIONARY, ("load_row_scales", "gl.minimum(row + gl.arange(0, WARPGROUP_M, WARP_LAYOUT), end - 1)",
                     "row + gl.arange(0, WARPGROUP_M, WARP_LAYOUT)", "past the tensor"),
    ),
    "a third step's scale of one step": (OF_ONE, ("load_row_scales", "gl.minimum(2, last)", "2", "past the tensor")),
    "tile_info before the stage is free": (
        OF_FOUR, (PRODUCER, f"stage = producer_acquire(ring, step)\n            {PUBLISH}",
                  f"stage = {TAKE}\n            {PUBLISH}", PUBLISHED),
    ),
    "B is released by each block": (STATIONARY, (PRODUCER, "2 * arrivals_of(block, count)", "2", EITHER)),
    "B's phase is not published": (STATIONARY, (PRODUCER, "(item & 1), row", "0, row", EITHER)),
    "a stage's scales are overwritten": (
        OF_FOUR, (PRODUCER, ROW_SCALE, f"row_scale.index({TAKE})", NUMBERS),
    ),
    "B is loaded with each block": (STATIONARY, (PRODUCER, "if block == 0", "if block >= 0", EITHER)),
    "a step too many": (OF_TWO, (PRODUCER, "if k_block < steps", "if k_block <= steps", PUBLISHED)),
    "the first block's rows, always": (STATIONARY, (PRODUCER, "row += WARPGROUP_M", "pass", PUBLISHED)),
    "the end does not arrive": (
        STATIONARY, (PRODUCER, "mbarrier.arrive(ring[2].index(stage), count=1)", "pass", "deadlock"),
    ),
    "B is read before it is there": (STATIONARY, (OF_ITEM, B_FULL, "pass", EITHER)),
    "B's first slice is released for all": (
        STATIONARY, (OF_ITEM, "release_b(b_ring, k,", "release_b(b_ring, 0,", EITHER),
    ),
    "both consumers begin with the first block": (STATIONARY, (KEPT, "step = CONSUMER * steps", "step = 0", PUBLISHED)),
    "the consumer's phase of B": (STATIONARY, (KEPT, "block & 1", "0", EITHER)),
    "up_proj_dgrad forgets all products but the last": (
        STATIONARY, (BY_ROWS, "phase, acc, True", "phase, acc, False", "forgets others in flight"),
    ),
    "column scales past the last": (
        STATIONARY, (KEPT, "columns, width_out)", "columns, 2 * width_out)", "past the tensor"),
    ),
}  # fmt: skip

# Of a weight gradient: down_proj_wgrad's last slice of columns.
TRANSPOSES, GRADIENT, WGRAD_KERNEL = "transposed_producer", "transposed_consumer", "gemm_transposed_kernel"
ACQUIRE, FIRST_BLOCK = "stage = producer_acquire(ring, step)", "(start // BLOCK + expert)"
PARTIAL, MORE_STEPS, NEVER = "partial_pointers", "if steps > 0:\n                ", "if False:\n                "
BYTES = "by_token.block_type.nbytes + by_row.block_type.nbytes"
ARRIVE_EMPTY = "mbarrier.arrive(full.index(stage), count=1)"
OF_WGRAD: dict[str, Fault] = {
    "tile_info before the stage is free": (
        TRANSPOSES, f"{ACQUIRE}\n        publish", f"stage = {TAKE}\n        publish", PUBLISHED,
    ),
    "a stage is filled while it is read": (
        TRANSPOSES, f"{ACQUIRE}\n            mbarrier", f"stage = {TAKE}\n            mbarrier", PROTOCOL,
    ),
    "a stage without operands does not arrive": (TRANSPOSES, ARRIVE_EMPTY, "pass", "deadlock"),
    "a stage without operands is not counted": (
        TRANSPOSES, "            step += 1\n        for", "            pass\n        for", PROTOCOL,
    ),
    "fewer bytes than come": (TRANSPOSES, BYTES, "by_token.block_type.nbytes", "more bytes"),
    "the stage without operands is not released": (GRADIENT, "step, 1, False", "step, 0, False", PUBLISHED),
    "a stage before a chunk's is pending": (GRADIENT, "count, False", "count, True", PROTOCOL),
    "a chunk's steps are not counted": (GRADIENT, "acc, step = ", "acc, _ = ", PROTOCOL),
    "the next expert's scale": (GRADIENT, "scale + expert", "scale + expert + 1", "past the tensor"),
    "a slice's columns for all": (GRADIENT, "col + i * EPILOGUE_N", "col", "stored twice"),
    "the consumers' slices in one place": (GRADIENT, "staging, i, CONSUMER", "staging, i, 0", f"{FENCE}|{NUMBERS}"),
    "it ends before its stores": (GRADIENT, "    tma.store_wait(0)", "", UNFINISHED),
    "all steps are the first chunk": (GRADIENT, "gl.cdiv(steps, chunks - chunk)", "steps", f"{PROTOCOL}|{PUBLISHED}"),
    "the consumers' chunks in one place": (PARTIAL, "+ CONSUMER", "", OTHERS),
    "one consumer releases a stage": (
        WGRAD_KERNEL, "new_barriers(STAGES, CONSUMERS)", "new_barriers(STAGES, 1)", PROTOCOL,
    ),
}  # fmt: skip

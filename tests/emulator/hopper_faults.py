"""Faults to be planted in the Hopper kernels' sources, each with the errors by which the emulator shows it.

Each is (function, a text that is once in its source, what is put in its place, the errors); where a layout or a bias
must be there to show it, in such a case of its own.
"""

from dataclasses import replace

import torch
from triton_checks import Case

Fault = tuple[str, str, str, str]

# As many columns as fill down_proj_dgrad's slices: past them nothing is stored.
SWIGLU = Case(torch.float16, hidden_size=192, intermediate_size=256)
TRANSPOSED = replace(SWIGLU, transposed=True)
INTERLEAVED = replace(SWIGLU, gate_up="interleaved")
UNGATED = replace(SWIGLU, activation="relu2")
CLAMPED = replace(SWIGLU, activation="swiglu_oai")
BIAS = replace(SWIGLU, bias=True, hidden_size=136, intermediate_size=200)

PROTOCOL = "deadlock|more arrivals"
OTHERS = "another warp group has stored there"
FENCE = "before a fence"
NUMBERS = "RMS-relative error|not finite"
UNFINISHED = "has not waited for"
SOONER = f"{PROTOCOL}|{FENCE}"
EITHER = f"{PROTOCOL}|{NUMBERS}"
GIVE_TURN = "mbarrier.arrive(order_of_other, count=1)"
RELEASE, STORED = "consumer_release_previous(ring, step)", "tma.store_wait(0)"
SKIP = "mbarrier.arrive(empty.index(stage), count=1)"
WAIT_FULL, TAKE = "consumer_wait(ring, step)", "step % ring[2].shape[0]"
RELEASE_IN_LOOP, RELEASE_PENDING = f"        {RELEASE}", "consumer_release_previous(ring, step, pending_release)"
WAIT = "warpgroup_mma_wait({}, deps=(acc,))\n"
WAIT_BLOCKS = f"acc2, COUNT, COUNT)\n{RELEASE_IN_LOOP}"
TILE = "publish_tile(tile_info, stage, expert, row, end, col)"
NO_TILE = "publish_tile(tile_info, producer_acquire(ring, step), -1, 0, 0, 0)"
RELEASE_SLICE = "consumer_release_previous(ring, step, index > 0)"
SLICE_ARGS = "scale, dh, a_scaled, end, row, col + i * EPILOGUE_N, limit, alpha, ring, step"
PREFETCH = "scheduler_prefetch(tile_counter, next_index < total)"
FREE, TAKEN = "stage = producer_acquire(ring, step)\n        ", f"stage = {TAKE}\n        "
ANOTHER = "stored twice|past the tensor|outside the tensor"
PUBLISHED = f"{PROTOCOL}|{NUMBERS}|{ANOTHER}"
FAULTS: dict[str, Fault] = {
    "a stage is filled while it is read": ("producer_acquire", "mbarrier.wait(empty.", "(empty.", PROTOCOL),
    "the producer's first phase": ("producer_acquire", " & 1) ^ 1)", " & 1))", PROTOCOL),
    "a stage is read before it is full": ("issue_mma", WAIT_FULL, TAKE, SOONER),
    "the consumer's phase": ("consumer_wait", "(step // full.shape[0]) & 1)", "step & 1)", SOONER),
    "a stage is released with its wgmma in flight": (
        "mma_mainloop", WAIT.format(1) + RELEASE_IN_LOOP, WAIT.format(2) + RELEASE_IN_LOOP, NUMBERS,
    ),
    "a stage is released though no release is pending": (
        "mma_mainloop", RELEASE_PENDING, "consumer_release_previous(ring, step, True)", PROTOCOL,
    ),
    "a pending release is forgotten": (
        "mma_mainloop", RELEASE_PENDING, "consumer_release_previous(ring, step, False)", "deadlock",
    ),
    "a stage is released while a tile is stored from it": ("mma_mainloop", "tma.store_wait(0)", "pass", NUMBERS),
    "copies are committed before they land": ("producer_commit", "(LAG)", "(LAG + 1)", f"{FENCE}|{NUMBERS}|{ANOTHER}"),
    "copies without a fence": ("producer_commit", "fence_async_shared()", "pass", FENCE),
    "the last copies": ("producer_flush", "async_copy.wait_group(0)", "pass", UNFINISHED),
    "no stage is skipped": ("skip_stages", SKIP, "pass", "deadlock"),
    "stages are skipped before they are full": ("skip_stages", WAIT_FULL, TAKE, SOONER),
    "a store without a fence": ("fence_and_store", "fence_async_shared()", "pass", FENCE),
    "fewer bytes than come": ("load_blocks", "COUNT * rows", "1 * rows", "more bytes"),
    "more bytes than come": ("load_blocks", "COUNT * rows", "3 * rows", "deadlock"),
    "four blocks are three and one": (
        "block_tile_coords", "(remaining == BLOCKS + 1)", "(remaining == 99)", "stored twice",
    ),
    "up_proj overwrites a slice of h": ("store_slices", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "up_proj ends before its stores": ("act_consumer", f"step)\n    {STORED}", "step)", UNFINISHED),
    "no consumer waits for its turn": (
        "pingpong_consumer",
        "mbarrier.wait(mma_order.index(CONSUMER), ",
        "(",
        f"{PROTOCOL}|{ANOTHER}",
    ),
    "no consumer gives the turn": ("mma_mainloop_blocks", GIVE_TURN, "pass", PROTOCOL),
    "both consumers' first wait passes": ("pingpong_consumer", "phase = 1 - CONSUMER", "phase = 1", PROTOCOL),
    "turns do not alternate": ("pingpong_consumer", "phase ^= 1", "pass", f"{PROTOCOL}|stored twice"),
    "a consumer takes the other's stages": ("pingpong_consumer", "step += steps", "pass", PROTOCOL),
    "a full stage is read early": ("issue_mma_blocks", WAIT_FULL, TAKE, PROTOCOL),
    "a stage is released with its wgmmas in flight": (
        "mma_mainloop_blocks",
        WAIT_BLOCKS,
        WAIT_BLOCKS.replace("COUNT)", "COUNT + 1)"),
        NUMBERS,
    ),
    "down_proj stores past the expert's end": ("store_block", "end, last,", "end + 64, last - 64,", "stored twice"),
    "tile_info before the stage is free, up_proj": ("gather_producer", FREE + TILE, TAKEN + TILE, PUBLISHED),
    "another tile is published": ("gather_producer", TILE, TILE.replace("row", "next_row"), f"{NUMBERS}|{ANOTHER}"),
    "the end is not published": ("gather_producer", NO_TILE, "producer_acquire(ring, step)", "deadlock"),
    "the scheduler gives a tile twice": ("scheduler_next", "number + 2 * gl", "number + 1 * gl", "stored twice"),
    "no tile is prefetched": (
        "gather_producer", PREFETCH, "scheduler_prefetch(tile_counter, False)", f"{NUMBERS}|{ANOTHER}",
    ),
    "no stage for an expert without rows": (
        "wgrad_producer", "step += 1\n        upper", "pass\n        upper", PROTOCOL,
    ),
    "h overwrites an operand": ("load_h", "producer_acquire(ring, step)", "step % full.shape[0]", EITHER),
    "h is not committed": ("load_h", "producer_commit(ring, step)", "pass", "deadlock"),
    "down_proj_dgrad reads h before it is there": ("dact_slice", WAIT_FULL, TAKE, f"{EITHER}|nobody waited for"),
    "down_proj_dgrad's consumers in one place": ("dact_slice", "index(CONSUMER * BLOCKS),", "index(0),", FENCE),
    "down_proj_dgrad releases a stage twice": ("dact_slice", RELEASE_SLICE, f"{RELEASE}; {RELEASE}", PROTOCOL),
    "down_proj_dgrad releases an operand's stage": ("dact_slice", RELEASE_SLICE, RELEASE, f"{SOONER}|{NUMBERS}"),
    "down_proj_dgrad waits for a_scaled only": ("dact_slice", "tma.store_wait(0)", "tma.store_wait(1)", NUMBERS),
    "down_proj_dgrad skips no slices": ("dact_consumer", "steps + BN // EPILOGUE_N", "steps", f"{SOONER}|{ANOTHER}"),
    "down_proj_wgrad overwrites a slice": ("store_gradient", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
}  # fmt: skip
# Of a gradient that is added to a sum.
OF_ADDING: dict[str, Fault] = {
    "a slice overwritten": ("add_slice", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
}
# Two tiles of columns, of four steps each, of down_proj with a bias and of up_proj_dgrad.
STATIONARY = replace(UNGATED, bias=True, hidden_size=264, intermediate_size=200)
B_FULL = "mbarrier.wait(b_full.index(k_block), phase)"
B_FREE = "mbarrier.wait(b_empty.index(k_block), "
OF_STATIONARY: dict[str, Fault] = {
    "one arrival releases B": ("new_rings", "new_barriers(B_STAGES, 2)", "new_barriers(B_STAGES, 1)", EITHER),
    "the first chunk has all blocks": ("item_coords", "(chunk + 1) * blocks // chunks", "blocks", "stored twice"),
    "chunks of another expert's rows": (
        "item_coords", "row_start_of_expert + expert)", "row_start_of_expert + 0 * expert)", f"{NUMBERS}|{ANOTHER}",
    ),
    "A is loaded over what is read": ("load_rows", "producer_acquire(ring, step)", TAKE, PROTOCOL),
    "B is loaded over what is read": ("load_b", B_FREE, "(0, ", EITHER),
    "the producer's first phase of B": ("load_b", "(item & 1) ^ 1)", "item & 1)", "deadlock"),
    "B's phase stays": ("load_b", "(item & 1) ^ 1)", "1)", EITHER),
    "items are not counted": ("stationary_producer", "item += 1", "pass", EITHER),
    "an item twice": ("stationary_producer", "index + gl.num_programs(0)", "index", PUBLISHED),
    "no last block's A": ("stationary_producer", "block < count", "block < count - 1", EITHER),
    "B is released once": ("release_b", "pred=arrivals > 1", "pred=False", "deadlock"),
    "B is released twice": ("release_b", "pred=arrivals > 1", "pred=arrivals > 0", EITHER),
    "B is read before it is there": ("issue_mma_stationary", B_FULL, "pass", EITHER),
    "the consumer's phase of B": ("stationary_consumer", "item & 1", "0", EITHER),
    "the last stage is released in flight": (
        "mma_mainloop_stationary", f"acc = {WAIT.format(0)}    {RELEASE}",
        f"{RELEASE}\n    acc = {WAIT.format(0)}", NUMBERS,
    ),
    "a slice of B in use is released": (
        "mma_mainloop_stationary", "k_block - 1, arrivals", "k_block, arrivals", EITHER,
    ),
    "three blocks release B": ("arrivals_of", "count - 2", "count - 3", EITHER),
    "the consumers' slices in one place": ("store_slices", "2 * CONSUMER", "0", f"{FENCE}|{NUMBERS}"),
    "every item begins with the first consumer": (
        "stationary_consumer", "(before + CONSUMER) & 1", "CONSUMER", PROTOCOL,
    ),
    "every item's steps begin at zero": ("stationary_consumer", "(before + block) * steps", "block * steps", EITHER),
    "a consumer gives itself the turn": ("stationary_consumer", "index(1 - CONSUMER)", "index(CONSUMER)", PROTOCOL),
    "the consumers stay with an item": ("stationary_consumer", "index + gl.num_programs(0)", "index", PUBLISHED),
    "the consumers share a bias": ("stationary_consumer", "bias_smem.index(CONSUMER)", "bias_smem.index(0)", NUMBERS),
    "two arrivals give a turn": (
        "gemm_stationary_kernel", "new_barriers(CONSUMERS, 1)", "new_barriers(CONSUMERS, 2)", "deadlock",
    ),
}  # fmt: skip
OF_LAYOUTS: dict[str, tuple[Case, Fault]] = {
    "fewer bytes than come of a weight": (TRANSPOSED, ("load_gathered", "weight.block", "-weight.block", "more bytes")),
    "the bias past the last column": (
        replace(BIAS, gate_up="interleaved"),
        ("load_columns", ", mask=column < width, other=0.0", "", "past the tensor"),
    ),
    "dh's blocks in one place": (INTERLEAVED, ("dact_slice", "* col + EPILOGUE_N", "* col", "stored twice")),
    "down_proj_dgrad takes more than half a slice": (
        CLAMPED,
        ("concatenated_grad", "up_buffer.slice(HALF, HALF", "up_buffer.slice(HALF, EPILOGUE_N", "outside the buffer"),
    ),
    "down_proj_dgrad's loop stays in a stage": (
        CLAMPED,
        (
            "dact_slices", f"                da, {SLICE_ARGS} + i,",
            f"                da, {SLICE_ARGS},", PROTOCOL,
        ),
    ),
}  # fmt: skip

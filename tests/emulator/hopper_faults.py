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
# Whose db1 takes one more tile of up_proj_wgrad.
SUMS_ALONE = replace(BIAS, hidden_size=128)
# Too long a contraction of down_proj for a stationary weight.
LONG_BIAS = replace(BIAS, intermediate_size=264)

PROTOCOL = "deadlock|more arrivals"
OTHERS = "another warp group has stored there"
FENCE = "before a fence"
NUMBERS = "RMS-relative error|not finite"
UNFINISHED = "has not waited for"
SOONER = f"{PROTOCOL}|{FENCE}"
EITHER = f"{PROTOCOL}|{NUMBERS}"
GIVE_TURN = "mbarrier.arrive(order_of_other, count=1)"
RELEASE = "consumer_release_previous(ring, step)"
SKIP = "mbarrier.arrive(empty.index(stage), count=1)"
WAIT_FULL, TAKE = "consumer_wait(ring, step)", "step % ring[2].shape[0]"
RELEASE_IN_LOOP, RELEASE_PENDING = f"        {RELEASE}", "consumer_release_previous(ring, step, pending_release)"
WAIT = "warpgroup_mma_wait({}, deps=(acc,))\n"
WAIT_BLOCKS = f"acc2, COUNT, COUNT)\n{RELEASE_IN_LOOP}"
TILE = "publish_tile(tile_info, stage, expert, row, end, col)"
NO_TILE = "publish_tile(tile_info, producer_acquire(ring, step), -1, 0, 0, 0)"
RELEASE_SLICE = "consumer_release_previous(ring, step, index > 0)"
SLICE_ARGS = "scale, dh, a_scaled, end, row, col + i * EPILOGUE_N, limit, alpha, ring, step"
PREFETCH = "scheduler_prefetch(num_tiles, next_index < total)"
FREE, TAKEN = "stage = producer_acquire(ring, step)\n        ", f"stage = {TAKE}\n        "
WEIGHTS = "publish_tile(tile_info, stage, expert"
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
    "the last stage is not released": ("mma_mainloop", f"{WAIT.format(0)}    {RELEASE}", WAIT.format(0), "deadlock"),
    "a stage is released while a tile is stored from it": ("mma_mainloop", "tma.store_wait(0)", "pass", NUMBERS),
    "copies are committed before they land": ("producer_commit", "(LAG)", "(LAG + 1)", f"{FENCE}|{NUMBERS}|{ANOTHER}"),
    "copies without a fence": ("producer_commit", "fence_async_shared()", "pass", FENCE),
    "the last copies": ("producer_flush", "async_copy.wait_group(0)", "pass", UNFINISHED),
    "no stage is skipped": ("skip_stages", SKIP, "pass", "deadlock"),
    "stages are skipped twice": ("skip_stages", SKIP, f"{SKIP}; {SKIP}", EITHER),
    "stages are skipped before they are full": ("skip_stages", WAIT_FULL, TAKE, SOONER),
    "skipping forgets the pending release": ("skip_stages", RELEASE, "pass", "deadlock"),
    "skipping releases while a tile is stored": ("skip_stages", "tma.store_wait(0)", "pass", NUMBERS),
    "a store without a fence": ("fence_and_store", "fence_async_shared()", "pass", FENCE),
    "fewer bytes than come": ("load_blocks", "COUNT * rows", "1 * rows", "more bytes"),
    "more bytes than come": ("load_blocks", "COUNT * rows", "3 * rows", "deadlock"),
    "four blocks are three and one": (
        "block_tile_coords", "(remaining == BLOCKS + 1)", "(remaining == 99)", "stored twice",
    ),
    "nobody moves up": ("block_tile_coords", "gl.where(takes_one, row - WARPGROUP_M, row)", "row", NUMBERS),
    "up_proj overwrites a slice of h": ("store_h", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "up_proj overwrites a slice of a": ("store_act", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "up_proj ends before its stores": ("act_consumer", "tma.store_wait(0)", "pass", UNFINISHED),
    "no consumer waits for its turn": (
        "pingpong_consumer",
        "mbarrier.wait(mma_order.index(CONSUMER), ",
        "(",
        f"{PROTOCOL}|{ANOTHER}",
    ),
    "no consumer gives the turn": ("mma_mainloop_blocks", GIVE_TURN, "pass", PROTOCOL),
    "a turn is given at every step": (
        "mma_mainloop_blocks", "        step += 1", f"        step += 1; {GIVE_TURN}", f"{PROTOCOL}|{ANOTHER}",
    ),
    "neither consumer's first wait passes": ("pingpong_consumer", "phase = 1 - CONSUMER", "phase = 0", PROTOCOL),
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
    "down_proj has no third block": ("pingpong_consumer", "count > 2", "count > 3", NUMBERS),
    "down_proj overwrites a slice": ("store_block", "tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)", NUMBERS),
    "down_proj ends before its stores": ("pingpong_consumer", "tma.store_wait(0)", "pass", UNFINISHED),
    "down_proj stores past the expert's end": ("store_block", "end, last,", "end + 64, last - 64,", "stored twice"),
    "tile_info before the stage is free, up_proj": ("gather_producer", FREE + TILE, TAKEN + TILE, PUBLISHED),
    "tile_info before the stage is free, down_proj_wgrad": (
        "wgrad_producer", FREE + WEIGHTS, TAKEN + WEIGHTS, PUBLISHED,
    ),
    "another tile is published": ("gather_producer", TILE, TILE.replace("row", "next_row"), f"{NUMBERS}|{ANOTHER}"),
    "the end is not published": ("gather_producer", NO_TILE, "producer_acquire(ring, step)", "deadlock"),
    "the scheduler gives a tile twice": ("scheduler_next", "number + 2 * gl", "number + 1 * gl", "stored twice"),
    "no tile is prefetched": (
        "gather_producer", PREFETCH, "scheduler_prefetch(num_tiles, False)", f"{NUMBERS}|{ANOTHER}",
    ),
    "another row's score": ("gather_producer", "pair_of_row, row, end, gl", "pair_of_row, row, end, 0 * gl", NUMBERS),
    "no stage for an expert without rows": (
        "wgrad_producer", "step += 1\n        upper", "pass\n        upper", PROTOCOL,
    ),
    "nobody loads h": ("gather_producer", "step = load_h(ring, step, h, row, col, BN, GATE_UP)", "pass", "deadlock"),
    "h of the next tile": ("gather_producer", "step, h, row, col, BN", "step, h, next_row, next_col, BN", NUMBERS),
    "h overwrites an operand": ("load_h", "producer_acquire(ring, step)", "step % full.shape[0]", EITHER),
    "fewer bytes than come of h": ("load_h", "CONSUMERS * BLOCKS * h", "1 * h", "more bytes"),
    "more bytes than come of h": ("load_h", "CONSUMERS * BLOCKS * h", "3 * h", "deadlock"),
    "h is not committed": ("load_h", "producer_commit(ring, step)", "pass", "deadlock"),
    "all of h in one stage": ("load_h", "        step += 1", "        pass", PROTOCOL),
    "h of the first consumer's rows": ("load_h", "row + consumer * WARPGROUP_M", "row", NUMBERS),
    "h of the first slice": ("load_h", "col + i * EPILOGUE_N", "col", NUMBERS),
    "down_proj_dgrad reads h before it is there": ("dact_slice", WAIT_FULL, TAKE, f"{EITHER}|nobody waited for"),
    "down_proj_dgrad's slice in the stage of another": (
        "dact_slices", f"slices[i], {SLICE_ARGS} + i,", f"slices[i], {SLICE_ARGS},", PROTOCOL,
    ),
    "down_proj_dgrad's consumers in one place": ("dact_slice", "index(CONSUMER * BLOCKS),", "index(0),", FENCE),
    "down_proj_dgrad releases a stage twice": ("dact_slice", RELEASE_SLICE, f"{RELEASE}; {RELEASE}", PROTOCOL),
    "down_proj_dgrad releases no stage": ("dact_slice", RELEASE_SLICE, "pass", "deadlock"),
    "down_proj_dgrad releases an operand's stage": ("dact_slice", RELEASE_SLICE, RELEASE, f"{SOONER}|{NUMBERS}"),
    "down_proj_dgrad releases a stage while it is stored": ("dact_slice", "tma.store_wait(0)", "pass", NUMBERS),
    "down_proj_dgrad waits for a_scaled only": ("dact_slice", "tma.store_wait(0)", "tma.store_wait(1)", NUMBERS),
    "down_proj_dgrad stores without a fence": ("dact_slice", "fence_async_shared()", "pass", FENCE),
    "down_proj_dgrad has no pending release": ("dact_consumer", "pending_release = True", "pass", "deadlock"),
    "down_proj_dgrad releases what is not pending": (
        "dact_consumer", "            pending_release = False", "            pass", EITHER,
    ),
    "down_proj_dgrad skips no slices": ("dact_consumer", "steps + BN // EPILOGUE_N", "steps", f"{SOONER}|{ANOTHER}"),
    "down_proj_dgrad counts one slice": (
        "dact_consumer", "step += BN // EPILOGUE_N", "step += 1", f"{SOONER}|{ANOTHER}",
    ),
    "down_proj_dgrad ends before its stores": ("dact_consumer", "tma.store_wait(0)", "pass", UNFINISHED),
    "down_proj_wgrad overwrites a slice": ("store_gradient", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "down_proj_wgrad ends before its stores": ("wgrad_consumer", "tma.store_wait(0)", "pass", UNFINISHED),
}  # fmt: skip
# Of a gradient that is added to a sum.
OF_ADDING: dict[str, Fault] = {
    "a slice overwritten": ("add_slice", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "no fence": ("add_slice", "fence_async_shared()", "pass", FENCE),
    "both halves in one place": ("add_slice", "col + i * ADDED_N", "col", "stored twice"),
    "the sum overwritten": ("add_slice", "tma_add(", "tma_store(", NUMBERS),
    "nothing transposed": ("add_slice", "if TRANSPOSED:", "if False:", "what the buffer holds"),
}
# Two tiles of columns, of four steps each, of down_proj with a bias and of up_proj_dgrad.
STATIONARY = replace(UNGATED, bias=True, hidden_size=264, intermediate_size=200)
NEXT, NEXT_OF_CONSUMER = "expert, row, col, count = next_", "expert, first, end, col, count = next_"
A_BYTES, B_BYTES = "rows.block_type.nbytes", "weight.block_type.nbytes"
A_FULL, B_FULL = f"stage = {WAIT_FULL}", "mbarrier.wait(b_full.index(k_block), item & 1)"
B_FREE = "mbarrier.wait(b_empty.index(k_block), "
OF_STATIONARY: dict[str, Fault] = {
    "one arrival releases B": ("new_rings", "new_barriers(B_STAGES, 2)", "new_barriers(B_STAGES, 1)", EITHER),
    "three arrivals release B": ("new_rings", "new_barriers(B_STAGES, 2)", "new_barriers(B_STAGES, 3)", "deadlock"),
    "no last block": ("item_coords", "gl.cdiv(end - start, WARPGROUP_M)", "(end - start) // WARPGROUP_M", EITHER),
    "the first chunk has all blocks": ("item_coords", "(chunk + 1) * blocks // chunks", "blocks", "stored twice"),
    "a chunk is short of a block": ("item_coords", "(chunk + 1) * blocks // chunks", "first + 8", NUMBERS),
    "every chunk is the first": ("item_coords", "(row - start) // CHUNK_M", "0", "stored twice"),
    "chunks begin where the expert does": (
        "item_coords", "start + first * WARPGROUP_M", "start + 0 * first", "stored twice",
    ),
    "chunks of another expert's rows": (
        "item_coords", "row_start_of_expert + expert)", "row_start_of_expert + 0 * expert)", f"{NUMBERS}|{ANOTHER}",
    ),
    "one chunk too many": ("item_coords", "gl.cdiv(end - start, CHUNK_M)", "((end - start) // CHUNK_M + 2)", EITHER),
    "A is loaded over what is read": ("load_rows", "producer_acquire(ring, step)", TAKE, PROTOCOL),
    "fewer bytes than come of A": ("load_rows", A_BYTES, f"-{A_BYTES}", "more bytes"),
    "more bytes than come of A": ("load_rows", A_BYTES, f"2 * {A_BYTES}", "deadlock"),
    "B is loaded over what is read": ("load_b", B_FREE, "(0, ", EITHER),
    "the producer's first phase of B": ("load_b", "(item & 1) ^ 1)", "item & 1)", "deadlock"),
    "B's phase stays": ("load_b", "(item & 1) ^ 1)", "1)", EITHER),
    "fewer bytes than come of B": ("load_b", B_BYTES, f"-{B_BYTES}", "more bytes"),
    "more bytes than come of B": ("load_b", B_BYTES, f"2 * {B_BYTES}", "deadlock"),
    "the first slice of B, always": ("load_b", "k_block * BK", "0", NUMBERS),
    "items are not counted": ("stationary_producer", "item += 1", "pass", EITHER),
    "the first item's blocks, always": (
        "stationary_producer", f"{NEXT}expert, next_row, next_col, next_count",
        "expert, row, col = next_expert, next_row, next_col", PUBLISHED,
    ),
    "the item before's expert": ("stationary_producer", f"{NEXT}expert", f"{NEXT}expert * 0 + expert", NUMBERS),
    "the item before's rows": (
        "stationary_producer", "next_expert, next_row, next_col", "next_expert, row, next_col", NUMBERS,
    ),
    "the item before's columns": (
        "stationary_producer", "next_row, next_col, next_count\n", "next_row, col, next_count\n", NUMBERS,
    ),
    "an item twice": ("stationary_producer", "index + gl.num_programs(0)", "index", PUBLISHED),
    "no last block's A": ("stationary_producer", "block < count", "block < count - 1", EITHER),
    "one block's A too many": ("stationary_producer", "block < count", "block <= count", PUBLISHED),
    "the first block's A twice": ("stationary_producer", "block = 1", "block = 0", PUBLISHED),
    "the first block's A, always": ("stationary_producer", "row + block * WARPGROUP_M", "row", NUMBERS),
    "the first block's steps are not counted": (
        "stationary_producer", "            step += 1\n        block", "            pass\n        block", PROTOCOL,
    ),
    "other blocks' steps are not counted": (
        "stationary_producer", "                step += 1", "                pass", PROTOCOL,
    ),
    "B is released once": ("release_b", "pred=arrivals > 1", "pred=False", "deadlock"),
    "B is released twice": ("release_b", "pred=arrivals > 1", "pred=arrivals > 0", EITHER),
    "B is released by an only block": ("release_b", "pred=arrivals > 0", "pred=arrivals > 1", "deadlock"),
    "A is read before it is there": ("issue_mma_stationary", WAIT_FULL, TAKE, SOONER),
    "B is read before it is there": ("issue_mma_stationary", B_FULL, "pass", EITHER),
    "the consumer's phase of B": ("issue_mma_stationary", "item & 1)", "0)", EITHER),
    "a stage is released with its product in flight": (
        "mma_mainloop_stationary", WAIT.format(1) + RELEASE_IN_LOOP, WAIT.format(2) + RELEASE_IN_LOOP, NUMBERS,
    ),
    "no stage but the last is released": (
        "mma_mainloop_stationary", f"{RELEASE_IN_LOOP}\n        release_b", "        release_b", "deadlock",
    ),
    "the last stage is not released": (
        "mma_mainloop_stationary", f"{RELEASE}\n    release_b(b_ring, steps", "release_b(b_ring, steps", "deadlock",
    ),
    "the last stage is released in flight": (
        "mma_mainloop_stationary", f"acc = {WAIT.format(0)}    {RELEASE}",
        f"{RELEASE}\n    acc = {WAIT.format(0)}", NUMBERS,
    ),
    "a slice of B in use is released": (
        "mma_mainloop_stationary", "k_block - 1, arrivals", "k_block, arrivals", EITHER,
    ),
    "no slice of B but the last is released": (
        "mma_mainloop_stationary", "release_b(b_ring, k_block - 1, arrivals)", "pass", "deadlock",
    ),
    "the last slice of B is not released": (
        "mma_mainloop_stationary", "release_b(b_ring, steps - 1, arrivals)", "pass", "deadlock",
    ),
    "no consumer gives the turn": ("mma_mainloop_stationary", GIVE_TURN, "pass", PROTOCOL),
    "a turn is given at every step": (
        "mma_mainloop_stationary", "        step += 1", f"        step += 1; {GIVE_TURN}", f"{PROTOCOL}|{ANOTHER}",
    ),
    "an only block releases B once": ("arrivals_of", "count == 1, 2", "count == 1, 1", "deadlock"),
    "the last block but one keeps B": ("arrivals_of", "count - 2", "count - 1", "deadlock"),
    "three blocks release B": ("arrivals_of", "count - 2", "count - 3", EITHER),
    "every block releases B": ("arrivals_of", "1, 0)", "1, 1)", EITHER),
    "a slice is overwritten": ("store_columns", "tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)", NUMBERS),
    "the consumers' slices in one place": ("store_columns", "BUFFERS * CONSUMER", "0", f"{FENCE}|{NUMBERS}"),
    "rows past the expert's end": ("store_columns", "end, last,", "end + 64, last - 64,", "stored twice"),
    "one slice's columns for all": ("store_columns", "col + i * EPILOGUE_N", "col", "stored twice"),
    "one slice's bias for all": ("store_columns", "bias.slice(i * EPILOGUE_N", "bias.slice(0", NUMBERS),
    "neither consumer's first wait passes": ("stationary_consumer", "phase = 1 - CONSUMER", "phase = 0", PROTOCOL),
    "turns do not alternate": ("stationary_consumer", "phase ^= 1", "pass", PROTOCOL),
    "every item begins with the first consumer": (
        "stationary_consumer", "(before + CONSUMER) & 1", "CONSUMER", PROTOCOL,
    ),
    "both consumers take a block": ("stationary_consumer", "count, CONSUMERS)", "count)", f"{PROTOCOL}|{ANOTHER}"),
    "blocks are not counted": ("stationary_consumer", "before += count", "pass", PROTOCOL),
    "the consumers count no items": ("stationary_consumer", "item += 1", "pass", EITHER),
    "every item's steps begin at zero": ("stationary_consumer", "(before + block) * steps", "block * steps", EITHER),
    "a consumer gives itself the turn": ("stationary_consumer", "index(1 - CONSUMER)", "index(CONSUMER)", PROTOCOL),
    "the consumers take the first item's blocks": (
        "stationary_consumer", f"{NEXT_OF_CONSUMER}expert, next_first, next_end, next_col, next_count",
        "expert, first, end, col = next_expert, next_first, next_end, next_col", PUBLISHED,
    ),
    "the consumers stay with an item": ("stationary_consumer", "index + gl.num_programs(0)", "index", PUBLISHED),
    "a chunk's first rows, always": ("stationary_consumer", "first + block * WARPGROUP_M", "first", "stored twice"),
    "another expert's bias": ("stationary_consumer", "columns(bias, expert", "columns(bias, 0 * expert", NUMBERS),
    "the first columns' bias": ("stationary_consumer", "col + gl.arange", "gl.arange", NUMBERS),
    "the consumers share a bias": ("stationary_consumer", "bias_smem.index(CONSUMER)", "bias_smem.index(0)", NUMBERS),
    "it ends before its stores": ("stationary_consumer", "tma.store_wait(0)", "pass", UNFINISHED),
    "two arrivals give a turn": (
        "gemm_stationary_kernel", "new_barriers(CONSUMERS, 1)", "new_barriers(CONSUMERS, 2)", "deadlock",
    ),
}  # fmt: skip
OF_LAYOUTS: dict[str, tuple[Case, Fault]] = {
    "the parts are the halves of a tile": (TRANSPOSED, ("gate_up_slices", "elif B_K_MAJOR", "elif True", NUMBERS)),
    "up_proj stores the parts as halves": (TRANSPOSED, ("store_h", "elif B_K_MAJOR", "elif True", NUMBERS)),
    "up_proj has the halves of a tile for parts": (SWIGLU, ("gate_up_slices", "elif B_K_MAJOR", "elif False", NUMBERS)),
    "up's weight only": (TRANSPOSED, ("load_weight", "0, k, col", "1, k, col", NUMBERS)),
    "fewer bytes than come of a weight": (TRANSPOSED, ("load_gathered", "weight.block", "-weight.block", "more bytes")),
    "more bytes than come of a weight": (TRANSPOSED, ("load_gathered", "weight.block", "2 * weight.block", "deadlock")),
    "half a part for a tile": (
        TRANSPOSED, ("gather_producer", "cdiv(width_out, BN)", "cdiv(width_out, 2 * BN)", NUMBERS),
    ),
    "up_proj takes halves for pairs": (
        INTERLEAVED, ("gate_up_slices", "deinterleave(acc, BN)", "(acc[:, : BN // 2], acc[:, BN // 2 :])", NUMBERS),
    ),
    "up_proj swaps the columns of a pair": (INTERLEAVED, ("gate_up_slices", "gate, up =", "up, gate =", NUMBERS)),
    "up_proj stores a where h is": (INTERLEAVED, ("store_act", "col = col // 2", "pass", f"{NUMBERS}|{ANOTHER}")),
    "up_proj sees half of h": (INTERLEAVED, ("up_proj_act_kernel", "2 * n if GATE", "n if GATE", NUMBERS)),
    "up_proj stores the slope": (UNGATED, ("store_act", "value, _slope", "_slope, value", NUMBERS)),
    "up_proj stores half a tile": (UNGATED, ("store_act", "BN if GATE", "BN // 2 if GATE", NUMBERS)),
    "nobody adds the bias": (BIAS, ("act_consumer", "acc += broadcast", "broadcast", NUMBERS)),
    "the bias of another expert": (BIAS, ("act_consumer", "columns(bias, expert", "columns(bias, 0 * expert", NUMBERS)),
    "the bias of the first columns": (BIAS, ("load_tile_columns", "inside = col +", "inside =", NUMBERS)),
    "the bias of the gate twice": (BIAS, ("load_tile_columns", "// RUN % 2", "// RUN % 1", NUMBERS)),
    "the bias of halves for parts": (
        replace(BIAS, transposed=True),
        ("load_tile_columns", "BN // 2 if B_K_MAJOR else EPILOGUE_N", "BN // 2", NUMBERS),
    ),
    "the bias past the last column": (
        replace(BIAS, gate_up="interleaved"),
        ("load_columns", ", mask=column < width, other=0.0", "", "past the tensor"),
    ),
    "no bias past half of h": (
        replace(BIAS, gate_up="interleaved"), ("load_tile_columns", "col + column, 2 * n", "col + column, n", NUMBERS),
    ),
    "down_proj publishes another expert": (
        LONG_BIAS, ("pingpong_producer", "4 * expert + count", "4 * next_expert + count", NUMBERS),
    ),
    "down_proj adds another expert's bias": (LONG_BIAS, ("pingpong_consumer", "count // 4,", "count // 8,", NUMBERS)),
    "down_proj adds the first columns' bias": (LONG_BIAS, ("pingpong_consumer", "col + gl", "gl", NUMBERS)),
    "down_proj adds the left half's bias": (
        LONG_BIAS, ("store_block", "j * EPILOGUE_N, EPILOGUE_N", "0, EPILOGUE_N", NUMBERS),
    ),
    "A has no ones": (BIAS, ("copy_a", "width_of_a(p, ones)", "p", NUMBERS)),
    "A has ones for x": (BIAS, ("copy_a", "(columns < p)", "(columns < p - 8)", "before the tensor")),
    "A has x for ones": (BIAS, ("copy_a", "(columns < p)", "(columns < p + 8)", f"{NUMBERS}|past the tensor")),
    "no tile of sums alone": (SUMS_ALONE, ("width_of_a", "p + ONES", "p", NUMBERS)),
    "neither consumer has the sums": (SUMS_ALONE, ("wgrad_consumer", "p + ONES)", "p)", NUMBERS)),
    "one stage is skipped of all": (
        SUMS_ALONE, ("wgrad_consumer", "gl.maximum(steps, 1)", "1", f"{PROTOCOL}|{ANOTHER}"),
    ),
    "no stage is skipped of none": (
        SUMS_ALONE, ("wgrad_consumer", "gl.maximum(steps, 1)", "steps", f"{PROTOCOL}|{ANOTHER}"),
    ),
    "another row of the product for sums": (BIAS, ("store_sums", "rows == p", "rows == p - 1", NUMBERS)),
    "another expert's sums": (BIAS, ("store_sums", "expert.to(gl.int64)", "0", NUMBERS)),
    "one slice's sums for all": (BIAS, ("store_sums", "col + gl.arange", "gl.arange", NUMBERS)),
    "sums past the last column": (
        BIAS, ("store_sums", "columns < q", "columns >= 0", f"{NUMBERS}|past the tensor"),
    ),
    "nobody loads the second block of h": (
        INTERLEAVED, ("load_h", "static_range(BLOCKS)", "static_range(1)", "deadlock"),
    ),
    "h's blocks in one place": (INTERLEAVED, ("load_h", "BLOCKS + block)", "BLOCKS)", NUMBERS)),
    "the same block of h twice": (INTERLEAVED, ("load_h", " + block * EPILOGUE_N", "", NUMBERS)),
    "down_proj_dgrad has one block": (INTERLEAVED, ("dact_slice", "BLOCKS + BLOCKS - 1", "BLOCKS", NUMBERS)),
    "nobody stores dh's second block": (
        INTERLEAVED, ("dact_slice", 'if GATE_UP == "interleaved":\n        tma', "if False:\n        tma", NUMBERS),
    ),
    "dh's blocks in one place": (INTERLEAVED, ("dact_slice", "* col + EPILOGUE_N", "* col", "stored twice")),
    "down_proj_dgrad takes halves for pairs": (
        INTERLEAVED,
        (
            "interleaved_half_grad", "deinterleave(buffer.load(both), EPILOGUE_N)",
            "halves(buffer.load(both), WARPGROUP_M, EPILOGUE_N)", NUMBERS,
        ),
    ),
    "down_proj_dgrad stores halves for pairs": (
        INTERLEAVED,
        ("interleaved_half_grad", "dtype)).reshape", "dtype)).permute([0, 2, 1]).reshape", NUMBERS),
    ),
    "down_proj_dgrad joins the left half and itself": (
        INTERLEAVED, ("interleaved_grad", "right_a, da", "left_a, da", NUMBERS),
    ),
    "down_proj_dgrad's gradient without the score": (
        UNGATED, ("dact_slice", "score[:, None] * slope", "slope", NUMBERS),
    ),
    "down_proj_dgrad stores no gradient": (UNGATED, ("dact_slice", "    buffer.store", "    ", NUMBERS)),
    "down_proj_dgrad joins pairs, not halves": (CLAMPED, ("joined", ".permute([0, 2, 1])", "", NUMBERS)),
    "down_proj_dgrad takes the left half twice": (
        CLAMPED,
        ("concatenated_grad", "gate_buffer.slice(HALF", "gate_buffer.slice(0", NUMBERS),
    ),
    "down_proj_dgrad takes more than half a slice": (
        CLAMPED,
        ("concatenated_grad", "up_buffer.slice(HALF, HALF", "up_buffer.slice(HALF, EPILOGUE_N", "outside the buffer"),
    ),
    "down_proj_dgrad's loop keeps to a slice": (CLAMPED, ("dact_slices", "da, next_da, third_da = ", "_ = ", NUMBERS)),
    "down_proj_dgrad's loop stays in a stage": (
        CLAMPED,
        (
            "dact_slices", f"                da, {SLICE_ARGS} + i,",
            f"                da, {SLICE_ARGS},", PROTOCOL,
        ),
    ),
}  # fmt: skip

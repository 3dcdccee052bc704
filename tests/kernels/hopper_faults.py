"""Faults to be planted in the Hopper kernels' sources, each with the errors by which the emulator shows it.

Each is (function, a text that is once in its source, what is put in its place, the errors); where a layout or a bias
must be there to show it, in such a case of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton_checks import Case

Fault = tuple[str, str, str, str]

# As many columns as fill B1's slices: past them nothing is stored.
SWIGLU = Case(torch.float16, hidden_size=192, intermediate_size=256)
TURNED = replace(SWIGLU, turned=True)
INTERLEAVED = replace(SWIGLU, gate_up="interleaved")
UNGATED = replace(SWIGLU, activation="relu2")
CLAMPED = replace(SWIGLU, activation="swiglu_oai")
BIAS = replace(SWIGLU, bias=True, hidden_size=136, intermediate_size=200)

PROTOCOL = "deadlock|more arrivals"
FENCE = "before a fence"
NUMBERS = "RMS-relative error|not finite"
UNFINISHED = "has not waited for"
SOONER = f"{PROTOCOL}|{FENCE}"
EITHER = f"{PROTOCOL}|{NUMBERS}"
GIVE = "mbarrier.arrive(turn_of_other, count=1)"
LEAVE = "leave_last(ring, step)"
PASS_BY = "mbarrier.arrive(empty.index(stage), count=1)"
AWAIT, TAKE = "await_full(ring, step)", "step % ring[2].shape[0]"
LEAVE_IN_LOOP, LEAVE_OWED = f"        {LEAVE}", "leave_last(ring, step, owes)"
WAIT = "warpgroup_mma_wait({}, deps=(acc,))\n"
WAIT_BLOCKS = f"acc2, COUNT, COUNT)\n{LEAVE_IN_LOOP}"
TILE = "announce(notes, stage, expert, row, end, col)"
NO_TILE = "announce(notes, acquire(ring, step), -1, 0, 0, 0)"
LEAVE_SLICE = "leave_last(ring, step, index > 0)"
SLICE_ARGS = "scale, dh, a_scaled, end, first, col + i * SLICE, limit, alpha, ring, step"
ASK = "ask_for_tile(num_tiles, next_index < total)"
FREE, TAKEN = "stage = acquire(ring, step)\n        ", f"stage = {TAKE}\n        "
WEIGHTS = "announce(notes, stage, expert"
ANOTHER = "stored twice|past the tensor|outside the tensor"
NOTE = f"{PROTOCOL}|{NUMBERS}|{ANOTHER}"
FAULTS: dict[str, Fault] = {
    "a stage is filled while it is read": ("acquire", "mbarrier.wait(empty.", "(empty.", PROTOCOL),
    "the producer's first phase": ("acquire", " & 1) ^ 1)", " & 1))", PROTOCOL),
    "a stage is read before it is full": ("start_product", AWAIT, TAKE, SOONER),
    "the consumer's phase": ("await_full", "(step // ready.shape[0]) & 1)", "step & 1)", SOONER),
    "a stage is left with its product in flight": (
        "multiply",
        WAIT.format(1) + LEAVE_IN_LOOP,
        WAIT.format(2) + LEAVE_IN_LOOP,
        NUMBERS,
    ),
    "a stage is left that nobody took": ("multiply", LEAVE_OWED, "leave_last(ring, step, True)", PROTOCOL),
    "a stage that is owed is not left": ("multiply", LEAVE_OWED, "leave_last(ring, step, False)", "deadlock"),
    "the last stage is not left": ("multiply", f"{WAIT.format(0)}    {LEAVE}", WAIT.format(0), "deadlock"),
    "a stage is left while a tile is stored from it": ("multiply", "tma.store_wait(0)", "pass", NUMBERS),
    "copies are announced before they arrive": ("publish_copies", "(LAG)", "(LAG + 1)", f"{FENCE}|{NUMBERS}|{ANOTHER}"),
    "copies without a fence": ("publish_copies", "fence_async_shared()", "pass", FENCE),
    "the last copies": ("publish_last_copies", "async_copy.wait_group(0)", "pass", UNFINISHED),
    "nobody passes by": ("pass_by", PASS_BY, "pass", "deadlock"),
    "stages are passed by twice": ("pass_by", PASS_BY, f"{PASS_BY}; {PASS_BY}", EITHER),
    "stages are passed by before they are full": ("pass_by", AWAIT, TAKE, SOONER),
    "passing by does not leave what is owed": ("pass_by", LEAVE, "pass", "deadlock"),
    "passing by leaves while a tile is stored": ("pass_by", "tma.store_wait(0)", "pass", NUMBERS),
    "a store without a fence": ("start_store", "fence_async_shared()", "pass", FENCE),
    "fewer bytes than come": ("load_blocks", "COUNT * rows", "1 * rows", "more bytes"),
    "more bytes than come": ("load_blocks", "COUNT * rows", "3 * rows", "deadlock"),
    "four blocks are three and one": ("block_tile", "(left == BLOCKS + 1)", "(left == 99)", "stored twice"),
    "nobody moves up": ("block_tile", "gl.where(takes_one, row - GROUP_M, row)", "row", NUMBERS),
    "F1 overwrites a slice of h": ("store_h", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "F1 overwrites a slice of a": ("store_act", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "F1 ends before its stores": ("finish_act", "tma.store_wait(0)", "pass", UNFINISHED),
    "nobody waits for a turn": ("finish_rows", "mbarrier.wait(order.index(GROUP), ", "(", f"{PROTOCOL}|{ANOTHER}"),
    "nobody gives a turn": ("multiply_blocks", GIVE, "pass", PROTOCOL),
    "a turn is given at every step": (
        "multiply_blocks",
        "        step += 1",
        f"        step += 1; {GIVE}",
        f"{PROTOCOL}|{ANOTHER}",
    ),
    "nobody comes unasked": ("finish_rows", "phase = 1 - GROUP", "phase = 0", PROTOCOL),
    "all come unasked": ("finish_rows", "phase = 1 - GROUP", "phase = 1", PROTOCOL),
    "turns do not alternate": ("finish_rows", "phase ^= 1", "pass", PROTOCOL),
    "a consumer takes the other's stages": ("finish_rows", "step += steps", "pass", PROTOCOL),
    "a full stage is read early": ("start_products", AWAIT, TAKE, PROTOCOL),
    "a stage is left with its products in flight": (
        "multiply_blocks",
        WAIT_BLOCKS,
        WAIT_BLOCKS.replace("COUNT)", "COUNT + 1)"),
        NUMBERS,
    ),
    "F2 has no third block": ("finish_rows", "count > 2", "count > 3", NUMBERS),
    "F2 overwrites a slice": ("store_block", "tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)", NUMBERS),
    "F2 ends before its stores": ("finish_rows", "tma.store_wait(0)", "pass", UNFINISHED),
    "F2 stores past the expert's end": ("store_block", "end, last,", "end + 64, last - 64,", "stored twice"),
    "a note is left before the stage is free, F1": ("gather_rows", FREE + TILE, TAKEN + TILE, NOTE),
    "a note is left before the stage is free, F2": ("contiguous_blocks", "acquire(ring, step)", TAKE, NOTE),
    "a note is left before the stage is free, B2": ("gather_along_k", FREE + WEIGHTS, TAKEN + WEIGHTS, NOTE),
    "another tile is announced": ("gather_rows", TILE, TILE.replace("row", "next_row"), f"{NUMBERS}|{ANOTHER}"),
    "nobody says that no tile is left": ("gather_rows", NO_TILE, "acquire(ring, step)", "deadlock"),
    "a tile is taken twice": ("take_tile", "number + 2 * gl", "number + 1 * gl", "stored twice"),
    "nobody asks for a tile": ("gather_rows", ASK, "ask_for_tile(num_tiles, False)", f"{NUMBERS}|{ANOTHER}"),
    "another row's score": ("gather_rows", "gl.arange(0, TILE_M, EACH)", "0 * gl.arange(0, TILE_M, EACH)", NUMBERS),
    "no stage for an expert without rows": (
        "gather_along_k",
        "step += 1\n        upper",
        "pass\n        upper",
        PROTOCOL,
    ),
    "nobody loads h": ("gather_rows", "step = load_h(ring, step, h, row, col, BN, GATE_UP)", "pass", "deadlock"),
    "h of the next tile": ("gather_rows", "step, h, row, col, BN", "step, h, next_row, next_col, BN", NUMBERS),
    "h overwrites an operand": ("load_h", "acquire(ring, step)", "step % ready.shape[0]", EITHER),
    "fewer bytes than come of h": ("load_h", "GROUPS * BLOCKS * h", "1 * h", "more bytes"),
    "more bytes than come of h": ("load_h", "GROUPS * BLOCKS * h", "3 * h", "deadlock"),
    "nobody announces h": ("load_h", "publish_copies(ring, step)", "pass", "deadlock"),
    "all of h in one stage": ("load_h", "        step += 1", "        pass", PROTOCOL),
    "h of the first consumer's rows": ("load_h", "row + group * GROUP_M", "row", NUMBERS),
    "h of the first slice": ("load_h", "col + i * SLICE", "col", NUMBERS),
    "B1 reads h before it is there": ("finish_slice", AWAIT, TAKE, f"{EITHER}|nobody waited for"),
    "B1's slice in the stage of another": (
        "finish_act_grad",
        f"slices[i], {SLICE_ARGS} + i,",
        f"slices[i], {SLICE_ARGS},",
        PROTOCOL,
    ),
    "B1's consumers in one place": ("finish_slice", "index(GROUP * BLOCKS),", "index(0),", FENCE),
    "B1 leaves a stage twice": ("finish_slice", LEAVE_SLICE, f"{LEAVE}; {LEAVE}", PROTOCOL),
    "B1 leaves no stage": ("finish_slice", LEAVE_SLICE, "pass", "deadlock"),
    "B1 leaves an operand's stage": ("finish_slice", LEAVE_SLICE, LEAVE, f"{SOONER}|{NUMBERS}"),
    "B1 leaves a stage while it is stored": ("finish_slice", "tma.store_wait(0)", "pass", NUMBERS),
    "B1 waits for a_scaled only": ("finish_slice", "tma.store_wait(0)", "tma.store_wait(1)", NUMBERS),
    "B1 stores without a fence": ("finish_slice", "fence_async_shared()", "pass", FENCE),
    "B1 owes nothing": ("finish_act_grad", "owes = True", "pass", "deadlock"),
    "B1 pays twice": ("finish_act_grad", "            owes = False", "            pass", EITHER),
    "B1 passes no slices by": ("finish_act_grad", "steps + BN // SLICE", "steps", f"{SOONER}|{ANOTHER}"),
    "B1 counts one slice": ("finish_act_grad", "step += BN // SLICE", "step += 1", f"{SOONER}|{ANOTHER}"),
    "B1 ends before its stores": ("finish_act_grad", "tma.store_wait(0)", "pass", UNFINISHED),
    "B2 overwrites a slice": ("finish_weights", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "B2 ends before its stores": ("finish_weights", "tma.store_wait(0)", "pass", UNFINISHED),
}
OF_LAYOUTS: dict[str, tuple[Case, Fault]] = {
    "the parts are the halves of a tile": (TURNED, ("gate_up_slices", "elif RIGHT_BY_N", "elif True", NUMBERS)),
    "F1 stores the parts as halves": (TURNED, ("store_h", "elif RIGHT_BY_N", "elif True", NUMBERS)),
    "F1 has the halves of a tile for parts": (SWIGLU, ("gate_up_slices", "elif RIGHT_BY_N", "elif False", NUMBERS)),
    "up's weight only": (TURNED, ("load_weight", "0, k, col", "1, k, col", NUMBERS)),
    "fewer bytes than come of a weight": (TURNED, ("gathered_steps", "weight.block", "-weight.block", "more bytes")),
    "more bytes than come of a weight": (TURNED, ("gathered_steps", "weight.block", "2 * weight.block", "deadlock")),
    "half a part for a tile": (TURNED, ("gather_rows", "cdiv(width_out, BN)", "cdiv(width_out, 2 * BN)", NUMBERS)),
    "F1 takes halves for pairs": (
        INTERLEAVED,
        ("gate_up_slices", "pairs_of(acc, BN)", "(acc[:, : BN // 2], acc[:, BN // 2 :])", NUMBERS),
    ),
    "F1 swaps the columns of a pair": (INTERLEAVED, ("gate_up_slices", "gate, up =", "up, gate =", NUMBERS)),
    "F1 stores a where h is": (INTERLEAVED, ("store_act", "col = col // 2", "pass", f"{NUMBERS}|{ANOTHER}")),
    "F1 sees half of h": (INTERLEAVED, ("up_proj_act_kernel", "2 * n if GATE", "n if GATE", NUMBERS)),
    "F1 stores the slope": (UNGATED, ("store_act", "value, _slope", "_slope, value", NUMBERS)),
    "F1 stores half a tile": (UNGATED, ("store_act", "BN if GATE", "BN // 2 if GATE", NUMBERS)),
    "nobody adds the bias": (BIAS, ("finish_act", "acc += spread", "spread", NUMBERS)),
    "the bias of another expert": (BIAS, ("finish_act", "bias(bias, expert", "bias(bias, 0 * expert", NUMBERS)),
    "the bias of the first columns": (BIAS, ("load_tile_bias", "inside = col +", "inside =", NUMBERS)),
    "the bias of the gate twice": (BIAS, ("load_tile_bias", "// RUN % 2", "// RUN % 1", NUMBERS)),
    "the bias of halves for parts": (
        replace(BIAS, turned=True),
        ("load_tile_bias", "BN // 2 if RIGHT_BY_N else SLICE", "BN // 2", NUMBERS),
    ),
    "the bias past the last column": (
        replace(BIAS, gate_up="interleaved"),
        ("load_bias", ", mask=column < width, other=0.0", "", "past the tensor"),
    ),
    "no bias past half of h": (
        replace(BIAS, gate_up="interleaved"),
        ("load_tile_bias", "col + column, 2 * n", "col + column, n", NUMBERS),
    ),
    "F2 announces another expert": (
        BIAS,
        ("contiguous_blocks", "4 * expert + count", "4 * next_expert + count", NUMBERS),
    ),
    "F2 adds another expert's bias": (BIAS, ("finish_rows", "count // 4,", "count // 8,", NUMBERS)),
    "F2 adds the first columns' bias": (BIAS, ("finish_rows", "col + gl", "gl", NUMBERS)),
    "F2 adds the left half's bias": (BIAS, ("store_block", "j * SLICE, SLICE", "0, SLICE", NUMBERS)),
    "F2's consumers share a bias": (
        replace(BIAS, hidden_size=264, intermediate_size=64),
        ("finish_rows", "bias_staging.index(GROUP)", "bias_staging.index(0)", NUMBERS),
    ),
    "nobody loads the second block of h": (
        INTERLEAVED,
        ("load_h", "static_range(BLOCKS)", "static_range(1)", "deadlock"),
    ),
    "h's blocks in one place": (INTERLEAVED, ("load_h", "BLOCKS + block)", "BLOCKS)", NUMBERS)),
    "the same block of h twice": (INTERLEAVED, ("load_h", " + block * SLICE", "", NUMBERS)),
    "B1 has one block": (INTERLEAVED, ("finish_slice", "BLOCKS + BLOCKS - 1", "BLOCKS", NUMBERS)),
    "nobody stores dh's second block": (
        INTERLEAVED,
        ("finish_slice", 'if GATE_UP == "interleaved":\n        store', "if False:\n        store", NUMBERS),
    ),
    "dh's blocks in one place": (INTERLEAVED, ("finish_slice", "* col + SLICE", "* col", "stored twice")),
    "B1 takes halves for pairs": (
        INTERLEAVED,
        ("half_pairs_grad", "pairs_of(buffer.load(both), SLICE)", "halves(buffer.load(both), GROUP_M, SLICE)", NUMBERS),
    ),
    "B1 stores halves for pairs": (
        INTERLEAVED,
        ("half_pairs_grad", "dtype)).reshape", "dtype)).permute([0, 2, 1]).reshape", NUMBERS),
    ),
    "B1 joins the left half and itself": (INTERLEAVED, ("pairs_grad", "right_a, da", "left_a, da", NUMBERS)),
    "B1's gradient without the score": (UNGATED, ("finish_slice", "score[:, None] * slope", "slope", NUMBERS)),
    "B1 stores no gradient": (UNGATED, ("finish_slice", "    buffer.store", "    ", NUMBERS)),
    "B1 joins pairs, not halves": (CLAMPED, ("joined", ".permute([0, 2, 1])", "", NUMBERS)),
    "B1 takes the left half twice": (
        CLAMPED,
        ("halves_grad", "gate_buffer.slice(HALF", "gate_buffer.slice(0", NUMBERS),
    ),
    "B1 takes more than half a slice": (
        CLAMPED,
        ("halves_grad", "up_buffer.slice(HALF, HALF", "up_buffer.slice(HALF, SLICE", "outside the buffer"),
    ),
    "B1's loop keeps to a slice": (CLAMPED, ("finish_act_grad", "da, next_da, third_da = ", "_ = ", NUMBERS)),
    "B1's loop stays in a stage": (
        CLAMPED,
        (
            "finish_act_grad",
            f"                        da, {SLICE_ARGS} + i,",
            f"                        da, {SLICE_ARGS},",
            PROTOCOL,
        ),
    ),
}

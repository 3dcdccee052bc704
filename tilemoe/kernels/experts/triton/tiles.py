"""The row tiles that the grouped GEMMs walk: lists on the device, built from row_start_of_expert without a host sync.

E experts · R_max static row capacity · C = ceil(R_max / tile_m) + E capacity of the list
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.plan import RoutingPlan, TileList
from tilemoe.runtime.launch import Launch, ceil_div, int32_vectors, launch_of, power_of_two

_BLOCK = 128
_FEWEST_EXPERTS = 128  # smallest BLOCK_E: layers with at most this many experts share one binary


@triton.jit
def tile_place(index, row_tiles, column_tiles, BAND: tl.constexpr):
    """(row tile, column tile) of tile ``index`` < row_tiles * column_tiles, column tiles innermost.

    BAND: the column tiles of a band, whose row tiles all come before the next band; 0: none. See `configs.band_tiles`.
    """
    if BAND == 0:
        row_tile, column_tile = index // column_tiles, index % column_tiles
    else:
        first = index // (row_tiles * BAND) * BAND
        of_band, columns = index - row_tiles * first, tl.minimum(BAND, column_tiles - first)
        row_tile, column_tile = of_band // columns, first + of_band % columns
    return row_tile, column_tile


def listed_tiles(plan: RoutingPlan, tile_m: int, *ahead: int) -> TileList:
    """The plan's list of tiles of ``tile_m`` rows, made at first use and kept in the plan.

    ``ahead``: further tile heights that will be needed; the same launch lists them.
    """
    known = plan.tiles
    if tile_m not in known:
        missing = [rows for rows in dict.fromkeys((tile_m, *ahead)) if rows not in known]
        launch, lists = tile_lists_launch(plan, *missing)
        launch.run()
        known.update(zip(missing, lists, strict=True))
    return known[tile_m]


def tile_lists_launch(plan: RoutingPlan, *tile_ms: int) -> tuple[Launch, list[TileList]]:
    """(launch, lists): the launch fills a TileList for each of the tile heights ``tile_ms``, one or two.

    Each expert's rows are cut into tiles of that height; the last may be shorter. The launch also sets the plan's
    `tile_counter` to 0; the first call for a plan allocates it.
    """
    assert len(tile_ms) in (1, 2), "what the kernel takes"
    start = plan.row_start_of_expert
    capacities = [ceil_div(plan.capacity, tile_m) + plan.num_experts for tile_m in tile_ms]
    of_lists = (length for capacity in capacities for length in (capacity, capacity, capacity, 1))
    *vectors, counter = int32_vectors(start, *of_lists, 1)
    if plan.tile_counter is None:
        object.__setattr__(plan, "tile_counter", counter)  # the plan is a frozen dataclass
    lists = [TileList(*vectors[first : first + 4]) for first in range(0, len(vectors), 4)]
    experts = max(_FEWEST_EXPERTS, power_of_two(plan.num_experts))
    heights = (tile_ms[0], (*tile_ms, 0)[1])
    args = (start, *lists[0], *lists[-1], plan.tile_counter, plan.num_experts, *heights)
    return launch_of(tile_lists_kernel, (plan.num_experts,), args, {"BLOCK_E": experts, "BLOCK": _BLOCK}), lists


@triton.jit
def tile_lists_kernel(
    row_start_of_expert,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    second_expert_of_tile,
    second_row_of_tile,
    second_end_of_tile,
    second_num_tiles,
    tile_counter,
    num_experts,
    tile_m,
    second_tile_m,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each CTA lists the tiles of one expert, and fills a second list if second_tile_m is not 0.

    Neither height is a compile-time constant, so that all launches share one binary.
    """
    others = tl.arange(0, BLOCK_E)
    starts = tl.load(row_start_of_expert + others, mask=others < num_experts, other=0)
    ends = tl.load(row_start_of_expert + others + 1, mask=others < num_experts, other=0)
    if tl.program_id(0) == 0:
        tl.store(tile_counter, 0)
    row = tl.load(row_start_of_expert + tl.program_id(0))
    end = tl.load(row_start_of_expert + tl.program_id(0) + 1)
    first = (expert_of_tile, row_of_tile, end_of_tile, num_tiles)
    _list_own(starts, ends, row, end, first, num_experts, tile_m, BLOCK_E, BLOCK)
    if second_tile_m > 0:
        second = (second_expert_of_tile, second_row_of_tile, second_end_of_tile, second_num_tiles)
        _list_own(starts, ends, row, end, second, num_experts, second_tile_m, BLOCK_E, BLOCK)


@triton.jit
def _list_own(starts, ends, row, end, tiles, num_experts, tile_m, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """Count the tiles of the experts before this CTA's, then list its own, which cover the rows ``row`` to ``end``."""
    expert_of_tile, row_of_tile, end_of_tile, num_tiles = tiles
    expert = tl.program_id(0)
    before = tl.sum(tl.where(tl.arange(0, BLOCK_E) < expert, tl.cdiv(ends - starts, tile_m), 0))
    mine = tl.cdiv(end - row, tile_m)
    for first in range(0, mine, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(expert_of_tile + before + slot, expert, mask=slot < mine)
        tl.store(row_of_tile + before + slot, row + slot * tile_m, mask=slot < mine)
        tl.store(end_of_tile + before + slot, end, mask=slot < mine)
    if expert == num_experts - 1:
        tl.store(num_tiles, before + mine)

"""The list of row tiles that the grouped GEMMs walk, built on the device without reading a count back.

E experts · R_max row capacity · C = ceil(R_max / tile_m) + E capacity of the list
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.triton.launch import Launch, int32_vectors, power_of_two
from tilemoe.routing.plan import RoutingPlan

_BLOCK = 128


class TileList(NamedTuple):
    """Tiles in the order of the rows; entries past ``num_tiles`` are unspecified. All int32.

    expert_of_tile (C), row_of_tile (C) its first row, num_tiles (1).
    """

    expert_of_tile: Tensor
    row_of_tile: Tensor
    num_tiles: Tensor

    @property
    def capacity(self) -> int:
        """C: the most tiles that there can be."""
        return self.expert_of_tile.shape[0]

    def args(self, plan: RoutingPlan) -> dict[str, Tensor]:
        """The arguments by which a kernel walks the list: where each tile lies, and where its expert's rows end."""
        return {**self._asdict(), "row_start_of_expert": plan.row_start_of_expert}


def tile_list(plan: RoutingPlan, tile_m: int) -> TileList:
    """Cut each expert's rows into tiles of ``tile_m``, the last of them shorter."""
    launch, tiles = tile_list_launch(plan, tile_m)
    launch.run()
    return tiles


def tile_list_launch(plan: RoutingPlan, tile_m: int) -> tuple[Launch, TileList]:
    """The launch that fills a TileList, and the list."""
    capacity = -(-plan.capacity // tile_m) + plan.num_experts
    start = plan.row_start_of_expert
    tiles = TileList(*int32_vectors(start, capacity, capacity, 1))
    launch = Launch(
        tile_list_kernel,
        (plan.num_experts,),
        {
            "row_start_of_expert": start,
            "expert_of_tile": tiles.expert_of_tile,
            "row_of_tile": tiles.row_of_tile,
            "num_tiles": tiles.num_tiles,
            "num_experts": plan.num_experts,
        },
        {"TILE_M": tile_m, "BLOCK_E": max(16, power_of_two(plan.num_experts)), "BLOCK": _BLOCK},
        num_warps=4,
        num_stages=1,
    )
    return launch, tiles


@triton.jit
def tile_list_kernel(
    row_start_of_expert,
    expert_of_tile,
    row_of_tile,
    num_tiles,
    num_experts,
    TILE_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert: count the tiles before it, then write its own."""
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK_E)
    starts = tl.load(row_start_of_expert + others, mask=others < num_experts, other=0)
    ends = tl.load(row_start_of_expert + others + 1, mask=others < num_experts, other=0)
    tiles_of_other = tl.cdiv(ends - starts, TILE_M)
    before = tl.sum(tl.where(others < expert, tiles_of_other, 0))
    row = tl.load(row_start_of_expert + expert)
    mine = tl.cdiv(tl.load(row_start_of_expert + expert + 1) - row, TILE_M)
    for first in range(0, mine, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(expert_of_tile + before + slot, expert, mask=slot < mine)
        tl.store(row_of_tile + before + slot, row + slot * TILE_M, mask=slot < mine)
    if expert == num_experts - 1:
        tl.store(num_tiles, before + mine)

"""What plan building and combine promise on a GPU beyond their values: no compilation for a new T, no host sync.

T tokens · d hidden_size · K experts per token · E experts
"""

from __future__ import annotations

import pytest
import torch
from gpu_layers import no_host_sync

from tilemoe.kernels.experts.triton.combine import combine, combine_kernel
from tilemoe.kernels.experts.triton.tiles import listed_tiles, tile_lists_kernel
from tilemoe.kernels.plan import triton as triton_plan
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk

pytestmark = pytest.mark.gpu

KERNELS = (
    triton_plan.count_kernel,
    triton_plan.block_start_kernel,
    triton_plan.row_start_kernel,
    triton_plan.place_kernel,
    plan_small.plan_small_kernel,
    tile_lists_kernel,
    combine_kernel,
)


def use(ids: torch.Tensor, rows: torch.Tensor) -> RoutingPlan:
    plan = plan_topk(ids, 64)
    listed_tiles(plan, 128)
    listed_tiles(plan, 64, 192)
    rows, s = rows[: plan.capacity], torch.ones(plan.capacity, device="cuda")
    out = rows.new_empty(plan.num_tokens, rows.shape[1])
    combine(rows, s, plan, out)
    combine(rows, None, plan, out)
    return plan


def test_other_numbers_of_tokens_compile_nothing() -> None:
    def compiled() -> int:
        return sum(len(cache[0]) for kernel in KERNELS for cache in kernel.device_caches.values())

    rows = torch.randn(8 * 4096, 128, device="cuda", dtype=torch.bfloat16)
    counts = []
    for tokens in (4096, 512, 1, 1000, 1001, 77):  # the first two meet both builders
        use(torch.randint(0, 64, (tokens, 8), device="cuda"), rows)
        counts.append(compiled())
    assert counts[1] >= len(KERNELS)
    assert counts[1:] == counts[1:2] * 5


def test_nothing_waits_for_the_gpu() -> None:
    ids = torch.randint(0, 64, (500, 8), device="cuda")
    rows = torch.randn(4000, 128, device="cuda", dtype=torch.bfloat16)
    use(ids, rows)
    with no_host_sync():
        use(ids, rows)


def test_a_captured_plan_follows_its_ids() -> None:
    ids = torch.randint(0, 64, (300, 8), device="cuda")
    rows = torch.randn(2400, 128, device="cuda", dtype=torch.bfloat16)
    use(ids, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = use(ids, rows)
    ids.copy_(torch.randint(0, 70, (300, 8), device="cuda"))
    graph.replay()
    expected = plan_topk(ids, 64)
    for name in ("token_of_row", "pair_of_row", "row_of_pair", "row_start_of_expert"):
        assert torch.equal(getattr(plan, name), getattr(expected, name)), name

"""What is sent between ranks, made by Triton's kernels, is to the bit what PyTorch's make: on a GPU and in
Triton's interpreter.

T tokens · d model width · K experts per token · E experts · W ranks · P pairs
"""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE

from tilemoe.kernels.expert_parallel import torch as by_torch
from tilemoe.kernels.expert_parallel import triton as by_triton
from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.kernels.experts.formats.fp8 import words_of_row
from tilemoe.kernels.plan.triton import MAX_EXPERTS
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk

FP32, FP64 = torch.float32, torch.float64

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def ids_of(rank: int, tokens: int, per_token: int, experts: int) -> Tensor:
    """(T, K) int64, some of them sentinels; the tokens of rank 1 know the first experts alone."""
    generator = torch.Generator().manual_seed(rank)
    highest = experts + 1 + experts // 8 if rank != 1 else max(1, experts // 4)
    return torch.randint(0, highest, (tokens, per_token), generator=generator).to(DEVICE)


def in_pairs(ids: Tensor, experts: int) -> RoutingPlan:
    """The same as pairs in another order, of which some tokens have none."""
    token = torch.arange(ids.shape[0], device=DEVICE).repeat_interleave(ids.shape[1])
    return plan_pairs(token.flip(0), ids.flatten().flip(0), ids.shape[0], experts)


def routed_of(plan: RoutingPlan, ranks: int, here: int) -> Routed:
    arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
    return Routed(*arrays, plan.num_tokens, ranks, here)


def sent(kernels: ModuleType, routed: Routed, x: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """(tokens and pairs for each rank, and what `place_sent` gives, cut to what there is)."""
    sizes, before = kernels.count_sent(routed)
    token_of_copy, copy_of_token, first, words, position, copies = kernels.place_sent(x, scores, sizes, before, routed)
    (tokens, pairs), others = sizes[0].sum(0).tolist(), [r for r in range(routed.ranks) if r != routed.here]
    away = int(sizes[0, others, 0].sum())
    return sizes[0], token_of_copy[:tokens], copy_of_token, first, words[:pairs], position[:pairs], copies[:away]


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype, index
        assert torch.equal(a, b), index


SHAPES = [(FP32, 1, 1, 1, 1), (FP64, 5, 3, 8, 2), (FP32, 70, 2, 8, 4), (FP64, 66, 8, 24, 3), (FP32, 20, 2, 64, 64)]
SHAPES += [(FP64, 131, 1, 6, 2)]


@pytest.mark.parametrize(("dtype", "tokens", "per_token", "experts", "ranks"), SHAPES)
def test_what_is_sent(dtype: torch.dtype, tokens: int, per_token: int, experts: int, ranks: int) -> None:
    for here in sorted({ranks // 2, ranks - 1}):
        ids = ids_of(here, tokens, per_token, experts)
        x = torch.randn(tokens, 40, device=DEVICE, dtype=dtype)
        scores = torch.rand(tokens * per_token, device=DEVICE, dtype=dtype)
        for plan in (plan_topk(ids, experts), in_pairs(ids, experts)):
            routed = routed_of(plan, ranks, here)
            found = [sent(kernels, routed, x, scores) for kernels in (by_triton, by_torch)]
            assert_same(*found)
            assert_each_token_once(found[0], ids, x, routed)


def assert_each_token_once(found: tuple[Tensor, ...], ids: Tensor, x: Tensor, routed: Routed) -> None:
    sizes, token_of_copy, _, first, _, _, copies = found
    experts = routed.experts_per_rank * routed.ranks
    at = [{row // routed.experts_per_rank for row in line if row < experts} for line in ids.tolist()]
    order = [r for r in range(routed.ranks) if r != routed.here] + [routed.here]
    expected = [token for rank in order for token, there in enumerate(at) if rank in there]
    assert token_of_copy.tolist() == expected
    assert torch.equal(torch.diff(first), sizes[order, 0])
    assert sizes[:, 1].sum() == (ids < experts).sum()
    assert torch.equal(copies, x[token_of_copy.long()][: len(copies)])


@pytest.mark.parametrize(("dtype", "tokens", "per_token", "experts", "ranks"), SHAPES)
def test_what_has_come(dtype: torch.dtype, tokens: int, per_token: int, experts: int, ranks: int) -> None:
    """Ranks of other numbers of tokens, one with none; each plans what all have sent it."""
    leave = []
    for rank in range(ranks):
        count = 0 if rank == 2 else tokens + rank
        plan = plan_topk(ids_of(rank, count, per_token, experts), experts)
        generator = torch.Generator().manual_seed(rank)
        scores = torch.rand(count * per_token, generator=generator, dtype=dtype).to(DEVICE)
        leave.append(sent(by_torch, routed_of(plan, ranks, rank), scores[:, None][:count].repeat(1, 3), scores))
    for here in sorted({0, ranks // 2, ranks - 1}):
        parts, sizes = [], torch.stack([leave[rank][0][here] for rank in range(ranks)])
        for rank in [r for r in range(ranks) if r != here] + [here]:
            order = [r for r in range(ranks) if r != rank] + [rank]
            first = sum(int(leave[rank][0][r, 1]) for r in order[: order.index(here)])
            parts.append(leave[rank][4][first : first + int(sizes[rank, 1])])
        words = torch.cat(parts)
        if len(words):
            assert_planned(words, torch.stack((torch.zeros_like(sizes), sizes)), here, experts // ranks)


def assert_planned(words: Tensor, sizes: Tensor, here: int, experts: int) -> None:
    tokens = int(sizes[1, :, 0].sum())
    found = [kernels.plan_received(words, sizes, here, experts, tokens) for kernels in (by_triton, by_torch)]
    assert_same(*found)
    *plan, scores = found[0]
    token = torch.repeat_interleave(torch.diff(plan[3]))
    expected = plan_pairs(token, words[:, -1] % experts, tokens, experts)
    fields = (expected.token_of_row, expected.pair_of_row, expected.row_of_pair, expected.pair_start_of_token)
    for got, want in zip(plan, (*fields, expected.row_start_of_expert, expected.rows_per_expert), strict=True):
        assert want is not None
        assert torch.equal(got, want)
    assert bool(((scores >= 0) & (scores < 1)).all())


def test_columns_of_a_wider_x_and_what_lies_past_the_last_pair() -> None:
    x, scores = torch.randn(9, 50, device=DEVICE)[:, 3:40], torch.rand(18, device=DEVICE)
    plan = in_pairs(ids_of(0, 9, 2, 8), 8)
    assert plan.pair_start_of_token is not None
    end = int(plan.pair_start_of_token[-1])
    longer = torch.cat((plan.row_of_pair[:end], torch.full((18 - end + 3,), 7777, dtype=torch.int32, device=DEVICE)))
    routed = routed_of(replace(plan, row_of_pair=longer), 2, 1)
    assert_same(sent(by_triton, routed, x, scores), sent(by_torch, routed, x, scores))


@pytest.mark.parametrize("width", [128, 1536])
def test_rows_that_are_quantised(width: int) -> None:
    """Lines of words, as FP8 tokens cross: what a copy holds is a token's line, to the bit."""
    ids = ids_of(2, 66, 4, 24)
    x = torch.randint(-(2**31), 2**31, (66, words_of_row(width)), dtype=torch.int32, device=DEVICE)
    scores, routed = torch.rand(264, device=DEVICE), routed_of(plan_topk(ids, 24), 3, 1)
    found = [sent(kernels, routed, x, scores) for kernels in (by_triton, by_torch)]
    assert_same(*found)
    assert_each_token_once(found[0], ids, x, routed)


@pytest.mark.parametrize("width", [1, 37])
def test_an_x_whose_columns_are_apart(width: int) -> None:
    scores, routed = torch.rand(18, device=DEVICE), routed_of(plan_topk(ids_of(0, 9, 2, 8), 8), 2, 1)
    for x in (torch.randn(width, 9, device=DEVICE).t(), torch.randn(9, 1, device=DEVICE).expand(9, width)):
        assert_same(sent(by_triton, routed, x, scores), sent(by_torch, routed, x, scores))


def test_what_the_kernels_do_not_serve() -> None:
    assert by_triton.why_unsupported(1, 1, 1, 1) is None
    assert by_triton.why_unsupported(1000, 8000, MAX_EXPERTS, by_triton.MAX_RANKS) is None
    for case in ((0, 0, 8, 2), (4, 0, 8, 2), (2**30, 2**30, 8, 2), (1, 2**31, 8, 2), (1, 1, 8192, 2), (1, 1, 130, 65)):
        assert by_triton.why_unsupported(*case), case

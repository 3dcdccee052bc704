"""What is sent between ranks, made by Triton's kernels, is to the bit what PyTorch's make: on a GPU and in
Triton's interpreter.

T tokens · K experts per token · E experts · W ranks · P pairs
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


def routed_of(plan: RoutingPlan, ranks: int) -> Routed:
    arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
    return Routed(*arrays, plan.num_tokens, ranks)


def sent(kernels: ModuleType, routed: Routed, scores: Tensor) -> tuple[Tensor, ...]:
    """(tokens and pairs for each rank, and what `place_sent` writes and gives, cut to what there is)."""
    sizes = torch.empty(routed.ranks, 2, dtype=torch.int32, device=DEVICE)
    before, pairs = kernels.count_sent(routed, sizes), routed.row_of_pair.shape[0]
    token_of_copy = sizes.new_empty(routed.ranks * routed.num_tokens)
    words = sizes.new_empty(pairs, 1 + scores.element_size() // 4)
    copy_of_token, position = kernels.place_sent(scores, sizes, before, token_of_copy, words, routed)
    tokens, pairs = sizes.sum(0).tolist()
    return sizes, token_of_copy[:tokens], copy_of_token, words[:pairs], position[:pairs]


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype, index
        assert torch.equal(a, b), index


SHAPES = [(FP32, 1, 1, 1, 1), (FP64, 5, 3, 8, 2), (FP32, 70, 2, 8, 4), (FP64, 66, 8, 24, 3), (FP32, 20, 2, 64, 64)]
SHAPES += [(FP64, 131, 1, 6, 2)]


@pytest.mark.parametrize(("dtype", "tokens", "per_token", "experts", "ranks"), SHAPES)
def test_what_is_sent(dtype: torch.dtype, tokens: int, per_token: int, experts: int, ranks: int) -> None:
    for rank in (1, 2):
        ids = ids_of(rank, tokens, per_token, experts)
        scores = torch.rand(tokens * per_token, device=DEVICE, dtype=dtype)
        for plan in (plan_topk(ids, experts), in_pairs(ids, experts)):
            found = [sent(kernels, routed_of(plan, ranks), scores) for kernels in (by_triton, by_torch)]
            assert_same(*found)
            assert_each_token_once(found[0], ids, experts // ranks)


def assert_each_token_once(found: tuple[Tensor, ...], ids: Tensor, experts_per_rank: int) -> None:
    sizes, token_of_copy, copy_of_token, _, _ = found
    ranks = len(sizes)
    experts = experts_per_rank * ranks
    at = [{row // experts_per_rank for row in line if row < experts} for line in ids.tolist()]
    assert token_of_copy.tolist() == [token for rank in range(ranks) for token, there in enumerate(at) if rank in there]
    assert sizes[:, 0].tolist() == [sum(rank in there for there in at) for rank in range(ranks)]
    assert sizes[:, 1].sum() == (ids < experts).sum()
    is_sent = copy_of_token >= 0
    token = torch.arange(len(ids), device=DEVICE).repeat_interleave(ranks)
    assert torch.equal(token_of_copy[copy_of_token[is_sent].long()].long(), token[is_sent])


@pytest.mark.parametrize(("dtype", "tokens", "per_token", "experts", "ranks"), SHAPES)
def test_what_has_come(dtype: torch.dtype, tokens: int, per_token: int, experts: int, ranks: int) -> None:
    """Ranks of other numbers of tokens, one with none; each plans what all have sent it."""
    leave = []
    for rank in range(ranks):
        count = 0 if rank == 2 else tokens + rank
        plan = plan_topk(ids_of(rank, count, per_token, experts), experts)
        generator = torch.Generator().manual_seed(rank)
        scores = torch.rand(count * per_token, generator=generator, dtype=dtype).to(DEVICE)
        leave.append(sent(by_torch, routed_of(plan, ranks), scores))
    for here in sorted({0, ranks // 2, ranks - 1}):
        parts, sizes = [], torch.stack([leave[rank][0][here] for rank in range(ranks)])
        for rank in range(ranks):
            first = int(leave[rank][0][:here, 1].sum())
            parts.append(leave[rank][3][first : first + int(sizes[rank, 1])])
        words = torch.cat(parts)
        if len(words):
            assert_planned(words, sizes, experts // ranks)


def assert_planned(words: Tensor, came: Tensor, experts: int) -> None:
    tokens = int(came[:, 0].sum())
    found = [kernels.plan_received(words, came, experts, tokens) for kernels in (by_triton, by_torch)]
    assert_same(*found)
    *plan, scores = found[0]
    token = torch.repeat_interleave(torch.diff(plan[3]))
    expected = plan_pairs(token, words[:, -1] % experts, tokens, experts)
    fields = (expected.token_of_row, expected.pair_of_row, expected.row_of_pair, expected.pair_start_of_token)
    for got, want in zip(plan, (*fields, expected.row_start_of_expert, expected.rows_per_expert), strict=True):
        assert want is not None
        assert torch.equal(got, want)
    assert bool(((scores >= 0) & (scores < 1)).all())


def test_what_lies_past_the_last_pair() -> None:
    scores = torch.rand(18, device=DEVICE)
    plan = in_pairs(ids_of(0, 9, 2, 8), 8)
    assert plan.pair_start_of_token is not None
    end = int(plan.pair_start_of_token[-1])
    longer = torch.cat((plan.row_of_pair[:end], torch.full((18 - end + 3,), 7777, dtype=torch.int32, device=DEVICE)))
    routed = routed_of(replace(plan, row_of_pair=longer), 2)
    assert_same(sent(by_triton, routed, scores), sent(by_torch, routed, scores))


def test_what_the_kernels_do_not_serve() -> None:
    assert by_triton.why_unsupported(1, 1, 1, 1) is None
    assert by_triton.why_unsupported(1000, 8000, MAX_EXPERTS, by_triton.MAX_RANKS) is None
    for case in ((0, 0, 8, 2), (4, 0, 8, 2), (2**30, 2**30, 8, 2), (1, 2**31, 8, 2), (1, 1, 8192, 2), (1, 1, 130, 65)):
        assert by_triton.why_unsupported(*case), case

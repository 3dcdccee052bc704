"""Routing plans against a sort of Python tuples; losses and bias updates of two processes against one on all.

T tokens · E experts · K experts per token · P pairs
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Watching, raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks
from torch import Tensor

from tilemoe import reference
from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.plan import NEGATIVE_EXPERT, TOKEN_OUT_OF_RANGE, RoutingPlan, experts_of_rows
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.routing.topk import aux_loss_of_layers, route


def assert_plan(plan: RoutingPlan, token: list[int], expert: list[int], num_tokens: int, num_experts: int) -> None:
    """Every field of the plan, from the definition: pair i goes from token[i] to expert[i]."""
    pairs = range(len(token))
    token_major = sorted(pairs, key=lambda i: token[i])  # sorted() is stable
    rows = sorted((i for i in token_major if expert[i] < num_experts), key=lambda i: expert[i])
    tail = [0] * (len(token) - len(rows))
    row_of = {pair: row for row, pair in enumerate(rows)}
    assert plan.token_of_row.tolist() == [token[i] for i in rows] + tail
    assert plan.pair_of_row.tolist() == rows + tail
    assert plan.row_of_pair.tolist() == [row_of.get(i, -1) for i in token_major]
    counts = [sum(expert[i] == e for i in pairs) for e in range(num_experts)]
    assert plan.rows_per_expert.tolist() == counts
    assert plan.row_start_of_expert.tolist() == [sum(counts[:e]) for e in range(num_experts + 1)]
    if plan.pair_start_of_token is not None:
        starts = [sum(t < at for t in token) for at in range(num_tokens + 1)]
        assert plan.pair_start_of_token.tolist() == starts
    tensors = [value for value in vars(plan).values() if isinstance(value, Tensor)]
    assert {t.dtype for t in tensors} == {torch.int32}
    assert (plan.num_tokens, plan.num_experts) == (num_tokens, num_experts)
    assert plan.capacity == plan.num_pairs == len(token)
    plan.check()


def assert_topk_plan(expert_ids: Tensor, num_experts: int) -> None:
    num_tokens, k = expert_ids.shape
    token = [t for t in range(num_tokens) for _ in range(k)]
    plan = plan_topk(expert_ids, num_experts)
    assert plan.pair_start_of_token is None
    assert_plan(plan, token, expert_ids.flatten().tolist(), num_tokens, num_experts)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(0, 12), st.integers(1, 6), st.integers(1, 4), st.sampled_from([torch.int32, torch.int64]))
def test_topk_plans(data: st.DataObject, num_tokens: int, num_experts: int, k: int, dtype: torch.dtype) -> None:
    size = num_tokens * k
    ids = data.draw(st.lists(st.integers(0, num_experts + 2), min_size=size, max_size=size))
    assert_topk_plan(torch.tensor(ids, dtype=dtype).view(num_tokens, k), num_experts)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(1, 8), st.integers(1, 6), st.integers(0, 20), st.sampled_from([torch.int32, torch.int64]))
def test_pairs_plans(data: st.DataObject, num_tokens: int, num_experts: int, size: int, dtype: torch.dtype) -> None:
    token = data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=size, max_size=size))
    expert = data.draw(st.lists(st.integers(0, num_experts + 2), min_size=size, max_size=size))
    plan = plan_pairs(torch.tensor(token, dtype=dtype), torch.tensor(expert, dtype=dtype), num_tokens, num_experts)
    assert plan.pair_start_of_token is not None
    assert_plan(plan, token, expert, num_tokens, num_experts)


@pytest.mark.parametrize(
    ("expert_ids", "num_experts"),
    [
        pytest.param(torch.zeros(300, 1, dtype=torch.int64), 5, id="all tokens on the first expert"),
        pytest.param(torch.full((300, 1), 4), 5, id="all tokens on the last expert"),
        pytest.param(torch.full((7, 3), 5), 5, id="sentinels only"),
        pytest.param(torch.full((7, 3), 2**31 - 1, dtype=torch.int32), 5, id="the largest sentinel"),
        pytest.param(torch.arange(6).expand(50, 6), 6, id="K = E"),
        pytest.param(torch.zeros(9, 1, dtype=torch.int32), 1, id="E = 1"),
        pytest.param(torch.tensor([[3, 0]]), 4, id="T = 1"),
        pytest.param(torch.empty(0, 2, dtype=torch.int64), 4, id="T = 0"),
        pytest.param(torch.arange(8).view(2, 4).T, 8, id="strided ids"),
    ],
)
def test_hostile_topk_plans(expert_ids: Tensor, num_experts: int) -> None:
    assert_topk_plan(expert_ids, num_experts)


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: plan_topk(ids(3, 0), 4), "K >= 1, got K = 0"),
        (lambda: plan_topk(ids(3, 2) - 1, 4), "found a negative id"),
        (lambda: plan_topk(torch.empty(2**20, 2**12, dtype=torch.int32, device="meta"), 4), "row indices are int32"),
        (lambda: plan_pairs(ids(3), ids(3), 0, 4), "token ids must lie in"),
        (lambda: plan_pairs(ids(3) + 5, ids(3), 5, 4), "token ids must lie in"),
    ],
)
def test_bad_arguments_are_named_in_one_line(build: Callable[[], RoutingPlan], message: str) -> None:
    with raises_one_line(message):
        build()


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (NEGATIVE_EXPERT, "expert ids must be >= 0"),
        (TOKEN_OUT_OF_RANGE, "token ids must lie in"),
        (NEGATIVE_EXPERT | TOKEN_OUT_OF_RANGE, "expert ids must be >= 0"),
    ],
)
def test_check_raises_what_the_device_recorded(bits: int, message: str) -> None:
    plan = dataclasses.replace(plan_topk(ids(3, 2), 4), error_bits=torch.tensor(bits, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        plan.check()


def test_experts_of_rows() -> None:
    starts = torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)
    rows = torch.tensor([-1, 0, 2, 3, 4, 5, 9], dtype=torch.int32)
    assert experts_of_rows(starts, rows).tolist() == [-1, 1, 1, 3, 3, 5, 5]


@pytest.mark.parametrize("mode", [None, "nearest"])
def test_no_table_is_searched_from_its_middle(mode: str | None) -> None:
    """What torch.compile does with such a search on a GPU is wrong (see `experts_of_rows`)."""
    searches: list[int] = []

    def see(func: Any, args: tuple[Any, ...], out: Any) -> None:
        if func is torch.ops.aten.searchsorted.Tensor:
            searches.append(args[0].storage_offset())

    cfg = MoEConfig(64, 64, 4, 2, rounding=None if mode is None else TokenRounding(mode, tile=16))
    logits = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    with Watching(see):
        route(logits, cfg).dense()
    assert searches
    assert set(searches) == {0}


RANKS, E, K = 2, 6, 2
CFG = MoEConfig(8, 8, E, K, router=RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01))


def batch() -> tuple[Tensor, Tensor]:
    """Logits (16, E), skewed so that the ranks' loads differ, and a mask of the real tokens."""
    logits = torch.randn(16, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:5, 0] += 3.0
    return logits, torch.arange(16) % 7 != 6


def check_loss_of_the_whole_batch() -> None:
    """Of unequal shares."""
    logits, mask = batch()
    mine = slice(0, 5) if dist.get_rank() == 0 else slice(5, 16)
    local = logits[mine].clone().requires_grad_()
    loss = route(local, CFG, token_mask=mask[mine]).aux_loss
    (grad,) = torch.autograd.grad(loss, local)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= RANKS

    whole = logits.clone().requires_grad_()
    expected = reference.route(whole, CFG, token_mask=mask).aux_loss
    torch.testing.assert_close(mean, expected.detach().float())
    (expected_grad,) = torch.autograd.grad(expected, whole)
    torch.testing.assert_close(grad / RANKS, expected_grad[mine])

    over_model = replace(CFG, router=replace(CFG.router, aux_loss_over="model"))
    again = route(local, over_model, token_mask=mask[mine])
    torch.testing.assert_close(again.aux_loss, loss)
    torch.testing.assert_close(torch.autograd.grad(again.aux_loss, local)[0], grad)
    assert_mean_over_two_layers(over_model, mine, logits, mask)


def assert_mean_over_two_layers(cfg: MoEConfig, mine: slice, logits: Tensor, mask: Tensor) -> None:
    """The mean over the ranks of one loss of two layers is that of the whole batch."""
    whole = [logits, logits.flip(1)]
    parts = [route(each[mine], cfg, token_mask=mask[mine]).statistics for each in whole]
    mean = aux_loss_of_layers(torch.stack([part for part in parts if part is not None]), cfg.router)
    dist.all_reduce(mean)
    of_all = [route(each, cfg, token_mask=mask, training=False).statistics for each in whole]
    expected = aux_loss_of_layers(torch.stack([part for part in of_all if part is not None]), cfg.router)
    torch.testing.assert_close(mean / RANKS, expected)


@pytest.mark.dist
def test_two_processes_equal_one_on_the_whole_batch(tmp_path: Path) -> None:
    assert run_on_ranks([check_loss_of_the_whole_batch], RANKS, tmp_path) == {"check_loss_of_the_whole_batch": ""}

"""Losses and bias updates of two processes equal those of one process on the whole batch."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tilemoe import reference
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.routing.balance import update_selection_bias
from tilemoe.routing.topk import Routing, route

RANKS, E, K = 2, 6, 2
CFG = MoEConfig(8, 8, E, K, router=RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01))


def batch() -> tuple[Tensor, Tensor]:
    """Logits (16, E), skewed so that the ranks' loads differ, and a mask of the real tokens."""
    logits = torch.randn(16, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:5, 0] += 3.0
    return logits, torch.arange(16) % 7 != 6


def check_whole_batch_loss(rank: int, first_of_rank_1: int) -> None:
    logits, mask = batch()
    mine = slice(0, first_of_rank_1) if rank == 0 else slice(first_of_rank_1, 16)
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


def check_loss_without_other_ranks(rank: int) -> None:
    """Evaluation and a group of one rank need no other rank: only one of them calls."""
    groups = [dist.new_group([r]) for r in range(RANKS)]
    if rank == 0:
        logits, mask = batch()
        local, local_mask = logits[:5], mask[:5]
        expected = reference.route(local, CFG, token_mask=local_mask).aux_loss.float()
        torch.testing.assert_close(route(local, CFG, token_mask=local_mask, training=False).aux_loss, expected)
        torch.testing.assert_close(route(local, CFG, token_mask=local_mask, group=groups[0]).aux_loss, expected)
    dist.barrier()


def check_compiled(rank: int) -> None:
    logits = batch()[0][rank * 4 : rank * 4 + 8]

    def loss_and_counts(logits: Tensor) -> tuple[Tensor, Tensor]:
        routing: Routing = route(logits, CFG)
        return routing.aux_loss, routing.tokens_per_expert

    compiled = torch.compile(loss_and_counts, fullgraph=True, backend="aot_eager")(logits)
    for got, want in zip(compiled, loss_and_counts(logits), strict=True):
        torch.testing.assert_close(got, want)


def check_bias_update(rank: int) -> None:
    # Each rank alone would move the biases another way than both together.
    counts = torch.tensor([[[9, 0, 3], [4, 4, 4]], [[0, 3, 3], [6, 1, 5]]])[rank]
    biases = [torch.zeros(3), torch.ones(3)]
    update_selection_bias(biases, counts, 0.5)
    assert [bias.tolist() for bias in biases] == [[-0.5, 0.5, 0.0], [0.5, 1.5, 0.5]]
    assert counts.sum() == (12 + 12 if rank == 0 else 6 + 12)  # the caller's counts are left alone


def worker(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),  # a rank that waits for one that does not call fails the test
    )
    try:
        for first_of_rank_1 in (8, 5, 0):  # equal shares, unequal ones, a rank without tokens
            check_whole_batch_loss(rank, first_of_rank_1)
        check_loss_without_other_ranks(rank)
        check_compiled(rank)
        check_bias_update(rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.dist
def test_two_processes_equal_one_on_the_whole_batch(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path / "rendezvous"),), nprocs=RANKS)

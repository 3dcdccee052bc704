"""Losses and bias updates of two processes equal those of one process on the whole batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tilemoe import reference
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.routing.balance import update_selection_bias
from tilemoe.routing.topk import Routing, route
from tilemoe.testing.ranks import run_on_ranks

pytestmark = pytest.mark.dist

RANKS, E, K = 2, 6, 2
CFG = MoEConfig(8, 8, E, K, router=RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01))


def batch() -> tuple[Tensor, Tensor]:
    """Logits (16, E), skewed so that the ranks' loads differ, and a mask of the real tokens."""
    logits = torch.randn(16, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:5, 0] += 3.0
    return logits, torch.arange(16) % 7 != 6


def assert_loss_of_the_whole_batch(first_of_rank_1: int) -> None:
    logits, mask = batch()
    mine = slice(0, first_of_rank_1) if dist.get_rank() == 0 else slice(first_of_rank_1, 16)
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


def check_loss_of_equal_shares() -> None:
    assert_loss_of_the_whole_batch(8)


def check_loss_of_unequal_shares() -> None:
    assert_loss_of_the_whole_batch(5)


def check_loss_where_a_rank_has_no_tokens() -> None:
    assert_loss_of_the_whole_batch(0)


def check_loss_without_other_ranks() -> None:
    """Evaluation and a group of one rank need no other rank: only one of them calls."""
    groups = [dist.new_group([r]) for r in range(RANKS)]
    if dist.get_rank() == 0:
        logits, mask = batch()
        local, local_mask = logits[:5], mask[:5]
        expected = reference.route(local, CFG, token_mask=local_mask).aux_loss.float()
        torch.testing.assert_close(route(local, CFG, token_mask=local_mask, training=False).aux_loss, expected)
        torch.testing.assert_close(route(local, CFG, token_mask=local_mask, group=groups[0]).aux_loss, expected)
    dist.barrier()


def check_compiled() -> None:
    first = 4 * dist.get_rank()
    logits = batch()[0][first : first + 8]

    def loss_and_counts(logits: Tensor) -> tuple[Tensor, Tensor]:
        routing: Routing = route(logits, CFG)
        return routing.aux_loss, routing.tokens_per_expert

    compiled = torch.compile(loss_and_counts, fullgraph=True, backend="aot_eager")(logits)
    torch.testing.assert_close(compiled, loss_and_counts(logits))


def check_bias_update() -> None:
    rank = dist.get_rank()
    # Each rank alone would move the biases another way than both together.
    counts = torch.tensor([[[9, 0, 3], [4, 4, 4]], [[0, 3, 3], [6, 1, 5]]])[rank]
    biases = [torch.zeros(3), torch.ones(3)]
    update_selection_bias(biases, counts, 0.5)
    assert [bias.tolist() for bias in biases] == [[-0.5, 0.5, 0.0], [0.5, 1.5, 0.5]]
    assert counts.sum() == (12 + 12 if rank == 0 else 6 + 12)  # the caller's counts are left alone


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def results(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected(CHECKS), RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_processes_equal_one_on_the_whole_batch(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]

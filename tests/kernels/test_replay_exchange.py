"""What is repeated of the steps around an exchange between ranks is what they do by themselves.

T tokens · d model width · W ranks
"""

from __future__ import annotations

import pytest
import torch
from replay_cases import BF16, Args, Case, assert_repeated, recordings
from torch import Tensor

from tilemoe.kernels.choose import Choice, ExpertParallelKernels
from tilemoe.kernels.expert_parallel import triton as by_triton
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.ops import expert_parallel as exchange
from tilemoe.runtime import launch_trace as replay

pytestmark = pytest.mark.process("fake_driver")

TOKENS, RANKS, D = 40, 2, 128


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (by_triton.count_sent, by_triton.place_sent, by_triton.plan_received)
    kernels = Choice("triton", ExpertParallelKernels(*steps), "")
    monkeypatch.setattr(exchange, "choose_expert_parallel", lambda *args: kernels)
    monkeypatch.setattr(exchange, "choose_experts", lambda *args: Choice("hopper", backend_named("hopper"), ""))


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def routed_args(pairs: bool) -> Args:
    plan = Case(tokens=TOKENS, pairs=pairs).plan()
    arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
    return (*arrays, TOKENS, RANKS, 1)


def launched(operator: exchange.Operator) -> int:
    (recording,) = recordings(operator)
    return sum(isinstance(step, (replay._Launched, replay._LaunchedDirectly)) for step in recording.steps)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("columns_apart", [False, True])
def test_what_is_sent(pairs: bool, columns_apart: bool) -> None:
    assert launched(assert_repeated(exchange._run_count_sent, lambda: routed_args(pairs))) == 2

    def make() -> Args:
        x, scores = torch.zeros(TOKENS, D, dtype=BF16), torch.zeros(2 * TOKENS)
        x = x.t().contiguous().t() if columns_apart else x
        return (x, scores, indices(2, RANKS, 2), indices(2 * RANKS), *routed_args(pairs))

    assert launched(assert_repeated(exchange._run_place_sent, make)) == 2


@pytest.mark.parametrize("score_words", [1, 2])
def test_what_has_come(score_words: int) -> None:
    def make() -> Args:
        return (indices(90, score_words + 1), indices(2, RANKS, 2), 1, 64, 50)

    assert launched(assert_repeated(exchange._run_plan_received, make)) == 4


def test_what_comes_back() -> None:
    def make() -> Args:
        return (torch.zeros(60, D, dtype=BF16), indices(60), indices(TOKENS * RANKS), indices(RANKS + 1))

    assert launched(assert_repeated(exchange._run_sum_copies, make)) == 1

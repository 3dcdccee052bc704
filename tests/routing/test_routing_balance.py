"""Selection-bias balancing on one process: the rule, what it refuses, and that it balances."""

import pytest
import torch
from torch import Tensor

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.routing.balance import update_selection_bias
from tilemoe.routing.topk import route


def test_bias_moves_against_the_load_in_place() -> None:
    biases = [torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])]
    storage = [bias.data_ptr() for bias in biases]
    counts = torch.tensor([[10, 0, 5, 5], [3, 3, 3, 3]], dtype=torch.int32)
    update_selection_bias(biases, counts, 0.25)
    assert [bias.tolist() for bias in biases] == [[-0.25, 0.25, 0, 0], [1, 2, 3, 4]]
    assert [bias.data_ptr() for bias in biases] == storage


def test_a_load_at_the_mean_stays_put_even_where_the_mean_is_no_float() -> None:
    load = 2**24 + 1  # not a number of fp32
    biases = [torch.zeros(3)]
    update_selection_bias(biases, torch.tensor([[load, load - 1, load + 1]]), 1.0)
    assert biases[0].tolist() == [0, 1, -1]


def test_a_skewed_router_ends_balanced() -> None:
    cfg = MoEConfig(8, 8, 8, 2, router=RouterConfig(score="sigmoid", selection_bias=True))
    generator = torch.Generator().manual_seed(0)
    skew = torch.linspace(-1.5, 1.5, 8)
    bias = torch.zeros(8)

    def load() -> Tensor:
        logits = torch.randn(512, 8, generator=generator) + skew
        return route(logits, cfg, selection_bias=bias).tokens_per_expert

    before = load()
    for _ in range(200):
        update_selection_bias([bias], load()[None], 0.01)
    after = load()
    mean = 512 * 2 / 8
    assert float(before.max()) > 2 * mean
    assert float(after.max()) < 1.25 * mean
    assert float(after.min()) > 0.75 * mean


@pytest.mark.parametrize(
    ("biases", "counts", "rate", "message"),
    [
        (
            [torch.zeros(4)],
            torch.zeros(1, 4),
            0.1,
            "tokens_per_expert must be int32 or int64 counts, got torch.float32",
        ),
        ([torch.zeros(4)], torch.zeros(4, dtype=torch.int32), 0.1, r"tokens_per_expert must be \(L, E\)"),
        ([torch.zeros(4)], torch.zeros(2, 4, dtype=torch.int32), 0.1, "one row for each of the 1 biases"),
        ([torch.zeros(3)], torch.zeros(1, 4, dtype=torch.int32), 0.1, r"biases\[0\] must be \(4,\)"),
        ([torch.zeros(4)], torch.zeros(1, 4, dtype=torch.int32), -0.1, "rate must be >= 0, got -0.1"),
    ],
)
def test_bad_arguments_are_named(biases: list[Tensor], counts: Tensor, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update_selection_bias(biases, counts, rate)

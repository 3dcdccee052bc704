"""Several sources: each gives its share, and batches are a function of (seed, step, rank) alone."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_packing import write_documents

from tilemoe.data import MixedSampler, Mixture, PackedDocuments, PackedSampler, Sampler, TokenShards
from tilemoe.data.mixture import ROUND, sequences_of_round

Write = Callable[..., TokenShards]
WEIGHTS = (3.0, 1.0, 0.5)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_a_round_has_each_sources_share(weights: list[float]) -> None:
    counts = sequences_of_round(weights)
    exact = np.array(weights) / sum(weights) * ROUND
    assert counts.sum() == ROUND
    assert counts.min() >= 1
    assert (np.abs(counts - exact) <= np.where(exact < 1, 1, len(weights))).all()


def test_shares_that_come_out_even_are_exact() -> None:
    assert sequences_of_round((3, 1)).tolist() == [750, 250]
    assert sequences_of_round((1, 1, 1)).tolist() == [334, 333, 333]
    assert sequences_of_round((1.0,) * ROUND).tolist() == [1] * ROUND
    assert sequences_of_round((1e9, 1.0)).tolist() == [ROUND - 1, 1]
    with raises_one_line("data.sources: 1001 sources are more than 1000; put some into one folder"):
        sequences_of_round((1.0,) * (ROUND + 1))


def text_sampler(write: Write, batch_size: int = 1, rank: int = 0, world_size: int = 1, seed: int = 5) -> MixedSampler:
    """Of three texts with tokens of their own: 1.. of the first, 1001.. of the second, 2001.. of the third."""
    parts = [write(np.arange(count) + 1000 * source + 1) for source, count in enumerate((90, 40, 70))]
    samplers = [Sampler(part, 8, 1, seed) for part in parts]
    return MixedSampler(samplers, WEIGHTS, batch_size, seed, rank, world_size)


def test_each_round_reads_the_next_sequences_of_each_source(write_shards: Write) -> None:
    sampler = text_sampler(write_shards)
    counts = sequences_of_round(WEIGHTS).tolist()
    orders = []
    for number in (0, 1, 7):
        places = sampler.places(number * ROUND, ROUND)
        expected = [(source, number * n + k) for source, n in enumerate(counts) for k in range(n)]
        assert sorted(places) == expected
        orders.append([source for source, _ in places])
    assert len({tuple(order) for order in orders}) == 3, "drawn for each round"
    of_hundred = Counter(orders[0][:200])
    assert all(of_hundred[source] == pytest.approx(n / 5, rel=0.5) for source, n in enumerate(counts)), "and well mixed"


def test_batches_are_those_of_the_sources_whatever_the_job(write_shards: Write) -> None:
    whole = text_sampler(write_shards)
    rows = [whole.batch(position) for position in range(990, 1014)]  # over the end of a round
    for (inputs, targets), (source, at) in zip(rows, whole.places(990, 24), strict=True):
        expected = whole.samplers[source].batch(at)
        assert np.array_equal(inputs, expected[0])
        assert np.array_equal(targets, expected[1])
        assert (inputs // 1000 == source).all()
    for batch_size, world_size in ((3, 1), (1, 3), (2, 3)):
        found = []
        for step in range(990 // (batch_size * world_size), 1014 // (batch_size * world_size)):
            for rank in range(world_size):
                sampler = text_sampler(write_shards, batch_size, rank, world_size)
                assert sampler.num_targets(step, 1) == 8 * batch_size * world_size
                found.append(sampler.batch(step)[0])
        assert np.array_equal(np.concatenate(found), np.concatenate([inputs for inputs, _ in rows]))
    other = text_sampler(write_shards, seed=6)
    assert other.places(0, 100) != whole.places(0, 100)


def test_documents_are_mixed_window_by_window(tmp_path: Path) -> None:
    parts = tuple(PackedDocuments(write_documents(tmp_path / str(n), n, 15, seed=n), 16) for n in (30, 20))
    sampler = MixedSampler([PackedSampler(part, 1, 3) for part in parts], (1.0, 2.0), 4, 3)
    for step in range(20):
        batch = sampler.batch(step)
        assert [array.shape for array in batch] == [(4, 16)] * 3
        assert sampler.num_targets(step, 1) == (batch[1] >= 0).sum()
    assert sampler.num_targets(3, 5) == sum(sampler.num_targets(step, 1) for step in range(3, 8))
    mixture = Mixture(parts, (1.0, 2.0))
    assert mixture.num_targets == sum(part.num_targets for part in parts)
    assert mixture.num_bytes is None

"""Sampling: a mixed permutation, every window once per epoch, disjoint ranks, the same batches after a restart."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import traced_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilemoe.data.sampler import Sampler, permute, sequential_windows
from tilemoe.data.shards import TokenShards

Write = Callable[..., TokenShards]


class Counting:
    """A split of ``num_tokens`` tokens, token i being i, that takes no memory."""

    split, directory, separator_id = "train", Path("memory"), 0

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def read(self, start: int, length: int) -> np.ndarray:
        assert start >= 0
        assert start + length <= self.num_tokens
        return np.arange(start, start + length)


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 4), st.integers(0, 300), st.integers(0, 2**32))


@settings(deadline=None)
@given(SIZES)
def test_each_epoch_visits_each_window_once_over_all_ranks(sizes: tuple[int, int, int, int, int]):
    seq_len, batch_size, world_size, extra, seed = sizes
    shards = Counting(seq_len + 1 + extra)
    samplers = [Sampler(shards, seq_len, batch_size, seed, rank, world_size) for rank in range(world_size)]
    windows = samplers[0].num_windows
    assert windows == shards.num_tokens // seq_len
    steps = -(-3 * windows // (batch_size * world_size))
    stream = np.concatenate([sampler.starts(step) for step in range(steps) for sampler in samplers])
    for epoch in range(3):
        starts = stream[epoch * windows : (epoch + 1) * windows]
        covered = (starts[:, None] + np.arange(seq_len)) % shards.num_tokens
        assert len(np.unique(covered)) == windows * seq_len  # no two windows of an epoch share a token


@settings(deadline=None)
@given(SIZES, st.integers(0, 10**6))
def test_batches_are_a_pure_function_of_seed_step_and_rank(sizes: tuple[int, int, int, int, int], step: int):
    seq_len, batch_size, world_size, extra, seed = sizes
    shards = Counting(seq_len + 1 + extra)
    arguments = (shards, seq_len, batch_size, seed, world_size - 1, world_size)
    used = Sampler(*arguments)
    for earlier in range(max(0, step - 3), step):
        used.batch(earlier)
    around_the_ring = (used.starts(step)[:, None] + np.arange(seq_len + 1)) % shards.num_tokens
    expected = around_the_ring[:, :-1], around_the_ring[:, 1:]
    for found, again, tokens in zip(used.batch(step), Sampler(*arguments).batch(step), expected, strict=True):
        assert found.dtype == np.int64
        assert found.flags.c_contiguous
        assert np.array_equal(found, again)
        assert np.array_equal(found, tokens)


@given(st.integers(0, 1000), st.integers(0, 50))
def test_global_batch_does_not_depend_on_the_number_of_ranks(seed: int, step: int):
    shards = Counting(1000)
    alone = Sampler(shards, 8, 12, seed).starts(step)
    shared = [Sampler(shards, 8, 4, seed, rank, 3).starts(step) for rank in range(3)]
    assert np.array_equal(np.concatenate(shared), alone)


def test_epochs_and_seeds_differ_in_order_and_offset():
    shards = Counting(10_007)

    def epoch(seed: int, index: int) -> np.ndarray:
        return np.concatenate([Sampler(shards, 10, 50, seed).starts(20 * index + i) for i in range(20)])

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    for i in range(3):
        for j in range(i):
            shifts = (orders[i] - orders[j]) % 10_007  # one value throughout if only the offsets differ
            assert np.unique(shifts, return_counts=True)[1].max() < 20
    remainders = {int(order[0]) % 10 for order in (epoch(seed, e) for seed in range(6) for e in range(6))}
    assert len(remainders) > 5


def test_time_and_memory_do_not_grow_with_the_corpus():
    sampler = Sampler(Counting(10**11), 2048, 4, seed=1, rank=3, world_size=8)
    with traced_memory() as peak:
        started = time.perf_counter()
        for step in (0, 1, 10**5, 10**6, 10**9):
            inputs, _ = sampler.batch(step)
            assert inputs.shape == (4, 2048)
        assert time.perf_counter() - started < 2
        assert peak() < 2_000_000


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 100), st.integers(1, 12), st.integers(1, 5))
def test_evaluation_covers_every_token_once_in_order(write_shards: Write, count: int, seq_len: int, batch_size: int):
    tokens = np.arange(1, count + 1)
    batches = list(sequential_windows(write_shards(tokens), seq_len, batch_size))
    assert len(batches) == -(-count // (seq_len * batch_size))
    assert all(part.shape == (batch_size, seq_len) and part.dtype == np.int64 for batch in batches for part in batch)
    inputs = np.concatenate([batch[0].ravel() for batch in batches])
    targets = np.concatenate([batch[1].ravel() for batch in batches])
    assert targets[:count].tolist() == tokens.tolist()
    assert (targets[count:] == -100).all()
    assert inputs[:count].tolist() == [0, *tokens[:-1].tolist()]
    assert (inputs[count:] == 0).all()


KEYS = st.tuples(st.integers(0, 1), st.integers(0, 2**64), st.integers(0, 2**40))


@settings(deadline=None)
@given(st.integers(1, 5000), KEYS)
def test_bijection(size: int, key: tuple[int, ...]):
    image = permute(np.arange(size), size, key)
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize("size", [10, 100, 1000])
def test_images_and_neighbours_are_spread_evenly_over_the_keys(size: int):
    """Chi-square with 9 and 8 degrees of freedom: above 35 with a chance below 1e-4, and the keys are fixed."""
    pairs = np.array([permute(np.array([0, 1]), size, (key,)) for key in range(2000)])
    distance = (pairs[:, 1] - pairs[:, 0]) % size - 1  # of two neighbours: never 0, so size - 1 values
    for values, bins in (
        (pairs[:, 0] * 10 // size, 10),
        (pairs[:, 1] * 10 // size, 10),
        (distance * 9 // (size - 1), 9),
    ):
        expected = 2000 / bins
        assert float(((np.bincount(values, minlength=bins) - expected) ** 2 / expected).sum()) < 35


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer >= 1, got 0"),
        ({"batch_size": -1}, "batch_size must be an integer >= 1, got -1"),
        ({"batch_size": 2.0}, "batch_size must be an integer >= 1, got 2.0"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"world_size": 0}, "world_size must be an integer >= 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must be below world_size \(2\), got 2"),
        ({"step": -1}, "step must be an integer >= 0, got -1"),
        ({"seq_len": 100}, r"has 100 tokens, fewer than data.seq_len \+ 1 = 101; lower data.seq_len or give more text"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str):
    arguments = {"seq_len": 4, "batch_size": 2, "seed": 0, "step": 0, **change}
    step = arguments.pop("step")
    with pytest.raises(ValueError, match=message):
        Sampler(Counting(100), **arguments).batch(step)

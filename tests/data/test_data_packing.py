"""Packing whole documents into windows, and the order in which training reads these."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemoe.data import PackedDocuments, PackedSampler
from tilemoe.data.packing import FLAGS, flagged, pack
from tilemoe.data.shards import ShardWriter, TokenShards, token_dtype, write_index

IGNORED, VOCAB = -100, 50


def write_documents(folder: Path, count: int, longest: int, seed: int = 0, shard_tokens: int = 13) -> TokenShards:
    """``count`` documents of 2 to ``longest`` random tokens, random ones of them learnt, over many small shards."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    with ShardWriter(folder, "train", FLAGS * VOCAB, shard_tokens) as writer:
        for _ in range(count):
            ids = rng.integers(1, VOCAB, rng.integers(2, longest + 1))
            learnt = rng.random(ids.size) < 0.5
            learnt[-1] = True
            writer.append(flagged((ids, learnt)), 0)
        entry = writer.entry()
    fields = {"vocab_size": VOCAB, "separator_id": 0, "dtype": token_dtype(FLAGS * VOCAB).str}
    write_index(folder, {**fields, "splits": {"train": entry, "heldout": entry}})
    return TokenShards(folder, "train")


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), max_size=60), st.integers(12, 20))
def test_every_document_has_a_window_and_few_are_needed(places: list[int], room: int) -> None:
    window_of_document = pack(np.array(places, np.int64), room)
    filled = np.bincount(window_of_document, places)
    assert (filled <= room).all()
    assert (filled > 0).all()  # windows are numbered without gaps
    assert len(filled) <= 11 / 9 * -(-sum(places) // room) + 11 / 9 + 1 or max(places) > room / 3
    if len(filled) > 1:
        assert np.sort(filled)[:2].sum() > room  # no two windows fit into one


def test_windows_hold_every_document_once_and_whole(tmp_path: Path) -> None:
    shards = write_documents(tmp_path / "shards", 70, 17)
    packed = PackedDocuments(shards, 16)
    stream = shards.read(0, shards.num_tokens)
    begins = [*np.flatnonzero(stream & 1), stream.size]
    expected = []
    for a, b in pairwise(begins):
        ids, learnt = stream[a:b] // FLAGS, stream[a:b] & 2
        expected.append((ids[:-1].tolist(), np.where(learnt[1:], ids[1:], IGNORED).tolist()))
    found = []
    inputs, targets, positions = packed.read(np.arange(packed.num_windows))
    assert (positions[:, 0] == 0).all()
    for window in range(packed.num_windows):
        assert (targets[window] >= 0).sum() == packed.targets_of_window[window]
        edges = [*np.flatnonzero(positions[window] == 0), 16]
        for a, b in pairwise(edges):
            assert positions[window, a:b].tolist() == list(range(b - a))
            if (targets[window, a:b] >= 0).any():
                found.append((inputs[window, a:b].tolist(), targets[window, a:b].tolist()))
            else:  # what is left over
                assert b == 16
                assert not inputs[window, a:b].any()
    assert sorted(found) == sorted(expected)
    assert packed.num_targets == sum(t != IGNORED for _, targets_of in expected for t in targets_of)
    assert packed.places == sum(len(ids) for ids, _ in expected)


def test_evaluation_reads_every_window_once(tmp_path: Path) -> None:
    packed = PackedDocuments(write_documents(tmp_path / "shards", 40, 17), 16)
    batches = list(packed.batches(3))
    assert {batch.inputs.shape for batch in batches} == {(3, 16)}
    assert sum((batch.targets >= 0).sum() for batch in batches) == packed.num_targets
    whole = packed.read(np.arange(packed.num_windows))
    for given_, expected in zip(zip(*batches, strict=True), whole, strict=True):
        together = np.concatenate(given_)[: packed.num_windows]
        assert (together == expected).all()
    with raises_one_line("batch_size must be an integer >= 1, got 0"):
        next(packed.batches(0))


@pytest.mark.parametrize("world_size", [1, 3])
def test_epochs_visit_each_window_once_and_targets_are_counted_ahead(world_size: int, tmp_path: Path) -> None:
    packed = PackedDocuments(write_documents(tmp_path / "shards", 50, 17), 16)
    windows = packed.read(np.arange(packed.num_windows))
    samplers = [PackedSampler(packed, 2, 5, rank, world_size) for rank in range(world_size)]
    steps = -(-2 * packed.num_windows // (2 * world_size))
    rows = []
    for step in range(steps):
        batches = [sampler.batch(step) for sampler in samplers]
        assert samplers[-1].num_targets(step, 1) == sum((batch.targets >= 0).sum() for batch in batches)
        rows += [(row.tobytes(), target.tobytes()) for batch in batches for row, target in zip(*batch[:2], strict=True)]
    expected = sorted((row.tobytes(), target.tobytes()) for row, target in zip(*windows[:2], strict=True))
    epochs = rows[: packed.num_windows], rows[packed.num_windows : 2 * packed.num_windows]
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]
    assert samplers[0].num_targets(1, steps - 1) == sum(samplers[0].num_targets(step, 1) for step in range(1, steps))
    alone = PackedSampler(packed, 2 * world_size, 5)
    together = np.concatenate([sampler.batch(1).inputs for sampler in samplers])
    assert (alone.batch(1).inputs == together).all()

"""Token shards: what is written is read back, and damage is found and named."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import raises_one_line
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilemoe.data import shards as shards_module
from tilemoe.data.shards import ShardWriter, TokenShards, read_index, token_dtype

Write = Callable[..., TokenShards]


def test_any_slice_reads_back_across_shards(write_shards: Write):
    tokens = np.arange(50) * 3
    shards = write_shards(tokens, shard_tokens=7)
    assert shards.num_tokens == 50
    assert len(list(shards.directory.glob("train-*.bin"))) == 8
    for start in range(51):
        for length in range(51 - start):
            part = shards.read(start, length)
            assert part.dtype == np.int64
            assert part.tolist() == tokens[start : start + length].tolist()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 65535), min_size=1, max_size=60), st.integers(1, 70))
def test_round_trip_for_any_shard_size(write_shards: Write, tokens: list[int], shard_tokens: int):
    assert write_shards(tokens, shard_tokens=shard_tokens).read(0, len(tokens)).tolist() == tokens


def test_dtype_is_the_smallest_that_holds_the_vocabulary(write_shards: Write):
    assert token_dtype(1 << 16).str == "<u2"
    assert token_dtype((1 << 16) + 1).str == "<u4"
    small, large = write_shards([0, 65535]), write_shards([0, 65536, 2**32 - 1], vocab_size=2**32)
    assert (small.directory / "train-00000.bin").stat().st_size == 4
    assert (large.directory / "train-00000.bin").stat().st_size == 12
    assert small.read(0, 2).tolist() == [0, 65535]
    assert large.read(0, 3).tolist() == [0, 65536, 2**32 - 1]
    assert (small.directory / "train-00000.bin").read_bytes() == b"\0\0\xff\xff"


@pytest.mark.parametrize("wrong", [-1, 100, 70000])
def test_id_outside_the_vocabulary_is_refused(tmp_path: Path, wrong: int):
    with ShardWriter(tmp_path, "train", vocab_size=100) as writer:
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the tokenizer's vocabulary of 100"):
            writer.append(np.array([5, wrong]), num_bytes=2)
        assert writer.entry()["num_tokens"] == 0


def test_shard_size_must_be_positive(tmp_path: Path):
    with pytest.raises(ValueError, match="shard_tokens must be >= 1"):
        ShardWriter(tmp_path, "train", vocab_size=100, shard_tokens=0)


def test_reading_outside_is_refused(write_shards: Write):
    shards = write_shards(range(20))
    for start, length in ((-1, 2), (0, 21), (20, 1), (3, -1)):
        with pytest.raises(ValueError, match=f"start {start} and length {length} reach outside the 20 tokens"):
            shards.read(start, length)


def test_pickling_reopens_the_files(write_shards: Write):
    shards = write_shards(range(5000), shard_tokens=999)
    content = pickle.dumps(shards)
    assert len(content) < 500
    assert pickle.loads(content).read(990, 20).tolist() == list(range(990, 1010))


def test_unknown_split(write_shards: Write):
    with pytest.raises(ValueError, match="split must be one of train, heldout; got 'test'"):
        TokenShards.open(write_shards([1]).directory, "test")


@pytest.mark.parametrize("change", [-2, -1, 1, 2])
def test_shard_of_another_size_is_named(write_shards: Write, change: int):
    directory = write_shards(range(20)).directory
    path = directory / "train-00001.bin"
    content = path.read_bytes() + b"\0\0"
    path.write_bytes(content[: 14 + change])
    with pytest.raises(ValueError, match=rf"train-00001\.bin: {14 + change} bytes instead of 14.*delete the folder"):
        TokenShards.open(directory, "train")
    TokenShards.open(directory, "heldout")


def test_missing_shard_is_named(write_shards: Write):
    directory = write_shards(range(20)).directory
    (directory / "train-00002.bin").unlink()
    with pytest.raises(ValueError, match=r"train-00002\.bin: cannot be read \(No such file"):
        TokenShards.open(directory, "train")


def test_any_flipped_bit_is_found(write_shards: Write):
    directory = write_shards(range(20)).directory
    TokenShards.open(directory, "train").verify()
    for path in sorted(directory.glob("train-*.bin")):
        content = path.read_bytes()
        for bit in range(0, 8 * len(content), 5):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match=rf"{path.name}: its content is not what was written; delete"):
                TokenShards.open(directory, "train").verify()
        path.write_bytes(content)
    TokenShards.open(directory, "train").verify()


def test_any_flipped_byte_of_the_index_is_found(write_shards: Write):
    directory = write_shards(range(20)).directory
    path = directory / "index.json"
    content = path.read_bytes()
    for position, byte in enumerate(content):
        path.write_bytes(content[:position] + bytes([byte ^ 1]) + content[position + 1 :])
        if chr(byte).isspace():  # whitespace between values may become other whitespace
            continue
        with raises_one_line(r"index\.json: cannot be used \(.*\); delete the folder"):
            TokenShards.open(directory, "train")


def test_missing_truncated_and_foreign_index(write_shards: Write, tmp_path: Path):
    with pytest.raises(ValueError, match=r"index\.json: cannot be used \(No such file"):
        TokenShards.open(tmp_path, "train")
    path = write_shards([1]).directory / "index.json"
    content = path.read_text()
    for damaged in (content[:-20], "", "[]", '{"format": "other"}'):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"index\.json: cannot be used"):
            read_index(path.parent)


def test_index_of_another_version(write_shards: Write, monkeypatch: pytest.MonkeyPatch):
    shards = write_shards([1])
    monkeypatch.setattr(shards_module, "VERSION", 99)
    with pytest.raises(ValueError, match="format version 1, this release reads 99"):
        read_index(shards.directory)


def test_index_with_a_valid_checksum_but_without_a_field(write_shards: Write):
    directory = write_shards([1]).directory
    fields = json.loads((directory / "index.json").read_text())
    del fields["checksum"], fields["separator_id"]
    shards_module.write_index(directory, fields)
    with pytest.raises(ValueError, match="KeyError: 'separator_id'"):
        TokenShards.open(directory, "train")

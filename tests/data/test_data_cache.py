"""Shards of tokens: written, read back, prepared once and reused, damage named, two processes at once."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import raises_one_line, traced_memory

from tilemoe.data import cache as cache_module
from tilemoe.data import corpus as corpus_module
from tilemoe.data import prepare
from tilemoe.data import shards as shards_module
from tilemoe.data.shards import ShardWriter, TokenShards, read_index, token_dtype
from tilemoe.files import own_name


def joined(texts: list[str]) -> list[int]:
    return list(b"".join(text.encode() + b"\0" for text in texts))


def tokens_of(shards: TokenShards) -> list[int]:
    ids: list[int] = shards.read(0, shards.num_tokens).tolist()
    return ids


def error_of(*args: Any, **kwargs: Any) -> str:
    with raises_one_line("") as caught:
        prepare(*args, **kwargs)
    return str(caught.value)


def shard_folders(cache: Path) -> list[Path]:
    return [path for path in cache.glob("shards/*") if path.is_dir()]


def test_bytes_of_every_document_with_separators(folder: Path, texts: list[str], tmp_path: Path):
    prepared = prepare(str(folder), "bytes", tmp_path / "cache", shard_tokens=1000)
    held = [texts[19], texts[39]]
    kept = [text for text in texts if text not in held]
    assert len(kept) == 43
    for shards, expected in ((prepared.train, joined(kept)), (prepared.heldout, joined(held))):
        assert tokens_of(shards) == expected
        assert shards.num_bytes == shards.num_tokens
        assert (shards.vocab_size, shards.separator_id) == (256, 0)
    assert prepared.tokenizer.name == "bytes"
    assert len(list(prepared.train.directory.glob("train-*.bin"))) > 1


def test_a_file_of_the_tokenizer_finds_the_shards_of_its_training(folder: Path, tmp_path: Path):
    trained = prepare(str(folder), "bpe:300", tmp_path / "cache")
    trained.tokenizer.save(tmp_path / "tokenizer.json")
    again = prepare(str(folder), str(tmp_path / "tokenizer.json"), tmp_path / "cache")
    assert tokens_of(again.train) == tokens_of(trained.train)
    assert again.heldout.directory == trained.heldout.directory
    assert len(shard_folders(tmp_path / "cache")) == 1


def test_large_text_file_holds_out_pieces_along_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_module, "_PIECE", 1000)
    (tmp_path / "a.txt").write_text("".join(f"line {i:06d}\n" for i in range(4000)))  # 48 pieces
    prepared = prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "cache")
    pieces = bytes(tokens_of(prepared.heldout)).split(b"\0")[:-1]
    assert [piece[:11] for piece in pieces] == [b"line 001596", b"line 003276"]  # the 20th and 40th of 84 lines each
    assert all(len(piece) == 84 * 12 for piece in pieces)


def test_bytes_that_are_not_utf8_are_refused_or_counted(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"a na\xefve fox\n" * 90)
    assert f"{tmp_path / 'a.txt'}: byte 4 is not UTF-8" in error_of(str(tmp_path / "a.txt"), "bytes", tmp_path / "c")
    for _ in range(2):  # made, and found
        prepared = prepare(str(tmp_path / "a.txt"), "bpe:300", tmp_path / "c", undecodable="replace")
        assert prepared.files == "files read: 1, 90 bytes replaced that are not UTF-8"
        assert "a na\ufffdve fox" in prepared.tokenizer.decode(tokens_of(prepared.train))
    assert f"{tmp_path / 'a.txt'}: byte 4 is not UTF-8" in error_of(str(tmp_path / "a.txt"), "bytes", tmp_path / "c")


def test_shards_of_older_rules_are_found_where_they_are_right(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python's own library in bytes; of other texts and tokenizers bytes were replaced, and ids others at cuts."""
    made: list[list[Any]] = []
    real = cache_module.cached_shards
    monkeypatch.setattr(cache_module, "cached_shards", lambda *args: (made.append(args[3]), real(*args))[1])
    for corpus, tokenizer in (("stdlib", "bytes"), (str(folder), "bytes"), (str(folder), "bpe:300")):
        fingerprint = prepare(corpus, tokenizer, tmp_path).tokenizer.fingerprint
        assert (made[-1] == [fingerprint, 20]) == (corpus == "stdlib")
    assert made[1][2:] == ["error"]
    assert made[2][2:] == ["error", "ids of whole texts"]


def test_prepared_once_and_reused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepare(str(folder), "bytes", tmp_path)
    monkeypatch.setattr(cache_module, "_build", lambda *_: pytest.fail("built again"))
    assert prepare(str(folder), "bytes", tmp_path).train.directory == first.train.directory
    monkeypatch.undo()
    path = folder / "000.txt"
    os.utime(path, ns=(1, 1))
    directories = {
        first.train.directory,
        prepare(str(folder), "bytes", tmp_path).train.directory,
        prepare(str(folder), "bytes", tmp_path, heldout_every=10).train.directory,
        prepare(str(folder), "bpe:300", tmp_path).train.directory,
    }
    assert len(directories) == 4


def test_damage_to_a_reused_cache_is_named_and_never_repaired_silently(folder: Path, tmp_path: Path):
    directory = prepare(str(folder), "bytes", tmp_path).train.directory
    path = directory / "heldout-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    assert f"{path}: {len(content) - 2} bytes instead of {len(content)}" in error_of(str(folder), "bytes", tmp_path)
    path.write_bytes(content[:5] + bytes([content[5] ^ 4]) + content[6:])
    assert f"{path}: its content is not what was written" in error_of(str(folder), "bytes", tmp_path)
    path.write_bytes(content)
    (directory / "index.json").write_text("{}")
    assert "index.json: cannot be used" in error_of(str(folder), "bytes", tmp_path)
    shutil.rmtree(directory)
    prepare(str(folder), "bytes", tmp_path)


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        *(("heldout", name, value) for name in ("num_tokens", "num_bytes") for value in (-1, True, 3.0, "3", 10**400)),
        *(("", "dtype", value) for value in ("<f8", "u1,u1", "O", "V0", ["<u2"], None)),
        *(("", name, value) for name in ("vocab_size", "undecodable_bytes") for value in ("256", [1], -1)),
        ("heldout", "num_tokens", 0),
        ("", "notes", 7),
        ("shard", "file", "../../heldout.bin"),
    ],
)
def test_what_a_signed_index_says_is_checked(folder: Path, tmp_path: Path, of: str, name: str, value: Any):
    """A checkpoint of somebody else may name a cache."""
    directory = prepare(str(folder), "bytes", tmp_path).train.directory
    content = json.loads((directory / "index.json").read_bytes())
    heldout = content["splits"]["heldout"]
    {"": content, "heldout": heldout, "shard": heldout["shards"][0]}[of][name] = value
    del content["checksum"]
    (directory / "index.json").write_text(json.dumps({**content, "checksum": shards_module._index_checksum(content)}))
    if name == "file":
        (directory / "heldout-00000.bin").rename(tmp_path / "heldout.bin")
    assert re.search(r"index.json: cannot be used|bin: cannot be read", error_of(str(folder), "bytes", tmp_path))


def test_shards_of_another_corpus_under_the_same_name(folder: Path, tmp_path: Path):
    first = prepare(str(folder), "bytes", tmp_path).train.directory
    other = prepare(str(folder), "bytes", tmp_path, heldout_every=7).train.directory
    shutil.rmtree(first)
    other.rename(first)
    assert "made from another corpus or tokenizer" in error_of(str(folder), "bytes", tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "it is empty; put text into it"),
        ("a.txt", "tiny", r"too little text to hold any out; add text or lower data.heldout_every \(20\)"),
        ("a.jsonl", '{"text": "x"}\n' * 30 + "oops\n", "a.jsonl:31: this line is not JSON"),
    ],
)
def test_unusable_text_is_named_and_nothing_is_published(name: str, text: str, message: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    for tokenizer in ("bytes", "bpe:300") if not text else ("bytes",):
        with raises_one_line(message):
            prepare(str(tmp_path / name), tokenizer, tmp_path / "cache")
    assert shard_folders(tmp_path / "cache") == []


def test_corpus_that_changes_while_it_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = cache_module._write_documents

    def write_and_touch(*args: Any) -> None:
        write(*args)
        (folder / "000.txt").write_text("changed")

    monkeypatch.setattr(cache_module, "_write_documents", write_and_touch)
    assert "its files changed while they were read; run again" in error_of(str(folder), "bytes", tmp_path)
    assert shard_folders(tmp_path) == []


def test_without_locks_a_second_process_uses_the_first_one_s_shards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = cache_module._write_documents

    def write_later(*args: Any) -> None:
        monkeypatch.setattr(cache_module, "_write_documents", write)
        prepare(str(folder), "bytes", tmp_path)
        write(*args)

    monkeypatch.setattr(cache_module, "only_one_process", nullcontext)
    monkeypatch.setattr(cache_module, "_write_documents", write_later)
    directory = prepare(str(folder), "bytes", tmp_path).train.directory
    assert shard_folders(tmp_path) == [directory]


def test_leftovers_of_killed_processes_are_removed(folder: Path, tmp_path: Path):
    directory = prepare(str(folder), "bytes", tmp_path).train.directory
    shutil.rmtree(directory)
    theirs = directory.with_name(f".tmp-{directory.name}-{'0' * 16}")
    theirs.mkdir()
    (theirs / "thesis.tex").write_bytes(b"years of work")
    leftover = directory.with_name(own_name(f".tmp-{directory.name}-{'1' * 16}"))
    leftover.mkdir()
    (leftover / "train-00000.bin").write_bytes(b"half")
    prepare(str(folder), "bytes", tmp_path)
    assert sorted(shard_folders(tmp_path)) == [theirs, directory]
    assert [path.name for path in theirs.iterdir()] == ["thesis.tex"]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_module, "_PIECE", 1 << 14)
    monkeypatch.setattr(cache_module, "_BATCH_CHARS", 1 << 15)
    line = "x" * 99 + "\n"
    (tmp_path / "a.txt").write_text(line * 200_000)  # 20 MB, 40 MB as uint16
    with traced_memory() as peak:
        prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "cache", shard_tokens=1 << 20)
        assert peak() < 6_000_000


Write = Callable[..., TokenShards]


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


def test_a_shard_that_changes_while_it_is_read(write_shards: Write):
    """Mapped, one that is cut short ended the process with SIGBUS; one that is deleted is read on."""
    shards = write_shards(range(20))
    for number in range(3):
        (shards.directory / f"train-0000{number}.bin").unlink()
    assert shards.read(0, 20).tolist() == list(range(20))
    shards = write_shards(range(20))
    os.truncate(shards.directory / "train-00001.bin", 6)
    assert shards.read(0, 10).tolist() == list(range(10))
    with raises_one_line(r"train-00001\.bin: it was truncated while it was in use; delete the folder"):
        shards.read(0, 11)


def test_index_of_another_version(write_shards: Write, monkeypatch: pytest.MonkeyPatch):
    shards = write_shards([1])
    monkeypatch.setattr(shards_module, "VERSION", 99)
    with pytest.raises(ValueError, match="format version 1, this release reads 99"):
        read_index(shards.directory)


@pytest.mark.parametrize("heldout_every", [2, 20])  # whole documents are held out, or the end of each
def test_a_long_line_takes_no_many_times_its_memory(tmp_path: Path, heldout_every: int):
    size = 24 << 20
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("a b\n" * (size // 4), "b"))
    )
    with traced_memory() as peak:
        made = prepare(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "cache", heldout_every=heldout_every)
        assert peak() < 5 * size + (32 << 20)
    separators = 2 if heldout_every == 2 else 3
    assert made.train.num_tokens + made.heldout.num_tokens == size + 1 + separators


def test_reading_outside_is_refused(write_shards: Write):
    shards = write_shards(range(20))
    for start, length in ((-1, 2), (0, 21), (20, 1), (3, -1)):
        with pytest.raises(ValueError, match=f"start {start} and length {length} reach outside the 20 tokens"):
            shards.read(start, length)

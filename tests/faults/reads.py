"""The kinds of file that the package reads: how intact ones are made, and the reading of them."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from writes import WRITES, checkpoint_read, digest, little

from tilemoe.config import to_dict
from tilemoe.data import load_tokenizer, open_corpus, prepare
from tilemoe.data import shards as token_shards
from tilemoe.data.conversations import read_examples
from tilemoe.models.huggingface import load_hf
from tilemoe.models.sums import file_entries, manifest_of
from tilemoe.train.checkpoints.names import list_checkpoints
from tilemoe.train.checkpoints.verify import verify
from tilemoe.train.config import load_recipe
from tilemoe.train.metrics import read_metrics

ROWS = [{"text": f"Row {i}: naïve café 漢字 🎉.\n" * (1 + i % 3)} for i in range(60)]
CHATS = [{"messages": [{"role": "user", "content": f"a{i}"}, {"role": "assistant", "content": "b"}]} for i in range(20)]
CHATS += [{"prompt": f"p{i}", "completion": "c"} for i in range(20)]


@dataclass(frozen=True)
class Read:
    """``make`` fills a folder; ``files`` are those that are changed there; ``read`` gives what they say.

    is_sealed: checksums promise that nothing but the content that was written is ever read.
    sign: recomputes the checksums after a change, as an attacker can.
    """

    make: Callable[[Path, Path], object]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    is_sealed: bool = False
    sign: Callable[[Path], object] | None = None


def _checkpoint_of(kind: str) -> Callable[[Path, Path], object]:
    def make(folder: Path, corpus: Path) -> None:
        WRITES[kind](corpus).begin(folder / "run")
        list_checkpoints(folder / "run")[0].rename(folder / "step_00000001")

    return make


def _sign_manifest(folder: Path) -> None:
    path = folder / "step_00000001"
    files = [file for file in path.iterdir() if file.is_file() and file.name != "manifest.json"]
    (path / "manifest.json").write_bytes(manifest_of(file_entries(files)))


def _sign_index(folder: Path) -> None:
    path = folder / "index.json"
    try:
        content = json.loads(path.read_bytes())
        content.pop("checksum", None)
        content["checksum"] = token_shards._index_checksum(content)
        path.write_text(json.dumps(content))
    except (ValueError, OSError, AttributeError, TypeError, RecursionError):
        return  # it is no table any more, which no checksum mends


def _make_recipe(folder: Path, corpus: Path) -> None:
    (folder / "mine.json").write_text(json.dumps(to_dict(little("bytes", corpus))))


def _make_tokenizer(folder: Path, corpus: Path) -> None:
    WRITES["tokenizer"](corpus).write(folder)


def _read_tokenizer(folder: Path) -> Any:
    found = load_tokenizer(str(folder / "tokenizer.json"))
    ids = found.encode("Two words, naïve 漢字 🎉")
    return found.fingerprint, found.chat_template, ids.tolist(), found.decode(ids), found.end_ids


def _make_shards(folder: Path, corpus: Path) -> None:
    prepared = prepare(str(corpus), "bytes", folder / "cache", heldout_every=4, shard_tokens=8000)
    made = prepared.train.directory  # type: ignore[union-attr]
    for path in made.iterdir():
        path.rename(folder / path.name)


def _read_shards(folder: Path) -> Any:
    opened = [token_shards.TokenShards(folder, split) for split in ("train", "heldout")]
    for shards in opened:
        shards.verify()
    tokens = [hashlib.sha256(shards.read(0, shards.num_tokens).tobytes()).hexdigest() for shards in opened]
    return tokens, [(shards.vocab_size, shards.separator_id, shards.num_bytes) for shards in opened]


def _make_parquet(folder: Path, corpus: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=20)


def _make_text(folder: Path, corpus: Path) -> None:
    lines = "\n".join(map(json.dumps, ROWS)).encode() + b"\n"
    (folder / "plain.jsonl").write_bytes(lines)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    with pyarrow.CompressedOutputStream(str(folder / "packed.jsonl.zst"), "zstd") as file:
        file.write(lines)
    (folder / "words.txt").write_bytes("".join(row["text"] for row in ROWS).encode())


def _make_chats(folder: Path, corpus: Path) -> None:
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)) + "\n")


def _read_corpus(folder: Path) -> Any:
    return list(open_corpus(str(folder)).documents())


def _read_chats(folder: Path) -> Any:
    return list(read_examples(open_corpus(str(folder), frozenset({".jsonl"}))))


def _make_export(folder: Path, corpus: Path) -> None:
    WRITES["export"](corpus).write(folder)
    for path in (folder / "out").iterdir():
        path.rename(folder / path.name)


def _make_sharded(folder: Path, corpus: Path) -> None:
    """As from the hub: several files with an index, without checksums."""
    from tilemoe.models.huggingface import save_hf

    _make_export(folder / "whole", corpus)
    save_hf(load_hf(folder / "whole"), folder / "out", max_shard_bytes=20_000)
    for path in (folder / "out").iterdir():
        path.rename(folder / path.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "whole" / name).rename(folder / name)


def _read_model(folder: Path) -> Any:
    from tilemoe.train.checkpoints.restore import restore_model

    model, tokenizer = restore_model(folder, "cpu")
    return digest(model.state_dict()), tokenizer.fingerprint


def _verified(folder: Path) -> Any:
    findings = list(verify(folder))
    wrong = [finding.line for finding in findings if not finding.is_right]
    if wrong:
        raise ValueError(wrong[0])
    return len(findings)


def _make_metrics(folder: Path, corpus: Path) -> None:
    rows = [{"kind": kind, "step": step, "nats_per_token": 2.5} for step in range(1, 20) for kind in ("train", "eval")]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


_STEP = "step_00000001/"
_JOB = tuple(_STEP + name for name in (".metadata", "__0_0.distcp", "state.json"))
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_ALONE = tuple(_STEP + name for name in ("model.safetensors", "optimizer.safetensors", "state.json", *_TOKENIZER))
_INDEXED = ("config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors", *_TOKENIZER)
_SHARDS = ("index.json", "train-00000.bin", "heldout-00000.bin")

READS = {
    "checkpoint": Read(_checkpoint_of("checkpoint"), (*_ALONE, _STEP + "manifest.json"), checkpoint_read, True),
    "signed checkpoint": Read(_checkpoint_of("checkpoint"), _ALONE, checkpoint_read, sign=_sign_manifest),
    "job's checkpoint": Read(
        _checkpoint_of("distributed checkpoint"), (*_JOB, _STEP + "manifest.json"), checkpoint_read, True
    ),
    "signed job's checkpoint": Read(
        _checkpoint_of("distributed checkpoint"), _JOB, checkpoint_read, sign=_sign_manifest
    ),
    "recipe": Read(_make_recipe, ("mine.json",), lambda folder: load_recipe(folder / "mine.json")),
    "tokenizer": Read(_make_tokenizer, _TOKENIZER, _read_tokenizer),
    "token shards": Read(_make_shards, _SHARDS, _read_shards, True),
    "signed token shards": Read(_make_shards, _SHARDS[:1], _read_shards, sign=_sign_index),
    "parquet": Read(_make_parquet, ("rows.parquet",), _read_corpus),
    "text": Read(_make_text, ("plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "words.txt"), _read_corpus),
    "conversations": Read(_make_chats, ("chats.jsonl",), _read_chats),
    "model": Read(_make_sharded, _INDEXED, _read_model),
    "export": Read(_make_export, ("config.json", "model.safetensors", *_TOKENIZER, "checksums.json"), _verified, True),
    "metrics": Read(_make_metrics, ("metrics.jsonl",), lambda folder: list(read_metrics(folder / "metrics.jsonl"))),
}

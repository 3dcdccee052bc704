"""Token shards: .bin files of little-endian token ids without a header, read on demand, and their index.json.

A folder holds both splits: ``train-00000.bin``, ``heldout-00000.bin``, ... in uint16 if all values are below 65536,
else in uint32. For each split the index has the number of tokens, the bytes of text, and each shard's number of tokens
and SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tilemoe.checks import parse_json, require_int
from tilemoe.data.corpus import Split
from tilemoe.files import open_regular, read_text, sha256_file

FORMAT = "tilemoe-token-shards"
VERSION = 1
INDEX = "index.json"
SHARD_TOKENS = 1 << 28  # tokens of a full shard: 512 MiB in uint16

_DTYPES = MappingProxyType({name: np.dtype(name) for name in ("<u2", "<u4")})
_HASH_THREADS = 8
_AGAIN = "delete the folder and it is prepared again"


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Appends token ids to the shards of one split. A context manager: leaving it closes the open shard."""

    def __init__(self, directory: Path, split: Split, vocab_size: int, shard_tokens: int = SHARD_TOKENS) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens must be >= 1, got {shard_tokens}")
        self.num_tokens = 0
        self.num_bytes = 0
        self._directory, self._split = directory, split
        self._vocab_size, self._shard_tokens = vocab_size, shard_tokens
        self._dtype = token_dtype(vocab_size)
        self._shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._tokens_in_shard = 0

    def __exit__(self, *error: object) -> None:
        self._close_shard()

    def append(self, ids: NDArray[np.int64], num_bytes: int) -> None:
        """Add ``ids`` (any length), which encode ``num_bytes`` bytes of text. ValueError for an id out of range."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            wrong = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
            raise ValueError(
                f"token id {wrong} is outside the tokenizer's vocabulary of {self._vocab_size}; "
                "correct the vocabulary of its tokenizer.json"
            )
        tokens = ids.astype(self._dtype)
        while tokens.size:
            if self._file is None:
                self._file = (self._directory / _name(self._split, len(self._shards))).open("xb")
            part = tokens[: self._shard_tokens - self._tokens_in_shard]
            self._file.write(part.tobytes())
            self._digest.update(part.tobytes())
            self._tokens_in_shard += part.size
            if self._tokens_in_shard == self._shard_tokens:
                self._close_shard()
            tokens = tokens[part.size :]
        self.num_tokens += ids.size
        self.num_bytes += num_bytes

    def entry(self) -> dict[str, Any]:
        """The split's part of the index, once everything is appended."""
        self._close_shard()
        return {"num_tokens": self.num_tokens, "num_bytes": self.num_bytes, "shards": self._shards}

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        name = Path(self._file.name).name
        self._shards.append({"file": name, "num_tokens": self._tokens_in_shard, "sha256": self._digest.hexdigest()})
        self._file, self._digest, self._tokens_in_shard = None, hashlib.sha256(), 0


class TokenShards:
    """One split of prepared token shards. Files stay open, not memory-mapped: a truncated one would end the process.

    ``num_tokens``  number of tokens, with the separator after each document; all are targets (``num_targets``).
    ``num_bytes``   UTF-8 bytes of the texts, plus one for each separator: for any tokenizer, the mean loss in
                    nats/token times ``num_tokens / num_bytes`` is the loss in nats/byte.
    """

    def __init__(self, directory: Path, split: Split) -> None:
        """Open the shards of ``split``; ValueError if the index or a shard is missing, damaged or of another size."""
        index = read_index(directory)
        self.directory, self.split = directory, split
        try:
            entry = index["splits"][split]
            self._dtype = _DTYPES[index["dtype"]]
            self.separator_id, self.vocab_size = _count(index["separator_id"]), _count(index["vocab_size"])
            self.num_tokens = self.num_targets = _count(entry["num_tokens"], 1)
            self.num_bytes = _count(entry["num_bytes"])
            self._shards = [  # only files in its own folder, whatever the index names
                (directory / _name(split, number), _count(shard["num_tokens"]), shard["sha256"])
                for number, shard in enumerate(entry["shards"])
            ]
            _count(index.get("undecodable_bytes", 0))
            tuple(index.get("notes", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise _bad_index(directory, f"{type(error).__name__}: {error}") from error
        with contextlib.ExitStack() as stack:
            self._files = [
                stack.enter_context(_open_shard(path, self._dtype, count)) for path, count, _ in self._shards
            ]
            weakref.finalize(self, stack.pop_all().close)
        self._start_of_shard = np.cumsum([0, *(count for _, count, _ in self._shards)])
        if self._start_of_shard[-1] != self.num_tokens:
            raise _bad_index(directory, "the shards and the index differ in the number of tokens")

    def __repr__(self) -> str:
        return f"TokenShards({str(self.directory)!r}, {self.split!r}, num_tokens={self.num_tokens})"

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """(length,) int64: tokens [start, start + length) of the split, which may span shards.

        ValueError: the split has no such tokens, or a shard was truncated meanwhile.
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise ValueError(
                f"start {start} and length {length} reach outside the {self.num_tokens} tokens of {self!r}"
            )
        parts = [np.empty(0, dtype=np.int64)]
        while length:
            shard = int(np.searchsorted(self._start_of_shard, start, side="right")) - 1
            count = min(length, int(self._start_of_shard[shard + 1]) - start)
            parts.append(self._read_shard(shard, start - int(self._start_of_shard[shard]), count))
            start, length = start + count, length - count
        return np.concatenate(parts)

    def _read_shard(self, shard: int, start: int, count: int) -> NDArray[np.int64]:
        size, path = self._dtype.itemsize, self._shards[shard][0]
        try:
            content = os.pread(self._files[shard].fileno(), count * size, start * size)
        except OSError as error:
            raise ValueError(f"token shard {path}: cannot be read ({error.strerror}); {_AGAIN}") from error
        if len(content) != count * size:
            raise ValueError(f"token shard {path}: it was truncated while it was in use; {_AGAIN}")
        return np.frombuffer(content, dtype=self._dtype).astype(np.int64)

    def verify(self) -> None:
        """Read everything and compare the checksums; ValueError naming the first shard that differs."""
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            digests = pool.map(sha256_file, [path for path, _, _ in self._shards])
            for (path, _, expected), found in zip(self._shards, digests, strict=True):
                if found != expected:
                    raise ValueError(f"token shard {path}: its content is not what was written; {_AGAIN}")


def _name(split: Split, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def _count(value: Any, least: int = 0) -> int:
    require_int("each number", value, least)
    return int(value)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smaller of uint16 and uint32, little-endian, that holds ids below ``vocab_size``."""
    assert 0 < vocab_size <= 1 << 32
    return _DTYPES["<u2" if vocab_size <= 1 << 16 else "<u4"]


def write_index(directory: Path, fields: Mapping[str, Any]) -> None:
    """Write index.json: ``fields``, the format and a checksum over both."""
    content = {"format": FORMAT, "version": VERSION, **fields}
    content["checksum"] = _index_checksum(content)
    (directory / INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_index(directory: Path) -> dict[str, Any]:
    """The fields of index.json; ValueError if it is missing, damaged or of another version."""
    try:
        content = parse_json(read_text(directory / INDEX))
    except OSError as error:
        raise _bad_index(directory, error.strerror or str(error)) from error
    except ValueError as error:
        raise _bad_index(directory, "not JSON") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _bad_index(directory, "not an index of token shards")
    if content.get("version") != VERSION:
        raise _bad_index(directory, f"format version {content.get('version')!r}, this release reads {VERSION}")
    if content.pop("checksum", None) != _index_checksum(content):
        raise _bad_index(directory, "checksum mismatch")
    return content


def _index_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


def _bad_index(directory: Path, reason: str) -> ValueError:
    return ValueError(f"token shards {directory / INDEX}: cannot be used ({reason}); {_AGAIN}")


def _open_shard(path: Path, dtype: np.dtype[Any], num_tokens: int) -> BinaryIO:
    try:
        size = path.stat().st_size
        if size != num_tokens * dtype.itemsize:
            raise ValueError(
                f"token shard {path}: {size} bytes instead of {num_tokens * dtype.itemsize}, it was truncated or "
                f"changed; {_AGAIN}"
            )
        return open_regular(path)
    except OSError as error:
        raise ValueError(f"token shard {path}: cannot be read ({error.strerror}); {_AGAIN}") from error

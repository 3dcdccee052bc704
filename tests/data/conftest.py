"""Small corpora and token shards on disk, shared by the tests of the data package."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tilemoe.data.shards import ShardWriter, TokenShards, token_dtype, write_index

TEXTS = [f"document {i}\n" + "naïve café 漢字 🎉 = [1, 2]\n" * (1 + i % 5) for i in range(45)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus folder of 45 .txt files, sorted as ``TEXTS``."""
    root = tmp_path / "corpus"
    root.mkdir()
    for index, text in enumerate(TEXTS):
        (root / f"{index:03d}.txt").write_bytes(text.encode())
    return root


@pytest.fixture
def texts() -> list[str]:
    return list(TEXTS)


@pytest.fixture
def write_shards(tmp_path: Path) -> Callable[..., TokenShards]:
    """Write ``train`` tokens as shards, with a one-token held-out split, and open them."""

    def write(train: Sequence[int] | np.ndarray, vocab_size: int = 1 << 16, shard_tokens: int = 7) -> TokenShards:
        directory = tmp_path / f"shards-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        entries = {}
        for split, tokens in (("train", train), ("heldout", [0])):
            with ShardWriter(directory, split, vocab_size, shard_tokens) as writer:
                ids = np.asarray(tokens, dtype=np.int64)
                for part in np.array_split(ids, 3):
                    writer.append(part, num_bytes=part.size)
                entries[split] = writer.entry()
        fields = {"vocab_size": vocab_size, "separator_id": 0, "dtype": token_dtype(vocab_size).str, "splits": entries}
        write_index(directory, fields)
        return TokenShards(directory, "train")

    return write

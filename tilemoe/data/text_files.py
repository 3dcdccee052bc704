"""Text files, plain or compressed (.gz, .zst), and the JSON objects of their lines."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

COMPRESSED = frozenset({".gz", ".zst"})


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, in lower case: ".jsonl" of a.jsonl and of a.jsonl.gz."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix in COMPRESSED and inner != ".parquet" else suffix  # parquet compresses by itself


@contextlib.contextmanager
def open_text(path: Path, newline: str) -> Iterator[TextIO]:
    """The text of a file, decompressed where its suffix says so; bytes that are not UTF-8 become U+FFFD.

    ValueError: it is damaged or cut short, or .zst cannot be read here. A file that cannot be opened is an OSError.
    """
    suffix = path.suffix.lower()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open_binary(path, suffix))
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline=newline)
        try:
            yield stack.enter_context(text)
        except (EOFError, zlib.error, OSError) as error:
            if suffix in COMPRESSED and not getattr(error, "errno", None):  # no error of the system's
                raise ValueError(f"{path}: not a readable {suffix} file; write or copy it again") from error
            raise


def _open_binary(path: Path, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix != ".zst":
        return path.open("rb")
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"{path}: reading .zst needs pyarrow; pip install 'tilemoe[data]'") from error
    # Not zstandard, to which a file cut short is one that ends there.
    return cast(BinaryIO, pyarrow.CompressedInputStream(path.open("rb"), "zstd"))


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1 on, JSON object) of each line that is not blank; ValueError naming a line that is none."""
    with open_text(path, "\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: this line is not JSON; correct or remove it") from error
            yield number, record if isinstance(record, dict) else {}

"""Text files, plain or compressed (.gz, .zst), and the JSON objects of their lines."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, cast

from tilemoe.files import open_regular

Undecodable = Literal["error", "replace"]  # for bytes that are not UTF-8
UNDECODABLE = re.compile("[\udc80-\udcff]")  # such a byte, as Python's "surrogateescape" decodes it; no character
COMPRESSED = frozenset({".gz", ".zst"})
LONGEST_LINE = 1 << 26  # characters
_MOST_PER_BYTE, _ALWAYS = 256, 1 << 24  # characters of a file's texts: at most so many per byte, but always so many


def kind_of(path: Path) -> str:
    """The suffix of a file's content, in lower case: ".jsonl" for a.jsonl and for a.jsonl.gz."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix in COMPRESSED and inner != ".parquet" else suffix  # parquet compresses by itself


@contextlib.contextmanager
def open_text(path: Path, newline: str, undecodable: Undecodable) -> Iterator[TextIO]:
    """The text of a file, decompressed according to its suffix, without a UTF-8 BOM.

    ``undecodable``: bytes that are not UTF-8 are an error, or become characters that `UNDECODABLE` matches ("replace").
    ValueError: the file is damaged, cut short or not UTF-8, or .zst cannot be read here. OSError: it cannot be opened.
    """
    suffix = path.suffix.lower()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open_binary(path, suffix))
        errors = "strict" if undecodable == "error" else "surrogateescape"
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors=errors, newline=newline)
        try:
            try:
                yield stack.enter_context(text)
            except UnicodeDecodeError as error:
                raise not_utf8(f"{path}: byte {_first_undecodable(path)}") from error
        except (EOFError, zlib.error, OSError) as error:
            if suffix in COMPRESSED and not getattr(error, "errno", None):  # not an error of the system
                raise ValueError(f"{path}: not a readable {suffix} file; write or copy it again") from error
            raise


def not_utf8(place: str) -> ValueError:
    return ValueError(f"{place} is not UTF-8; convert the text to UTF-8, or set data.undecodable to replace")


def too_long(what: str, longest: int) -> ValueError:
    return ValueError(f"{what} has more than {longest:,} characters; divide or remove it, or raise data.longest_line")


def measured(path: Path, texts: Iterable[str]) -> Iterator[str]:
    """The ``texts`` of a file. ValueError: they are too long for its size, as in a decompression bomb."""
    left = max(_ALWAYS, _MOST_PER_BYTE * path.stat().st_size)
    for text in texts:
        left -= len(text)
        if left < 0:
            raise ValueError(f"{path}: decompresses to over {_MOST_PER_BYTE} characters per byte; give it uncompressed")
        yield text


def _first_undecodable(path: Path) -> int:
    """The offset of the first byte that is not UTF-8 in the decompressed file."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with _open_binary(path, path.suffix.lower()) as file:
        try:
            while chunk := file.read(io.DEFAULT_BUFFER_SIZE):
                read += len(chunk)
                decoder.decode(chunk)
            decoder.decode(b"", True)
        except UnicodeDecodeError as error:  # error.object ends with the last chunk
            read += error.start - len(error.object)
    return read


def _open_binary(path: Path, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        open_regular(path).close()  # refuse a pipe: gzip would wait for its writer
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix != ".zst":
        return open_regular(path)
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"{path}: reading .zst needs pyarrow; pip install 'tilemoe[data]'") from error
    # Not the package zstandard, which takes a truncated file for a complete one.
    return cast(BinaryIO, pyarrow.CompressedInputStream(open_regular(path), "zstd"))


def read_records(
    path: Path, undecodable: Undecodable, longest_line: int = LONGEST_LINE
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1 on, JSON object) of each line that is not blank. ValueError, with the line: it is no JSON.

    ``undecodable``: see `open_text`; a replaced byte is U+FFFD. ``longest_line``: in characters; no more is read.
    """
    with open_text(path, "\n", undecodable) as file:
        lines = measured(path, iter(lambda: file.readline(longest_line + 1), ""))
        for number, line in enumerate(lines, start=1):
            if len(line) > longest_line and not line.endswith("\n"):
                raise too_long(f"{path}:{number}: this line", longest_line)
            if line.isspace():
                continue
            try:
                record = json.loads(UNDECODABLE.sub("\N{REPLACEMENT CHARACTER}", line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: this line is not JSON; correct or remove it") from error
            yield number, record if isinstance(record, dict) else {}

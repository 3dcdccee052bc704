"""Corpora: text files, tables of texts and Python's own standard library as a stream of documents.

Documents are ordered by the files' POSIX paths relative to the corpus, and within a file by their place in it; nothing
else has an influence. One document at a time is in memory; compressed files and lines are read within bounds.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, cast, get_args

from tilemoe.checks import expand_user, require_int, told
from tilemoe.files import open_regular

Undecodable = Literal["error", "replace"]  # for bytes that are not UTF-8
UNDECODABLE = re.compile("[\udc80-\udcff]")  # such a byte, as Python's "surrogateescape" decodes it; no character
COMPRESSED = frozenset({".gz", ".zst"})
LONGEST_LINE = 1 << 26  # characters
Split = Literal["train", "heldout"]
TextNumber = tuple[int, int]  # of the file, and of the text in it
SPLITS: tuple[Split, ...] = get_args(Split)
STDLIB = "stdlib"
TEXT_SUFFIXES = frozenset({".txt", ".md", ".py"})
SUFFIXES = TEXT_SUFFIXES | {".jsonl", ".parquet"}
TEXT_FIELDS = ("text", "content")  # the first that a .jsonl line or .parquet table has is read
_CHAT_FIELDS = frozenset({"messages", "conversations", "prompt", "instruction"})  # `tilemoe.data.conversations`

_PIECE = 1 << 20  # characters of a text file in one document; a longer file is cut at a line end
_PARQUET_ROWS = 4  # in memory at once: a small file may repeat a large text in many rows
_FEW_NUL = 64  # a text has at most one NUL per so many characters; UTF-16 without a BOM has one in each blank at least
_MOST_PER_BYTE, _ALWAYS = 256, 1 << 24  # characters of a file's texts: at most so many per byte, but always so many
_PER_TEXT = 32  # characters that a text counts more than it has, because empty ones take time, too
_NAMED = 5  # skipped files that messages name
_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, relative to ``root`` and sorted. Make one with ``open_corpus``.

    skipped       other entries of the folder, which are not read; those that are no regular files come first
    undecodable   bytes that are not UTF-8 are an error, or each becomes U+FFFD ("replace")
    longest_line  characters that a line of .jsonl or a text of .parquet may have
    """

    name: str
    root: Path
    files: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    undecodable: Undecodable = "error"
    longest_line: int = LONGEST_LINE

    def documents(self) -> Iterator[str]:
        """Every document's text in order, including empty ones (they have a position but no tokens).

        A text file (.txt, .md, .py) is one document, or several of about 1 Mi characters cut at line ends. A line of a
        .jsonl file and a row of a .parquet file are one document each. Text and .jsonl files may be compressed, .gz or
        .zst.
        ValueError: a file cannot be read or is not UTF-8; it names the file and the line, row or byte.
        """
        return (document for _, document in self.parts())

    def parts(self) -> Iterator[tuple[TextNumber, str]]:
        """`documents`, each with a number; parts of one text that was cut have the same number."""
        for file, name in enumerate(self.files):
            path = self.root / name
            is_text = kind_of(path) in TEXT_SUFFIXES
            try:
                for place, text in enumerate(self._texts(path)):
                    yield (file, 0 if is_text else place), clean_text(text)
            except OSError as error:
                raise unreadable(path, error) from error

    def _texts(self, path: Path) -> Iterator[str]:
        kind = kind_of(path)
        if kind == ".jsonl":
            return _read_jsonl(path, self.undecodable, self.longest_line)
        if kind == ".parquet":
            return measured(path, _read_parquet(path, self.undecodable, self.longest_line))
        return measured(path, _read_text(path, self.undecodable))

    def undecodable_bytes(self) -> int:
        """The number of bytes in the texts that are not UTF-8."""
        count = 0
        for path in (self.root / name for name in self.files):
            is_table = kind_of(path) == ".parquet"
            texts = _read_parquet(path, "replace", self.longest_line) if is_table else _read_text(path, "replace")
            count += sum(len(UNDECODABLE.findall(text)) for text in texts)
        return count

    def read_and_skipped(self, index: Mapping[str, Any]) -> str:
        """A text: how many files are read, and which are not. The shards' ``index`` has `undecodable_bytes`."""
        names = ", ".join(self.skipped[:_NAMED]) + (", ..." if len(self.skipped) > _NAMED else "")
        skipped = f", {len(self.skipped):,} skipped ({told(names)})" if names else ""
        replaced = index.get("undecodable_bytes", 0)
        counted = f", {replaced:,} bytes replaced that are not UTF-8" if replaced else ""
        return f"files read: {len(self.files):,}{skipped}{counted}"

    def fingerprint(self) -> str:
        """Hex digest of the files' names, sizes and modification times; no content is read."""
        digest = hashlib.sha256()
        for name in self.files:
            stat = _stat(self.root / name)
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def file_bytes(self) -> int:
        """Total size of the files on disk, in bytes."""
        return sum(_stat(self.root / name).st_size for name in self.files)


def open_corpus(
    spec: str,
    suffixes: frozenset[str] = SUFFIXES,
    undecodable: Undecodable = "error",
    longest_line: int = LONGEST_LINE,
) -> Corpus:
    """The corpus that ``spec`` names: "stdlib", or the path of a file or of a folder.

    "stdlib" is the .py files of Python's standard library without its tests; bytes that are not UTF-8 are always
    replaced in them. A folder is searched recursively for files with ``suffixes``, by default .txt, .md, .py, .jsonl
    and .parquet; all but .parquet may also be compressed, .gz or .zst. Hidden entries and __pycache__ are left out.
    (For a folder that is itself called stdlib, give "./stdlib".)
    ValueError: the path is missing, the file is of another kind, or the folder has no usable file.
    """
    known = ", ".join(sorted(suffixes))
    if spec == STDLIB and ".py" in suffixes:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = _walk(root, lambda name: name in _STDLIB_SKIPPED or name.startswith("config-"))
        files = tuple(name for name in found if kind_of(Path(name)) == ".py" and (root / name).is_file())
        if not files:
            raise ValueError(f"corpus 'stdlib': this Python keeps no .py files in {root}; give the path of a text file")
        return Corpus(STDLIB, root, files, undecodable="replace")
    if not spec:  # Path("") would be the current folder
        raise ValueError("corpus: the name is empty; give 'stdlib' or a path")
    path = expand_user(spec)
    if path.is_dir():
        found = _walk(path, leaves_out)
        irregular = [name for name in found if not (path / name).is_file()]  # pipes, and links that end at no file
        files = tuple(sorted(name for name in {*found} - {*irregular} if kind_of(Path(name)) in suffixes))
        others = sorted({*found} - {*files, *irregular})
        skipped = *(f"{name} is no regular file" for name in irregular), *others
        if not files:
            raise ValueError(f"corpus {spec!r}: no usable file in this folder; put {known} files into it")
        return Corpus(spec, path, files, skipped, undecodable, longest_line)
    if not path.exists():
        raise ValueError(
            f"corpus {spec!r}: no such file or folder; give 'stdlib' or the path of a {known} file "
            "or of a folder of them"
        )
    if kind_of(path) not in suffixes:
        raise ValueError(f"corpus {spec!r}: cannot read this kind of file; convert it to {known}")
    if not path.is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"corpus {spec!r}: it is no regular file; write its content to one")
    return Corpus(spec, path.parent, (path.name,), undecodable=undecodable, longest_line=longest_line)


def leaves_out(name: str) -> bool:
    """Whether a corpus leaves out a file or folder of this name."""
    return name.startswith(".") or name == "__pycache__"


def clean_text(text: str) -> str:
    """``text`` without NUL, which separates documents, and with U+FFFD for lone surrogates, which UTF-8 lacks."""
    text = text.replace("\0", "")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _walk(root: Path, is_hidden: Callable[[str], bool]) -> list[str]:
    """Sorted POSIX paths, relative to ``root``, of all entries that are no folders and have no hidden name in the path.

    A link to a folder is not followed; it is one of the entries.
    """

    found: list[str] = []
    folders = [os.fspath(root)]
    while folders:  # os.walk recurses for each level, and a folder may have a thousand levels
        try:
            entries = [entry for entry in os.scandir(folders.pop()) if not is_hidden(entry.name)]
        except OSError as error:
            raise unreadable(root, error) from error
        for entry in entries:
            (folders if entry.is_dir(follow_symlinks=False) else found).append(entry.path)
    return sorted(Path(path).relative_to(root).as_posix() for path in found)


def _read_text(path: Path, undecodable: Undecodable) -> Iterator[str]:
    """The pieces of a text file, usually one."""
    place = 0
    with open_text(path, "", undecodable) as file:
        pieces = iter(lambda: file.read(_PIECE) + file.readline(_PIECE), "")  # bounded, as a line may be endless
        for text in chain([next(pieces, "")], pieces):  # an empty file is an empty text
            if undecodable == "error" and text.count("\0") > len(text) // _FEW_NUL:
                place += len(text[: text.index("\0")].encode("utf-8"))
                raise not_utf8(f"{path}: text with many NUL bytes, such as byte {place},")
            place += len(text.encode("utf-8", "surrogateescape"))
            yield text


def _read_jsonl(path: Path, undecodable: Undecodable, longest_line: int) -> Iterator[str]:
    """The text of each line that is not blank."""
    for number, fields in read_records(path, undecodable, longest_line):
        text = next((fields[key] for key in TEXT_FIELDS if key in fields), None)
        if not isinstance(text, str):
            fix = "correct or remove the line" if _CHAT_FIELDS.isdisjoint(fields) else "use --data.format chat"
            raise ValueError(
                f"{path}:{number}: no string in a field {' or '.join(map(repr, TEXT_FIELDS))}, found "
                f"{', '.join(map(repr, fields)) or 'no field'}; {fix}"
            )
        yield text


def _read_parquet(path: Path, undecodable: Undecodable, longest_line: int) -> Iterator[str]:
    """The text of each row; one batch of rows of the text column is in memory at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading .parquet needs pyarrow; pip install 'tilemoe[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            column = next((name for name in TEXT_FIELDS if name in names), None)
            if column is None:
                is_text = _CHAT_FIELDS.isdisjoint(names)
                fix = "rename the column that holds the text" if is_text else "--data.format chat reads only .jsonl"
                raise ValueError(
                    f"{path}: no column {' or '.join(map(repr, TEXT_FIELDS))} among {', '.join(names)}; {fix}"
                )
            batches = file.iter_batches(batch_size=_PARQUET_ROWS, columns=[column])
            for row, value in enumerate(chain.from_iterable(batch.column(0) for batch in batches)):
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    if undecodable == "error":
                        raise not_utf8(f"{path}[{row}]: byte {error.start} of {column!r}") from error
                    text = error.object.decode("utf-8", "surrogateescape")
                if not isinstance(text, str):
                    raise ValueError(f"{path}[{row}]: {column!r} holds no string; correct or remove the row")
                if len(text) > longest_line:
                    raise too_long(f"{path}[{row}]: {column!r}", longest_line)
                yield text
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable .parquet file; write or copy it again") from error


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(f"{error.filename or path}: cannot be read ({reason}); check that it exists and its permissions")


def split_parts(corpus: Corpus, heldout_every: int) -> Iterator[tuple[TextNumber, Split, str]]:
    """(number, split, text) of every part that is not empty, in the corpus' order.

    Document ``heldout_every - 1`` and every ``heldout_every``-th after it are held out. If the corpus has fewer than
    ``heldout_every`` documents, such as a single text file, the last ``1 / heldout_every`` of each document is held out
    instead, from the start of a line if one is near before that point. Successive parts of one number are one text.
    ValueError unless heldout_every >= 2.
    """
    require_int("heldout_every", heldout_every, 2)
    has_whole_documents = sum(1 for _ in islice(corpus.documents(), heldout_every)) == heldout_every

    def splits(place: int, text: str) -> Iterable[tuple[Split, str]]:
        if not has_whole_documents:
            return _by_end(text, heldout_every)
        return [("heldout" if (place + 1) % heldout_every == 0 else "train", text)]

    numbered = enumerate(corpus.parts())
    return ((number, *pair) for i, (number, text) in numbered for pair in splits(i, text) if pair[1])


def _by_end(text: str, every: int) -> list[tuple[Split, str]]:
    share = len(text) // every
    end = len(text) - share
    # Search a line start no further than one more share back: a short first line must not hold out all the rest.
    cut = text.rfind("\n", max(end - share, 0), end) + 1 or end
    return [("train", text[:cut]), ("heldout", text[cut:])]


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
        left -= len(text) + _PER_TEXT
        if left < 0:
            raise ValueError(f"{path}: too many texts, or too long, for its {path.stat().st_size} bytes; uncompress it")
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

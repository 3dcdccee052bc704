"""Corpora: what is read, in which order, which text is held out, and what a mistake says."""

import gzip
import inspect
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers import raises_one_line, traced_memory
from hypothesis import given
from hypothesis import strategies as st

from tilemoe.data import corpus as corpus_module
from tilemoe.data.conversations import read_examples
from tilemoe.data.corpus import Corpus, _by_end, clean_text, open_corpus, split_parts


def read_all(spec: Path | str) -> list[str]:
    return list(open_corpus(str(spec)).documents())


def error_of(spec: Path | str) -> str:
    with raises_one_line("") as caught:
        read_all(spec)
    return str(caught.value)


def test_stdlib_skips_every_test_folder_and_says_where_no_sources_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = ["b.py", "a/x.py", "a.py", "idlelib/run.py"]
    skipped = ["test/t.py", "a/tests/t.py", "idlelib/idle_test/t.py", "site-packages/s.py", "dist-packages/d.py"]
    skipped += ["__pycache__/c.py", "config-3.11-x86_64/c.py", "notes.txt"]
    for name in kept + skipped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(corpus_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert read_all("stdlib") == sorted(kept)
    for name in kept:
        (tmp_path / name).unlink()
    assert str(tmp_path) in error_of("stdlib")


def test_folder_is_read_recursively_sorted_and_by_kind(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "b" / "c.PY").write_text("code")
    (tmp_path / "b.md").write_text("mark")
    (tmp_path / "z.csv").write_text("left out")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"content": "two", "id": 3}\r\n')
    table = pyarrow.table({"id": list(range(3000)), "text": [f"row {i}" for i in range(3000)]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=700)
    assert read_all(tmp_path) == ["one", "two", "mark", "code", *(f"row {i}" for i in range(3000))]


def test_text_is_kept_as_it_is_but_for_nul_bom_and_invalid_bytes(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfx\r\ny\rz\0\n\xff\xfe end")
    assert error_of(path).startswith(f"{path}: byte 11 is not UTF-8")
    corpus = open_corpus(str(path), undecodable="replace")
    assert list(corpus.documents()) == ["x\r\ny\rz\n\ufffd\ufffd end"]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}
TEXT = "naïve café, 10 €: “fox”\n" * 400


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("content", "first", "count"),
    [
        (TEXT.replace("€", "").replace("“", "").replace("”", "").encode("latin-1"), 2, 800),
        (TEXT.encode("utf-16"), 0, None),  # with its mark
        (b"\xef\xbb\xbf" + TEXT.encode() + b"\xe2\x82", 3 + len(TEXT.encode()), 2),  # cut within a character
        (TEXT.encode() * 9 + b"\x80 " + TEXT.encode(), 9 * len(TEXT.encode()), 1),
        (random.Random(0).randbytes(20_000), None, None),
    ],
)
def test_text_that_is_not_utf8(content: bytes, first: int | None, count: int | None, packed: str, tmp_path: Path):
    """An error with the file and the place, in the file as decompressed; or replaced, and counted."""
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(COMPRESS.get(packed, bytes)(content))
    with pytest.raises(UnicodeDecodeError) as caught:
        content.decode("utf-8")
    place = caught.value.start
    assert first in (None, place)
    assert error_of(path).startswith(f"{path}: byte {place} is not UTF-8; convert the text to UTF-8, or set data.undec")
    corpus = open_corpus(str(path), undecodable="replace")
    assert count in (None, corpus.undecodable_bytes())
    assert "".join(corpus.documents()).count("\ufffd") == corpus.undecodable_bytes() > 0


def test_utf16_without_its_mark_is_no_text(tmp_path: Path):
    for text, byte in (("plain text, " * 99, 1), ("привет мир " * 99, 13)):
        (tmp_path / "a.txt").write_bytes(text.encode("utf-16-le"))
        assert f"a.txt: text with many NUL bytes, such as byte {byte}, is not UTF-8; convert" in error_of(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"plain\n" * (1 << 18) + ("text " * 250_000).encode("utf-16-le"))
    assert f"a.txt: text with many NUL bytes, such as byte {6 * (1 << 18) + 1}," in error_of(tmp_path)


def test_lines_and_rows_that_are_not_utf8(tmp_path: Path):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("fox", "naïve", "é")]
    for name, path in (("text", tmp_path / "a.jsonl"), ("chat", tmp_path / "b.jsonl")):
        path.write_bytes("\n".join(lines).encode("latin-1"))
        first = "\n".join(lines).index("ï")
        with raises_one_line(f"{path}: byte {first} is not UTF-8"):
            list(open_corpus(str(path)).documents() if name == "text" else read_examples(open_corpus(str(path))))
        corpus = open_corpus(str(path), undecodable="replace")
        assert (list(corpus.documents()), corpus.undecodable_bytes()) == (["fox", "na\ufffdve", "\ufffd"], 2)
    column = pyarrow.array([b"fox", "na\u00efve".encode("latin-1")]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "c.parquet")
    assert error_of(tmp_path / "c.parquet").startswith(f"{tmp_path / 'c.parquet'}[1]: byte 2 of 'text' is not UTF-8")
    corpus = open_corpus(str(tmp_path / "c.parquet"), undecodable="replace")
    assert (list(corpus.documents()), corpus.undecodable_bytes()) == (["fox", "na\ufffdve"], 1)


def test_the_files_read_and_skipped_are_told(tmp_path: Path):
    for name in ("a.txt", "b.md", "c\x1b.csv", ".hidden", "d/e.pdf", *(f"z{i}.bin" for i in range(7))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"fox\xff" * 9)
    corpus = open_corpus(str(tmp_path), undecodable="replace")
    told = corpus.read_and_skipped({"undecodable_bytes": corpus.undecodable_bytes()})
    skipped = "9 skipped (c\ufffd.csv, d/e.pdf, z0.bin, z1.bin, z2.bin, ...)"
    assert told == f"files read: 2, {skipped}, 18 bytes replaced that are not UTF-8"
    assert open_corpus(str(tmp_path / "a.txt")).read_and_skipped({}) == "files read: 1"
    stdlib = open_corpus("stdlib")
    assert (stdlib.skipped, stdlib.undecodable) == ((), "replace")


def test_lone_surrogates_become_replacement_characters(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b\\ud83c\\udf89"}')
    assert read_all(tmp_path) == ["a\ufffdb🎉"]
    assert clean_text("plain\0 é") == "plain é"


def test_long_text_file_is_cut_at_line_ends_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_module, "_PIECE", 100)
    content = "".join(f"line {i} é\n" for i in range(200))
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    pieces = read_all(tmp_path / "a.txt")
    assert "".join(pieces) == content
    assert len(pieces) > 10
    assert all(text.endswith("\n") and 100 <= len(text) < 120 for text in pieces[:-1])
    (tmp_path / "a.txt").write_text("x" * 1001)  # a line without an end
    lengths = list(map(len, read_all(tmp_path / "a.txt")))
    assert (sum(lengths), max(lengths)) == (1001, 200)


def test_empty_file_keeps_its_position(tmp_path: Path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("b")
    assert read_all(tmp_path) == ["", "b"]


def test_fingerprint_follows_names_sizes_and_times(folder: Path):
    def fingerprint() -> str:
        return open_corpus(str(folder)).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    path = folder / "003.txt"
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    touched = fingerprint()
    path.write_text("longer than before, whatever it was" * 99)
    longer = fingerprint()
    path.rename(folder / "003b.txt")
    assert len({first, touched, longer, fingerprint()}) == 4


def test_missing_and_unusable_paths(tmp_path: Path):
    (tmp_path / "a.csv").write_text("1,2")
    for path, message in (
        (tmp_path / "nowhere", "nowhere.*no such file or folder"),
        (tmp_path / "a.csv", "cannot read this kind of file"),
        (tmp_path, rf"{tmp_path}\b.*no usable file"),
        ("", "empty"),
    ):
        with raises_one_line(message):
            read_all(path)


@pytest.mark.parametrize(
    "line", ["{broken", '"a string"', '{"body": "x"}', '{"text": 5}', '{"text": null}', "[" * 99999]
)
def test_bad_jsonl_line_is_named_by_number(tmp_path: Path, line: str):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n\n" + line + "\n")
    assert error_of(path).startswith(f"{path}:3: ")


def test_parquet_without_a_text_column_or_with_another_type(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), path)
    message = error_of(path)
    assert message.startswith(f"{path}: no column 'text' or 'content'")
    assert "body, id" in message
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    assert error_of(path).startswith(f"{path}[1]: ")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), path)
    assert error_of(path).startswith(f"{path}[0]: ")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1000] * 70 + ["x" * 1001]}), path)
    assert len(list(open_corpus(str(path)).documents())) == 71
    with raises_one_line(r"a\.parquet\[70\]: 'text' has more than 1,000 characters; .* raise data\.longest_line"):
        list(open_corpus(str(path), longest_line=1000).documents())
    path.write_bytes(b"PAR1 nothing of the kind")
    assert "not a readable .parquet file" in error_of(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'tilemoe[data]'" in error_of(tmp_path)


def test_file_that_vanished_is_named(folder: Path):
    corpus = open_corpus(str(folder))
    (folder / "007.txt").unlink()
    for action in (corpus.fingerprint, corpus.file_bytes, lambda: list(corpus.documents())):
        with pytest.raises(ValueError, match=r"007\.txt: cannot be read"):
            action()


def splits_of(path: Path, every: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "heldout": []}
    for _, split, text in split_parts(open_corpus(str(path)), every):
        found[split].append(text)
    return found


def test_single_file_holds_out_its_last_lines(tmp_path: Path):
    lines = [f"line {i:04d}\n" for i in range(1000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    found = splits_of(tmp_path / "a.txt", 20)
    assert found == {"train": ["".join(lines[:950])], "heldout": ["".join(lines[950:])]}


@given(st.text(alphabet="ab\n é", max_size=400), st.integers(2, 30))
def test_cut_keeps_the_text_and_about_the_share(text: str, every: int):
    (_, train), (_, heldout) = _by_end(text, every)
    assert train + heldout == text
    share = len(text) // every
    assert share <= len(heldout) <= 2 * share


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("read", [Corpus.documents, read_examples])
def test_a_line_has_a_limit_and_no_more_of_it_is_read(
    tmp_path: Path, name: str, read: Callable[[Corpus], Iterator[object]]
):
    path, size = tmp_path / name, 100 << 20
    first = json.dumps({"text": "ok", "prompt": "a", "completion": "b"}).encode() + b"\n"
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(first + b'{"text": "' + b"a" * size + b'"}\n'))
    with traced_memory() as peak:
        with raises_one_line(rf"{name}:2: this line has more than 1,000 characters; .* raise data.longest_line"):
            list(read(open_corpus(str(path), longest_line=1000)))
        assert peak() < size / 10


def test_a_line_may_be_as_long_as_the_limit(tmp_path: Path):
    line = json.dumps({"text": "a" * 50})
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}")
    assert len(list(open_corpus(str(tmp_path), longest_line=len(line)).documents())) == 2
    with raises_one_line("a.jsonl:1: this line has more"):
        list(open_corpus(str(tmp_path), longest_line=len(line) - 1).documents())


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.jsonl.zst", "a.parquet", "empty.parquet"])
def test_a_file_that_grows_without_measure_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_module, "_ALWAYS", 1 << 16)
    path = tmp_path / name
    if path.suffix == ".parquet":
        text = "" if name == "empty.parquet" else "a" * 9000
        texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 9000, pyarrow.int32()), [text])
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_bytes(COMPRESS[path.suffix]((b"a" if ".txt" in name else b"\n") * (1 << 23)))
    with raises_one_line(rf"{name}: too many texts, or too long, for its \d+ bytes"):
        read_all(path)


def test_pipes_and_links_that_lead_to_no_file_are_skipped_by_name(tmp_path: Path):
    folder, outside = tmp_path / "corpus", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "c.txt").write_text("outside")
    for name in "abcdefg":
        (folder / f"{name}.bin").write_text("not read")
    (folder / "a.txt").write_text("read")
    os.mkfifo(folder / "pipe.txt")
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (folder / "zfolder").symlink_to(outside)
    corpus = open_corpus(str(folder))
    assert (list(corpus.documents()), corpus.files) == (["read"], ("a.txt",))
    for name in ("pipe.txt", "gone.txt", "zfolder"):
        assert f"{name} is no regular file" in corpus.read_and_skipped({})


def test_folders_deeper_than_calls_may_be(tmp_path: Path):
    folder, most = tmp_path, sys.getrecursionlimit()
    for _ in range(100):
        folder = folder / "d"
        folder.mkdir()
    (folder / "a.txt").write_text("read")
    sys.setrecursionlimit(len(inspect.stack()) + 90)
    try:
        files = open_corpus(str(tmp_path)).files
    finally:
        sys.setrecursionlimit(most)
    assert files == ("d/" * 100 + "a.txt",)


@pytest.mark.parametrize("every", [1, 0, -3, 2.5, True])
def test_heldout_every_is_checked(folder: Path, every: object):
    with pytest.raises(ValueError, match="heldout_every must be an integer >= 2"):
        split_parts(open_corpus(str(folder)), every)

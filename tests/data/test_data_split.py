"""Which text is held out: by position, or the end of each document of a small corpus."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemoe.data.corpus import open_corpus
from tilemoe.data.split import _by_end, split_documents


def splits_of(path: Path, every: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "heldout": []}
    for split, text in split_documents(open_corpus(str(path)), every):
        found[split].append(text)
    return found


def test_every_nth_document_is_held_out(folder: Path, texts: list[str]):
    found = splits_of(folder, 20)
    assert found["heldout"] == [texts[19], texts[39]]
    assert found["train"] == [text for i, text in enumerate(texts) if i not in (19, 39)]


def test_empty_documents_hold_a_position_but_are_left_out(folder: Path, texts: list[str]):
    (folder / "000.txt").write_text("")
    found = splits_of(folder, 20)
    assert found["heldout"] == [texts[19], texts[39]]
    assert found["train"][0] == texts[1]


def test_exactly_as_many_documents_as_needed(tmp_path: Path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 50)
    assert splits_of(tmp_path, 3) == {"train": ["a" * 50, "b" * 50], "heldout": ["c" * 50]}


def test_single_file_holds_out_its_last_lines(tmp_path: Path):
    lines = [f"line {i:04d}\n" for i in range(1000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    found = splits_of(tmp_path / "a.txt", 20)
    assert found == {"train": ["".join(lines[:950])], "heldout": ["".join(lines[950:])]}


@given(st.text(alphabet="ab\n é", max_size=400), st.integers(2, 30))
def test_cut_keeps_the_text_and_about_the_share(text: str, every: int):
    (_, train), (_, heldout) = _by_end(iter([text]), every)
    assert train + heldout == text
    share = len(text) // every
    assert share <= len(heldout) <= 2 * share


@pytest.mark.parametrize("every", [1, 0, -3, 2.5, True])
def test_heldout_every_is_checked(folder: Path, every: object):
    with pytest.raises(ValueError, match="heldout_every must be an integer >= 2"):
        split_documents(open_corpus(str(folder)), every)

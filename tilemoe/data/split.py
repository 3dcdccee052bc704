"""The one place that decides which text is trained on and which is held out.

By position: document ``heldout_every - 1`` and every ``heldout_every``-th after it is held out. A corpus of fewer
documents than that, such as a single text file, has the end of each document held out instead: its last
``1 / heldout_every``, from the line start before that point where there is one near.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal, get_args

from tilemoe.checks import require_int
from tilemoe.data.corpus import Corpus

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)


def split_documents(corpus: Corpus, heldout_every: int) -> Iterator[tuple[Split, str]]:
    """(split, text) of every text that is not empty, in the corpus' order. ValueError unless heldout_every >= 2."""
    require_int("heldout_every", heldout_every, 2)
    texts = (document.text for document in corpus.documents())
    has_whole_documents = sum(1 for _ in islice(corpus.documents(), heldout_every)) == heldout_every
    pairs = _by_position(texts, heldout_every) if has_whole_documents else _by_end(texts, heldout_every)
    return ((split, text) for split, text in pairs if text)


def _by_position(texts: Iterator[str], every: int) -> Iterator[tuple[Split, str]]:
    for index, text in enumerate(texts):
        yield ("heldout" if index % every == every - 1 else "train"), text


def _by_end(texts: Iterator[str], every: int) -> Iterator[tuple[Split, str]]:
    for text in texts:
        share = len(text) // every
        end = len(text) - share
        # A line start at most another share away: one short first line must not hold out all the rest.
        cut = text.rfind("\n", max(end - share, 0), end) + 1 or end
        yield "train", text[:cut]
        yield "heldout", text[cut:]

"""Encodes a text that is too long to be encoded at once: in overlapping windows, joined where their tokens agree.

n tokens

A tokenizer may add something at the start of a text and sees only the window, so tokens near a window's ends may differ
from the whole text's. Where two windows have several tokens in a row in common, the text's tokens are those of the
first window up to there, and of the second from there on. If a Unigram model scores two splits of a text equally except
for rounding, a window may take another one than the whole text would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

# Columns: the id; its characters [FIRST, END) in the text; whether the pre-tokenizer begins a word there.
ID, FIRST, END, BEGINS_WORD = range(4)
Tokens = NDArray[np.int64]  # (n, 4)

_OVERLAP = 8  # windows overlap by about 1/8 of their characters
_WIDEST = 8  # a window is at most so many times the usual size
_AGREEING = 8  # tokens in a row that two windows must share


def tokens_of_parts(
    parts: Iterable[str], size: int, encode: Callable[[str], Tokens], num_different: int
) -> Iterator[Tokens]:
    """Yields arrays of the tokens of one text, given in ``parts``, from windows of about ``size`` characters.

    A window begins at the start of a token of the window before, so that BPE splits a long run of one character alike
    in both. If they have too few tokens in common, it begins earlier and the window before is made wider. ValueError:
    that did not help.
    ``num_different``: different ids needed among the tokens in common; more than 1 if a run's split depends on its end.
    """
    left, text, width, limit, given, place = iter(parts), "", size, size - size // _OVERLAP, 0, 0
    tokens: Tokens | None = None  # tokens of the window, the first ``width`` characters of ``text``
    while True:
        while len(text) <= width + size and (part := next(left, None)) is not None:
            text += part
        tokens = encode(text[:width]) if tokens is None else tokens
        if len(text) <= width:
            break
        first = _first_of_a_token(tokens, limit)
        after = _moved(encode(text[first : width + size]), first)
        meeting = _agreement(tokens[given:], after, num_different)
        if meeting is not None:
            yield _moved(tokens[given : given + meeting[0]], place)
            tokens, given, place = _moved(after, -first), meeting[1], place + first
            text, width = text[first:], width + size - first
            limit = width - width // _OVERLAP
        elif limit > size // _OVERLAP:
            tokens, width, limit = None, min(2 * width, max(width, _WIDEST * size)), limit // 2
        else:
            raise ValueError(
                f"text: it cannot be encoded in windows of {width} characters around character {place + width} "
                f"({text[width - 20 : width]!r}); break it there with blanks or line ends, or leave it out"
            )
    yield _moved(tokens[given:], place)


def _moved(tokens: Tokens, by: int) -> Tokens:
    return tokens + np.array([0, by, by, 0])


def _agreement(before: Tokens, after: Tokens, num_different: int) -> tuple[int, int] | None:
    """The index in each where they can be joined: amid the first `_AGREEING` tokens in common. None: there are none."""
    begin = int(np.searchsorted(before[:, FIRST], after[:1, FIRST].sum()))
    end = int(np.searchsorted(after[:, FIRST], before[-1:, END].sum()))
    ended, begun = (list(map(tuple, tokens.tolist())) for tokens in (before[begin:], after[:end]))
    for run in SequenceMatcher(None, ended, begun, autojunk=False).get_matching_blocks():
        for at in range(run.b, run.b + run.size - _AGREEING + 1):
            if np.unique(after[at : at + _AGREEING, ID]).size >= num_different:
                return begin + run.a + at - run.b + _AGREEING // 2, at + _AGREEING // 2
    return None


def _first_of_a_token(tokens: Tokens, limit: int) -> int:
    """The last character up to ``limit`` that begins a word, else a token (not the first one), else ``limit``."""
    usable = tokens[:, FIRST] <= limit
    usable[:1] = False
    usable[1:] &= tokens[1:, FIRST] >= tokens[:-1, END]  # two tokens may share a character
    words = usable & (tokens[:, BEGINS_WORD] == 1)
    found = tokens[words if words.any() else usable, FIRST]
    return int(found[-1]) if found.size else limit

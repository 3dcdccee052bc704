"""The tokens of a text that is too long to be encoded at once: of windows that overlap, joined where both agree.

n tokens

A tokenizer may add something at the start of a text, and sees no more than it is given, so tokens near a window's ends
may be none of the text's. Where two windows have several tokens in a row in common, the text's tokens are the first
window's up to there, and the second's from there on. Of two divisions to which a Unigram model gives scores that differ
by rounding alone, a window may take the other one than the whole text would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

# Columns: the id; its characters [FIRST, END) in the text; whether the tokenizer divides the text before it.
ID, FIRST, END, BEGINS_WORD = range(4)
Tokens = NDArray[np.int64]  # (n, 4)

_OVERLAP = 8  # windows share about this part of their characters
_WIDEST = 8  # times the usual size, of a window
_AGREEING = 8  # tokens in a row


def tokens_of_parts(
    parts: Iterable[str], size: int, encode: Callable[[str], Tokens], num_different: int
) -> Iterator[Tokens]:
    """The tokens of the text that ``parts`` are together, some at a time, from windows of about ``size`` characters.

    A window begins where a token of the one before does, so that merges divide a long run of one character alike in
    both. Where they have too little in common it begins earlier, and the one before is made wider. ValueError: that
    was of no use.
    ``num_different``: so many ids must be among the tokens in common, where a run's division depends on its end.
    """
    left, text, width, limit, given, place = iter(parts), "", size, size - size // _OVERLAP, 0, 0
    tokens: Tokens | None = None  # of the window: the text's first ``width`` characters
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
    """The first place in each amid `_AGREEING` tokens that both have."""
    begin = int(np.searchsorted(before[:, FIRST], after[:1, FIRST].sum()))
    end = int(np.searchsorted(after[:, FIRST], before[-1:, END].sum()))
    ended, begun = (list(map(tuple, tokens.tolist())) for tokens in (before[begin:], after[:end]))
    for run in SequenceMatcher(None, ended, begun, autojunk=False).get_matching_blocks():
        for at in range(run.b, run.b + run.size - _AGREEING + 1):
            if np.unique(after[at : at + _AGREEING, ID]).size >= num_different:
                return begin + run.a + at - run.b + _AGREEING // 2, at + _AGREEING // 2
    return None


def _first_of_a_token(tokens: Tokens, limit: int) -> int:
    """The last place up to ``limit`` where a word begins, or else any token, but not the first; or else ``limit``."""
    usable = tokens[:, FIRST] <= limit
    usable[:1] = False
    usable[1:] &= tokens[1:, FIRST] >= tokens[:-1, END]  # both may be of one character
    words = usable & (tokens[:, BEGINS_WORD] == 1)
    found = tokens[words if words.any() else usable, FIRST]
    return int(found[-1]) if found.size else limit

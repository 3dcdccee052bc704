"""What a tokenizer.json may ask for: its settings, of 1 KB, could make the library turn a short text into terabytes."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import models

from tilemoe.checks import parse_json

MOST_GROWN = 1 << 24  # characters that the library may make of a text
_MOST_STEPS = 1000  # steps and their parts: the library takes up to 10 microseconds and 1.5 KB for one
_MOST_TIMES = 1 << 12  # characters made of one: ALBERT's tokenizer, the largest known, counts as 288
_MOST_TIMES_DECODED = 1 << 20  # characters made of one by encoding and decoding
_LONGEST_ADDED, _MOST_ADDED = 1 << 16, 1 << 22  # characters of an added token, as normalised, and of all
_LONGEST_DECODED = 1 << 16  # characters of an id
_MOST_SEARCHED = 1 << 16  # characters, by Unigram or WordPiece, for each of a text
_LONGEST_AFFIX = 1 << 8  # characters, which the model adds to every one of a word
_LONGEST_WORD = 1000  # characters: WordPiece's time grows with the cube
# By Unicode's tables. None makes its own result longer: a second time counts only if other steps add letters.
_UNICODE = MappingProxyType({"NFC": 3, "NFD": 3, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 18})
# ByteLevel writes a letter for each byte of UTF-8; the others add a blank.
_TIMES = MappingProxyType({"ByteLevel": 4, "Metaspace": 2, "WordPiece": 2, "BPEDecoder": 3, "CTC": 3})
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def text_growth(backend: tokenizers.Tokenizer) -> int:
    """The most characters that ``backend`` makes of one before its model sees them. ValueError: more than 4,096."""
    times = _growth(backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    _require("how many times as long its normalizer, pre_tokenizer and post_processor make a text", times, _MOST_TIMES)
    return math.ceil(times)


def require_loadable(settings: dict[str, Any]) -> None:
    """ValueError: the library would take too much memory to load the file with ``settings``."""
    count = sum(1 for name in _STEPS for _ in _tables(settings.get(name)))
    _require(f"the steps of its {', '.join(_STEPS)}", count, _MOST_STEPS)
    steps = settings | {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    backend = tokenizers.Tokenizer.from_str(json.dumps(steps))
    text_growth(backend)
    times, added = _growth(backend.normalizer), settings.get("added_tokens")
    sizes = [
        len(str(token.get("content"))) * (times if token.get("normalized", True) else 1)
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict)
    ]
    _require("the characters of its longest added token", max(sizes, default=0), _LONGEST_ADDED)
    _require("the characters of its added_tokens", sum(sizes), _MOST_ADDED)


def require_usable(backend: tokenizers.Tokenizer) -> None:
    """ValueError: ``backend`` would decode ids to too long a text, or take too long for a word."""
    longest, times = max(map(len, backend.get_vocab()), default=0), _growth(backend.decoder)
    _require("the characters of its longest token, as its decoder makes them,", longest * times, _LONGEST_DECODED)
    encoded = text_growth(backend)
    _require("how many times as long encoding and decoding make a text", encoded * times, _MOST_TIMES_DECODED)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        _require(f"the characters of its {name}", len(getattr(backend.model, name, None) or ""), _LONGEST_AFFIX)
    longest_word = getattr(backend.model, "max_input_chars_per_word", 0)
    _require("its max_input_chars_per_word", longest_word, _LONGEST_WORD)
    searched = (longest if isinstance(backend.model, models.Unigram) else longest_word) * encoded
    _require("the characters that its model searches for each of a text", searched, _MOST_SEARCHED)


def _require(what: str, number: float, limit: int) -> None:
    if number > limit:
        raise ValueError(f"{what} must be at most {limit}, not {number:.0f}")


def _growth(*parts: Any) -> float:
    steps = list(_tables([parse_json(part.__getstate__()) for part in parts if part is not None]))
    forms = [str(step["type"]) for step in steps if step.get("type") in _UNICODE]
    if not any(map(_adds_letters, steps)):
        forms = list(set(forms))
    return math.prod([*map(_times, steps), *map(_UNICODE.__getitem__, forms)])


def _adds_letters(step: dict[str, Any]) -> bool:
    """Whether it may write what one of Unicode's forms makes longer, after this form was taken."""
    return step.get("type") == "Precompiled" or not str(step.get("content", step.get("prepend", ""))).isascii()


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _tables(part)


def _times(step: dict[str, Any]) -> float:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)} | {"type": "Prepend", "prepend": str(new)}:
            return 1.0 + len(new)  # an expression may match nothing, between two characters
        case {"type": "Precompiled", "precompiled_charsmap": str(text)}:  # a size, a trie, texts that end in NUL
            table = base64.b64decode(text)
            texts = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace")
            return float(max(1, *map(len, texts.split("\0"))))
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair)}:
            return max(1.0, sum("Sequence" in piece for piece in single + pair) / 3)  # "$A", and "$A $B"
    return _TIMES.get(step.get("type", ""), 1.0)

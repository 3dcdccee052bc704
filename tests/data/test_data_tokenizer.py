"""Tokenizers: round trips, files that load back, training that depends on the training split alone."""

import base64
import json
import random
import re
import signal
import threading
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import pytest
import tokenizers
from helpers import raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex

from tilemoe.data import tokenizer as tokenizer_module
from tilemoe.data.corpus import clean_text, open_corpus
from tilemoe.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, load_tokenizer

ANY_TEXT = st.text(st.characters(), max_size=200)  # lone surrogates and NUL included


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "a.txt"
    path.write_text("the quick brown fox = [the, quick]\n    return naïve\n" * 200, encoding="utf-8")
    return load_tokenizer("bpe:300", open_corpus(str(path)))


@given(ANY_TEXT)
def test_bytes_are_the_utf8_bytes(text: str):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(clean_text(text).encode())
    assert tokenizer.separator_id not in ids
    assert tokenizer.decode(ids) == clean_text(text)


@settings(deadline=None)
@given(ANY_TEXT.filter(lambda text: END_OF_TEXT not in text))
def test_bpe_round_trip(bpe: Tokenizer, text: str):
    ids = bpe.encode(text)
    assert ids.dtype == np.int64
    assert bpe.decode(ids) == clean_text(text)
    assert ((ids >= 0) & (ids < bpe.vocab_size) & (ids != bpe.separator_id)).all()


def test_separators_are_no_text(bpe: Tokenizer):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = [tokenizer.separator_id, *tokenizer.encode("a é"), tokenizer.separator_id]
        assert tokenizer.decode(ids) == "a é"
        assert tokenizer.decode(np.array(ids)) == "a é"
        assert tokenizer.decode([]) == ""


def test_ids_out_of_range_are_refused(bpe: Tokenizer):
    for tokenizer in (ByteTokenizer(), bpe):
        for wrong in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match=f"ids: {wrong} is not an id"):
                tokenizer.decode([1, wrong])


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_saved_tokenizer_loads_back_with_the_same_ids(bpe: Tokenizer, kind: str, tmp_path: Path):
    original: Tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    path = tmp_path / "tokenizer.json"
    original.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = load_tokenizer(str(path))
    text = "def f(x):\n\treturn 'naïve 漢字 🎉 <0x41>' \r\n"
    assert loaded.encode(text).tolist() == original.encode(text).tolist()
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.vocab_size, loaded.separator_id) == (original.vocab_size, original.separator_id)
    hub = tokenizers.Tokenizer.from_file(str(path))
    assert hub.encode(text).ids == original.encode(text).tolist()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_transformers_gives_the_ids_from_a_folder(bpe: Tokenizer, kind: str, tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = bpe if kind == "bpe" else ByteTokenizer()
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer.hf_config(64)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    theirs, text = AutoTokenizer.from_pretrained(tmp_path), "def f(x):\n\treturn 'naïve  漢字 🎉' ."
    assert theirs(text).input_ids == tokenizer.encode(text).tolist()
    assert theirs.decode(theirs(text).input_ids) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (tokenizer.separator_id, 64)


def letters(number: int) -> str:
    return "".join(random.Random(0).choices("abcdefgh", k=number))


@pytest.mark.parametrize("text", ["", "a b", letters(9000), f"a  b {letters(5000)} c\n" + " " * 9000 + letters(4096)])
def test_longer_words_are_cut(text: str):
    parts = list(tokenizer_module._without_longer_words(text))
    assert "".join(parts) == text
    assert max(len(word) for part in parts for word in re.findall(r"\S+|\s+", part) or [""]) <= 4096


def test_merges_are_learnt_from_a_long_word(tmp_path: Path):
    """For a whole one the time grows with the square of its length."""
    (tmp_path / "a.txt").write_text(letters(1 << 17))
    started = time.process_time()
    assert load_tokenizer("bpe:4096", open_corpus(str(tmp_path))).vocab_size == 4096
    assert time.process_time() - started < 8


def test_training_a_bpe_can_be_interrupted(tmp_path: Path):
    """Native code sees no signal. The thread that is left behind has nothing more to read, and ends."""
    (tmp_path / "a.txt").write_text(letters(1 << 20))
    corpus = open_corpus(str(tmp_path))
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            load_tokenizer("bpe:9000", corpus)
        (left,) = (thread for thread in threading.enumerate() if thread.name == "tilemoe-bpe")
        left.join(60)
        assert not left.is_alive()
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_bpe_is_deterministic_and_ignores_heldout_text(folder: Path, texts: list[str]):
    def train() -> str:
        return load_tokenizer("bpe:400", open_corpus(str(folder))).fingerprint

    first = train()
    assert train() == first
    (folder / "019.txt").write_text("entirely different words, many times over " * 500)  # a held-out file
    assert train() == first
    (folder / "018.txt").write_text("entirely different words, many times over " * 500)
    assert train() != first


def test_bpe_of_a_large_corpus_is_trained_on_a_sample(folder: Path, monkeypatch: pytest.MonkeyPatch):
    corpus = open_corpus(str(folder))
    everything = list(tokenizer_module._training_sample(corpus, 20))
    monkeypatch.setattr(tokenizer_module, "_BPE_SAMPLE_BYTES", corpus.file_bytes() // 2)
    assert list(tokenizer_module._training_sample(corpus, 20)) == everything[::3]


def test_bpe_is_trained_once_and_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    corpus, cache = open_corpus(str(folder)), tmp_path / "cache"
    first = load_tokenizer("bpe:300", corpus, cache)
    monkeypatch.setattr(tokenizer_module, "_train_bpe", lambda *_: pytest.fail("trained again"))
    assert load_tokenizer("bpe:300", corpus, cache).fingerprint == first.fingerprint
    (kept,) = (cache / "tokenizers").glob("bpe-*.json")
    kept.write_text(kept.read_text()[:100])
    with pytest.raises(ValueError, match=f"{kept.name}.*delete it and it is trained again"):
        load_tokenizer("bpe:300", corpus, cache)


def backend_with(specials: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(specials)
    return backend


def test_foreign_tokenizer_adds_truncates_and_pads_nothing(tmp_path: Path):
    backend = backend_with(["[CLS]", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A </s>", special_tokens=[("[CLS]", 3), ("</s>", 4)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("hello world hello world hello").tolist() == [1, 2, 1, 2, 1]
    assert tokenizer.encode("hello</s>world").tolist() == [1, 4, 2]
    assert (tokenizer.separator_id, tokenizer.vocab_size) == (4, 5)


HOSTILE = {
    "an id that there is not": {"model": {"type": "WordLevel", "vocab": {END_OF_TEXT: 0, "a": 1}, "unk_token": "?"}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "an expression without end": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
    "added tokens that are none": {"added_tokens": 1},
    "an added token that is none": {"added_tokens": [1]},
    "a table that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_the_library_fails_at_is_one_line(bpe: Tokenizer, kind: str, tmp_path: Path):
    """It raises the base class of all exceptions, or panics, which is an exception of its own."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(bpe.backend.to_str()) | HOSTILE[kind]))
    with raises_one_line(r"tokenizer '.*tokenizer.json': (cannot encode a text|cannot be read) \(.+\); "):
        load_tokenizer(str(path)).encode("a" * 40 + "!")


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def added(content: str, *, normalized: bool = False) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": 300, "content": content, "normalized": normalized, **flags}


def template(*counts: int) -> dict[str, Any]:
    single, pair = ([{"Sequence": {"id": "AB"[place % 2], "type_id": 0}} for place in range(n)] for n in counts)
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}


def in_turn(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def unigram(longest: int) -> dict[str, Any]:
    pieces = [[END_OF_TEXT, 0.0], *(["a" * size, -1.0] for size in range(1, longest + 1))]
    return {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}


CHARACTERS = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
DOUBLES = [replace("a", "aa")] * 40
UNBOUNDED = {
    "doubling normalizers": {"normalizer": in_turn("normalizers", *DOUBLES)},
    "normalizers without a type": {"normalizer": {"normalizers": [[{"String": "a"}, "aa"]] * 40}},
    "a long text for each character": {"normalizer": replace("a", "a" * (1 << 24))},
    "a long text for each pair": {"normalizer": replace("aa", "a" * (1 << 24))},
    "a long text for nothing": {"normalizer": replace("", "a" * (1 << 24))},
    "a long text between characters": {"normalizer": replace("b*", "a" * (1 << 24), "Regex")},
    "a long text before": {"normalizer": {"type": "Prepend", "prepend": "a" * (1 << 24)}},
    "bytes of bytes as a normalizer": {"normalizer": in_turn("normalizers", *[{"type": "ByteLevel"}] * 40)},
    "bytes of bytes": {
        "pre_tokenizer": in_turn(
            "pretokenizers", *[{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}] * 40
        )
    },
    "blanks before all": {
        "pre_tokenizer": in_turn(
            "pretokenizers",
            *[
                step
                for blank in "xy" * 20
                for step in (
                    CHARACTERS,
                    {"type": "Metaspace", "replacement": blank, "prepend_scheme": "always", "split": True},
                )
            ],
        )
    },
    "a table of long texts": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(b"\4\0\0\0" + b"\0" * 4 + b"a" * 5000 + b"\0").decode(),
        }
    },
    "a text many times over": {"post_processor": template(100_000, 2)},
    "a text twice, then many times": {"post_processor": in_turn("processors", template(2, 2), template(1, 100_000))},
    "added tokens that grow": {
        "normalizer": replace("a", "a" * 4000), "added_tokens": [added("a" * 5000, normalized=True)]
    },
    "added tokens that double": {
        "normalizer": in_turn("normalizers", *DOUBLES), "added_tokens": [added("a", normalized=True)]
    },
    "a long added token": {"added_tokens": [added("b" * (1 << 25))]},
    "a long text of a long text": {
        "normalizer": replace("a", "a" * 4000), "decoder": in_turn("decoders", replace("a", "b" * 1000)),
    },
    "letters that normal forms grow, again and again": {
        "normalizer": in_turn("normalizers", *[replace("f", "ﷺ"), {"type": "NFKD"}, replace("ا", "f")] * 4)
    },
    "steps without end": {"normalizer": in_turn("normalizers", *[{"type": "Nmt"}] * 1_000_000)},
    "steps of a decoder without end": {"decoder": in_turn("decoders", *[{"type": "Fuse"}] * 1_000_000)},
    "doubling decoders": {"decoder": in_turn("decoders", *DOUBLES)},
    "blanks between characters": {"decoder": in_turn("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 40)},
    "a long token": {"model": {"type": "WordLevel", "vocab": {END_OF_TEXT: 0, "a" * (1 << 24): 1}, "unk_token": "a"}},
    "a long prefix": {
        "model": {"type": "BPE", "vocab": {END_OF_TEXT: 0}, "merges": [], "continuing_subword_prefix": "#" * (1 << 24)}
    },
    "a long suffix": {
        "model": {"type": "BPE", "vocab": {END_OF_TEXT: 0}, "merges": [], "end_of_word_suffix": "#" * (1 << 24)}
    },
    "long words": {
        "model": {
            "type": "WordPiece", "vocab": {END_OF_TEXT: 0, "a": 1, "##a": 2}, "unk_token": END_OF_TEXT,
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 1 << 20,
        }
    },
    "long tokens of a text that grows": {"normalizer": replace("a", "a" * 100), "model": unigram(1000)},
}  # fmt: skip
SLOWEST = {
    "the most characters": {"normalizer": replace("a", "a" * 4096)},
    "the longest words": {
        "normalizer": replace("a", "b" * 64), "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordPiece", "vocab": {END_OF_TEXT: 0, "b": 1, "##b": 2}, "unk_token": END_OF_TEXT,
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 1000,
        },
    },
    "the longest tokens": {"normalizer": replace("a", "a" * 8), "model": unigram(8000)},
    "long tokens of what grows": {"normalizer": replace("a", "a" * 256), "model": unigram(256)},
}  # fmt: skip


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_what_makes_texts_too_long_is_refused(bpe: Tokenizer, kind: str, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(bpe.backend.to_str()) | UNBOUNDED[kind]))
    started, before = time.process_time(), getrusage(RUSAGE_SELF).ru_maxrss
    with raises_one_line(r"tokenizer '.*tokenizer.json': cannot be read \(.* must be at most \d+, not \d+\); "):
        load_tokenizer(str(path))
    assert time.process_time() - started < 5
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize("kind", SLOWEST)
def test_what_is_not_refused_ends(bpe: Tokenizer, kind: str, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(bpe.backend.to_str()) | {"pre_tokenizer": None} | SLOWEST[kind]))
    started, before = time.process_time(), getrusage(RUSAGE_SELF).ru_maxrss
    tokenizer = load_tokenizer(str(path))
    tokenizer.decode(tokenizer.encode(("a" * 15 + " ") * 16))
    assert time.process_time() - started < 5
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


N, P, R, D = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.processors, tokenizers.decoders
PAIRS = R.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", [("<s>", 1), ("</s>", 0)])
OF_PUBLIC = {
    "GPT-2": (None, P.ByteLevel(), R.ByteLevel(), D.ByteLevel()),
    "Qwen": (N.NFC(), P.Sequence([P.Split(Regex(r"\s+"), "isolated"), P.ByteLevel()]), R.ByteLevel(), D.ByteLevel()),
    "CLIP": (N.Sequence([N.NFC(), N.Replace(Regex(r"\s+"), " "), N.Lowercase()]), P.ByteLevel(), None, D.ByteLevel()),
    "Llama": (
        N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")]), None, PAIRS,
        D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)]),
    ),
    "Gemma": (N.Replace(" ", "▁"), P.Split(" ", "merged_with_previous"), PAIRS, D.Replace("▁", " ")),
    "T5": (
        N.Sequence([N.NFKC(), N.Replace(Regex(" {2,}"), "▁")]),
        P.Sequence([P.WhitespaceSplit(), P.Metaspace()]), PAIRS, D.Metaspace(),
    ),
    "ALBERT": (
        N.Sequence(
            [
                N.Replace("``", '"'), N.Replace("''", '"'),
                *[N.NFKD(), N.StripAccents(), N.Lowercase(), N.Replace(Regex(" {2,}"), " ")] * 2,
            ]
        ),
        P.Sequence([P.WhitespaceSplit(), P.Metaspace()]), PAIRS, D.Metaspace(),
    ),
    "BERT": (N.BertNormalizer(), P.BertPreTokenizer(), PAIRS, D.WordPiece()),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PUBLIC)
def test_what_public_tokenizers_do_to_a_text_is_accepted(bpe: Tokenizer, name: str, tmp_path: Path):
    backend = tokenizers.Tokenizer.from_str(bpe.backend.to_str())
    for part, value in zip(("normalizer", "pre_tokenizer", "post_processor", "decoder"), OF_PUBLIC[name], strict=True):
        if value is not None:
            setattr(backend, part, value)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(str(tmp_path / "tokenizer.json")), "The naïve  ﷺ"
    assert tokenizer.encode(text).tolist() == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("times", [1, 4, 1000])
def test_a_text_that_may_grow_is_encoded_in_smaller_windows(
    times: int, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    backend, text, sizes = tokenizers.Tokenizer.from_str(bpe.backend.to_str()), "the quick " * 4000, []
    backend.normalizer = N.Replace("#", "#" * times)  # a byte-level tokenizer makes up to 4 of each
    tokenizer = Tokenizer(backend, "x")
    real = tokenizer._tokens
    monkeypatch.setattr(tokenizer, "_tokens", lambda text: (sizes.append(len(text)), real(text))[1])
    assert tokenizer.encode(text).tolist() == backend.encode(text).ids
    assert max(sizes, default=0) <= 8 * (1 << 24) // (4 * times)
    assert (sizes == []) == (times <= 4)


def test_tokenizer_without_a_separator_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer 'x': has no token that ends a document; add '<\|endoftext\|>'"):
        Tokenizer(backend_with([]), "x")


UNKNOWN, TOO_SMALL = "unknown; use 'bytes', 'bpe:N' or", "write 'bpe:N' with N >= 257"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((spec, UNKNOWN) for spec in ("byte", "gpt2", "", "bpe")),
        *((spec, TOO_SMALL) for spec in ("bpe:", "bpe:x", "bpe:256", "bpe:-5", "bpe:1e4", "bpe:99999999999")),
        ("bpe:300", "it is trained on a corpus; give one"),
    ],
)
def test_bad_specs(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"tokenizer '{spec}': {message}"):
        load_tokenizer(spec)


def test_missing_tokenizer_file(tmp_path: Path):
    for path in (tmp_path / "tokenizer.json", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read .*; give the path of a tokenizer\.json"):
            load_tokenizer(str(path))

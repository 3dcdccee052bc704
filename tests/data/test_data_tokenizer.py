"""Tokenizers: round trips, files that load back, training that depends on the training split alone."""

import json
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers import raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st

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
    "a table that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_the_library_fails_at_is_one_line(bpe: Tokenizer, kind: str, tmp_path: Path):
    """It raises the base class of all exceptions, or panics, which is an exception of its own."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(bpe.backend.to_str()) | HOSTILE[kind]))
    with raises_one_line(r"tokenizer '.*tokenizer.json': (cannot encode a text|cannot be read) \(.+\); "):
        load_tokenizer(str(path)).encode("a" * 40 + "!")


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

"""Ids are those that the tokenizer gives the whole text, whatever it is cut into; its own library is the oracle."""

import random
from collections.abc import Callable
from functools import cache
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from helpers import raises_one_line
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tilemoe.data import cache as cache_module
from tilemoe.data import corpus as corpus_module
from tilemoe.data import open_corpus
from tilemoe.data import tokenizer as tokenizer_module
from tilemoe.data.chat_encoder import ChatEncoder
from tilemoe.data.conversations import Completion
from tilemoe.data.corpus import split_parts
from tilemoe.data.tokenizer import Tokenizer
from tilemoe.train import sample

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the", "quick", "brown", "fox", "naïve", "café", "漢字", "🎉", "def", "return", "don't", "12345", "==", "{}"]
WORDS += ["snake_case", "éclair", "ﬁn", "e\u0301a\u0308", "▁"]
BLANKS = [*[" "] * 8, "\n", "\n\n", "\n    ", "  ", "\t", ", ", ". ", "\r\n", " \n"]
LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
LLAMA += r"|\s+(?!\S)|\s+"


def prose(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(BLANKS) for _ in range(words))


def with_specials(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(
        prose(draw.randint(1, 20), i) + draw.choice(["<|im_start|>", "<|im_end|>\n", " <s> "]) for i in range(60)
    )


TEXTS = {
    "prose": prose(900, 1),
    "special tokens": with_specials(2),
    "runs": "".join(prose(40, len(run)) + run for run in [" " * 700, "x y " * 99, "\n" * 400, "a" * 801, "=" * 601]),
    "digits": "pi is " + "".join(random.Random(3).choices("0123456789", k=1500)) + " and so on" * 20,
    "no blanks": "".join(random.Random(4).choices("thequickbrown", k=1500)) + "漢字かな" * 300 + "🎉é" * 300,
}  # fmt: skip


def trained(
    model: Any, pre: Any = None, normalizer: Any = None, bos: bool = False, **options: Any
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    if pre is not None:
        backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer if isinstance(model, models.BPE) else trainers.WordPieceTrainer
    backend.train_from_iterator(
        [prose(3000, 0)], trainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False, **options)
    )
    if bos:
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
            ]
        )
    return backend


def byte_level(prefix: bool = False, regex: str | None = None, bos: bool = False, **model: Any) -> tokenizers.Tokenizer:
    pre: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if regex is not None:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend = trained(models.BPE(**model), pre, bos=bos, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.decoder = decoders.ByteLevel()
    return backend


def metaspace(scheme: str, split: bool = True, bos: bool = False) -> tokenizers.Tokenizer:
    words, alphabet = pre_tokenizers.Metaspace(prepend_scheme=scheme), list(" \n\r\té🎉漢字=0123456789")
    backend = trained(models.BPE(unk_token="<unk>"), words, bos=bos, initial_alphabet=alphabet)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=split)
    return backend


def unigram(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """With the same pieces, whose scores have few bits: their sums are exact, so that which of two divisions of equal
    score is taken does not depend on the text before them.
    """
    pieces = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    backend.model = models.Unigram([(piece, -4.0 - number / 64) for piece, number in pieces], unk_id=0)
    return backend


def prepended() -> tokenizers.Tokenizer:
    """As Mixtral's: a text is one word, to which a blank is prepended."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = pre_tokenizers.Split("▁", "merged_with_next")
    backend = trained(
        models.BPE(unk_token="<unk>"), words, normalizer, initial_alphabet=list("\n\r\té🎉漢字=0123456789")
    )
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """As T5's: characters are normalised, blanks at the ends stripped and others made one."""
    one_blank = normalizers.Replace(Regex(" {2,}"), " ")
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), one_blank])
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return unigram(trained(models.BPE(unk_token="<unk>"), words, normalizer))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, blank first": lambda: byte_level(prefix=True),
    "byte-level, blank first, BOS": lambda: byte_level(prefix=True, bos=True),
    "byte-level, Llama 3": lambda: byte_level(regex=LLAMA, bos=True, ignore_merges=True),
    "byte-level, one word": lambda: byte_level(regex=r"[\s\S]+"),
    "Metaspace first": lambda: metaspace("first"),
    "Metaspace always, BOS": lambda: metaspace("always", bos=True),
    "Metaspace never": lambda: metaspace("never"),
    "Metaspace first, one word": lambda: metaspace("first", split=False),
    "Prepend": prepended,
    "Unigram": lambda: unigram(metaspace("always", bos=True)),
    "Unigram, NFKC, Strip": sentencepiece,
    "WordPiece": lambda: trained(
        models.WordPiece(unk_token="<unk>", max_input_chars_per_word=10**6),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
        bos=True,
    ),
}  # fmt: skip


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), kind)


def own(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return ids


def learnt_by_characters(tokenizer: Tokenizer, text: str, spans: list[tuple[int, int]]) -> list[bool]:
    """Character by character, from the library's own places of tokens without a step that may trim them."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = processors.Sequence([])
    characters = set(chain.from_iterable(range(*span) for span in spans))
    places = backend.encode(text, add_special_tokens=False).offsets
    return [bool(characters & set(range(first, end))) for first, end in places]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_long_text_in_windows(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(kind)
    for size in (200, 257, 333):
        monkeypatch.setattr(tokenizer_module, "_PIECE", size)
        assert tokenizer.encode(TEXTS[text]).tolist() == own(tokenizer, TEXTS[text])


def test_a_window_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a character of several, a special token, blanks."""
    for kind in ("byte-level, blank first", "Metaspace first, one word", "Unigram, NFKC, Strip"):
        tokenizer, text = tokenizer_of(kind), TEXTS["special tokens"][:1500]
        for size in range(200, 280):
            monkeypatch.setattr(tokenizer_module, "_PIECE", size)
            assert tokenizer.encode(text).tolist() == own(tokenizer, text)


def test_a_text_in_which_windows_agree_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(trained(models.WordPiece(unk_token="<unk>"), pre_tokenizers.BertPreTokenizer()), "w")
    monkeypatch.setattr(tokenizer_module, "_PIECE", 200)
    assert tokenizer.encode("a fox " * 99 + "x" * 900 + " the" * 99).tolist() == own(
        tokenizer, "a fox " * 99 + "x" * 900 + " the" * 99
    )
    with raises_one_line(
        r"text: it cannot be encoded in windows of \d+ characters around character \d+ \('x+'\); break"
    ):
        tokenizer.encode("a fox " * 99 + "x" * 9000 + " the" * 99)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_across_its_cuts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files cut into documents, and documents whose end is held out; what is written, in order, is each whole file."""
    tokenizer = tokenizer_of(kind)
    texts = [prose(600, 5), "tiny", "two\nlines", TEXTS["no blanks"]]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    monkeypatch.setattr(tokenizer_module, "_PIECE", 300)
    for size, heldout_every in ((1 << 20, 20), (150, 20), (400, 1000), (700, 2)):
        monkeypatch.setattr(corpus_module, "_PIECE", size)
        written: list[int] = []

        class Writer:
            def append(self, ids: np.ndarray, num_bytes: int, written: list[int] = written) -> None:
                written.extend(ids.tolist())

        parts = split_parts(open_corpus(str(tmp_path)), heldout_every)
        cache_module._write_documents(parts, tokenizer, dict.fromkeys(("train", "heldout"), Writer()))  # type: ignore[arg-type]
        kept = [token for token in written if token != tokenizer.separator_id]
        assert kept == list(chain.from_iterable(own(tokenizer, text) for text in texts))
        assert len(written) - len(kept) >= len(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for seed, (prompt, completion) in enumerate(
        [("def double(x):\n", "    return 2 * x\n"), ("a na", "ïve fox"), ("x <s>", " y"), (prose(9, 1), prose(9, 2))]
    ):
        ids, learnt = ChatEncoder(tokenizer).encode(Completion(f"line {seed}", prompt, completion))
        assert ids.tolist() == [*own(tokenizer, prompt + completion), tokenizer.separator_id]
        expected = learnt_by_characters(tokenizer, prompt + completion, [(len(prompt), len(prompt + completion))])
        assert learnt.tolist() == [*expected, True]
        assert tokenizer.decode(ids) == tokenizer.decode(own(tokenizer, prompt + completion))


def test_only_as_much_is_read_as_a_window_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_PIECE", 1000)
    read, longest = count(), []
    tokenizer = Tokenizer(byte_level(), "b")
    real = tokenizer._tokens
    monkeypatch.setattr(tokenizer, "_tokens", lambda text: (longest.append(len(text)), real(text))[1])
    given = tokenizer.encode_parts(prose(100, i) for i in range(400) if next(read) >= 0)
    for number, _ in enumerate(given):
        assert next(read) - number < 20 + 2 * number  # each look at the count adds one
    assert max(longest) < 1300


@pytest.mark.parametrize("kind", ["Prepend", "byte-level, blank first", "Metaspace always, BOS"])
def test_what_is_generated_is_decoded_with_its_prompt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that was learnt from a prompt and its completion comes out, with its four blanks."""
    tokenizer = tokenizer_of(kind)
    text = "def return(x):\n    return don't\n"
    prompt, completion = text[:14], text[14:]
    ids, _ = ChatEncoder(tokenizer).encode(Completion("line 1", prompt, completion))
    model: Any = SimpleNamespace(config=SimpleNamespace(max_seq_len=99), parameters=lambda: iter([torch.zeros(1)]))
    given = own(tokenizer, prompt)
    assert ids[: len(given)].tolist() == given
    rest = ids[len(given) :].tolist()
    monkeypatch.setattr(sample, "generate", lambda m, start, *_, **__: torch.tensor([[*start[0].tolist(), *rest]]))
    found = sample.continue_text(model, tokenizer, prompt, 50, temperature=1.0, top_k=0, seed=0)
    assert found.text == tokenizer.decode(own(tokenizer, text))

"""Tokenizers: plain bytes, a byte-level BPE trained on the corpus, or any tokenizer.json, with its chat template."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tilemoe.checks import expand_user, parse_json, told
from tilemoe.data.corpus import Corpus, clean_text, split_parts
from tilemoe.data.tokenizer_limits import MOST_GROWN, require_loadable, require_usable, text_growth
from tilemoe.data.windows import FIRST, ID, Tokens, tokens_of_parts
from tilemoe.files import only_one_process, read_text, write_atomic

TokenIds = NDArray[np.int64]

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
# Names that public tokenizers give to the token that ends a document; the first that exists is used.
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]", "[SEP]", "<0x00>")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # that a chat template may name
_MOST_IDS = 1 << 24
_MIN_BPE_VOCAB = 257  # 256 bytes and the separator
_BPE_SAMPLE_BYTES = 1 << 28  # of files; a larger corpus is sampled evenly, since more text does not improve merges
_PIECE = 1 << 20  # characters that the library gets at a time: it needs many bytes for each
_LONGEST_WORD = 1 << 12  # characters: the time to learn merges from a word grows with the square of its length
_LONGER_WORD = re.compile(rf"(?<!\S)\S{{{_LONGEST_WORD},}}|(?<!\s)\s{{{_LONGEST_WORD},}}")
_LEAVING_S = 1.0  # seconds that an interrupted BPE training may take to end


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja text and the special tokens that it may name, as (field, text), e.g. ("eos_token", "<|im_end|>")."""

    source: str
    special_tokens: tuple[tuple[str, str], ...]

    def config(self) -> dict[str, str]:
        """The fields of a tokenizer_config.json that hold the template."""
        return {**dict(self.special_tokens), "chat_template": self.source}


PLAIN = ChatTemplate(
    "{% for message in messages %}{{ message['role'] + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}",
    (),
)


class Tokenizer:
    """A tokenizer.json. Special tokens that are written out in a text get their ids; none are added.

    name
    vocab_size     largest id + 1
    separator_id   id of the token between documents; it is no part of any text
    fingerprint    hex digest of everything that decides the ids of a text
    chat_template  the template in transformers' folder, if there is one
    backend        the library's tokenizer; callers must not change it
    """

    def __init__(self, backend: tokenizers.Tokenizer, name: str, chat_template: ChatTemplate | None = None) -> None:
        """ValueError, naming ``name``: no token of ``backend`` separates documents, or it makes texts too long."""
        self.name, self.chat_template = name, chat_template
        self.backend = backend
        self.backend.no_truncation()
        self.backend.no_padding()
        with _readable(name, "is refused"):
            self._most = MOST_GROWN // text_growth(backend)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        separator = next((token for token in SEPARATORS if token in vocabulary), None)
        if separator is None:
            raise ValueError(
                f"tokenizer {name!r}: has no token that ends a document; add {END_OF_TEXT!r} to its added_tokens"
            )
        self.vocab_size: int = max(vocabulary.values()) + 1  # ids may have gaps
        if self.vocab_size > _MOST_IDS:  # the library takes memory for each id
            raise ValueError(
                f"tokenizer {name!r}: has an id of {self.vocab_size - 1}; correct it, ids must be below {_MOST_IDS}"
            )
        self.separator_id: int = vocabulary[separator]
        self.fingerprint = hashlib.sha256(self.backend.to_str().encode("utf-8")).hexdigest()

    def encode(self, text: str) -> TokenIds:
        """(number of tokens,) int64, without separators; NUL is removed and lone surrogates become U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Iterable[str]) -> list[TokenIds]:
        """``encode`` of each text, in parallel if the tokenizer can do that.

        ValueError: a long text cannot be encoded in windows, see `tilemoe.data.windows`.
        """
        texts = [clean_text(text) for text in texts]
        short = [text for text in texts if len(text) <= self._size]
        ids_of_short = iter(self._ids(short))
        return [
            next(ids_of_short) if len(text) <= self._size else np.concatenate(list(self.encode_parts(pieces_of(text))))
            for text in texts
        ]

    def tokens(self, text: str) -> Tokens:
        """The tokens of a cleaned text (`clean_text`), with the characters that each covers."""
        return np.concatenate(list(self._tokens_of_parts(pieces_of(text))))

    def encode_parts(self, parts: Iterable[str]) -> Iterator[TokenIds]:
        """Per part, the ids of the tokens that begin in it. ``parts`` are cleaned and together one text.

        Takes bounded memory. ValueError: see `encode_batch`.
        """
        held, ends = np.empty((0, 4), np.int64), deque[int]()  # tokens and ends of parts not yielded yet

        def read() -> Iterator[str]:
            end = 0
            for part in parts:
                end += len(part)
                ends.append(end)
                yield part

        beyond = np.full((1, 4), np.iinfo(np.int64).max)
        for tokens in chain(self._tokens_of_parts(read()), [beyond]):
            held = np.concatenate([held, tokens])
            while ends and held.size and held[-1, FIRST] > ends[0]:
                count = int(np.searchsorted(held[:, FIRST], ends.popleft()))
                yield held[:count, ID]
                held = held[count:]

    def _ids(self, texts: Sequence[str]) -> list[TokenIds]:
        with _readable(self.name, "cannot encode a text"):
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def _tokens_of_parts(self, parts: Iterable[str]) -> Iterator[Tokens]:
        # Unigram splits a long run of one character depending on the run's end, BPE depending on its start.
        num_different = 4 if isinstance(self.backend.model, models.Unigram) else 1
        return tokens_of_parts(parts, self._size, self._tokens, num_different)

    @property
    def _size(self) -> int:
        """The most characters that the library gets at a time."""
        return min(_PIECE, self._most)

    def _tokens(self, text: str) -> Tokens:
        with _readable(self.name, "cannot encode a text"):
            encoding = self._without_trimming.encode(text, add_special_tokens=False)
        first, end = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        first = np.maximum.accumulate(first.clip(max=len(text) - 1))
        begins_word = np.diff(np.asarray(encoding.word_ids, np.int64), prepend=-1) != 0
        return np.stack([np.asarray(encoding.ids, np.int64), first, end, begins_word], axis=1)

    @cached_property
    def _without_trimming(self) -> tokenizers.Tokenizer:
        """The library's tokenizer without the post-processor, which may trim whitespace from token offsets."""
        backend = copy.deepcopy(self.backend)
        backend.post_processor = processors.Sequence([])
        return backend

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` without separators; bytes that are not UTF-8 become U+FFFD. ValueError: id unknown."""
        array = np.asarray(list(ids), dtype=np.int64)
        unknown = array[(array < 0) | (array >= self.vocab_size)]
        if unknown.size:
            last = self.vocab_size - 1
            raise ValueError(f"ids: {unknown[0]} is not an id of this tokenizer; ids run from 0 to {last}")
        return self._text(array[array != self.separator_id])

    def _text(self, ids: TokenIds) -> str:
        with _readable(self.name, "cannot decode ids"):
            return self.backend.decode(ids.tolist(), skip_special_tokens=False)

    @property
    def end_ids(self) -> list[int]:
        """The ids at which a generated text ends: the separator, and the end-of-turn token of the chat template, if any
        (its eos_token).
        """
        template = None if self.chat_template is None else dict(self.chat_template.special_tokens).get("eos_token")
        found = None if template is None else self.backend.token_to_id(template)
        return [self.separator_id] if found in (None, self.separator_id) else [self.separator_id, found]

    def save(self, path: Path) -> None:
        """Write a tokenizer.json and, beside it, the chat template if there is one; each file atomically."""
        write_atomic(path, self.backend.to_str(pretty=True).encode("utf-8"))
        if self.chat_template is not None:
            config = json.dumps(self.chat_template.config(), indent=2) + "\n"
            write_atomic(path.with_name(TOKENIZER_CONFIG_FILE), config.encode("utf-8"))

    def hf_config(self, max_length: int) -> dict[str, Any]:
        """The tokenizer_config.json to put beside `save`'s file, so that ``AutoTokenizer`` gives the ids of `encode`.

        Without it ``AutoTokenizer`` takes the class of the model's architecture, which gives other ids for some texts.
        """
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.backend.id_to_token(self.separator_id),
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            **({} if self.chat_template is None else self.chat_template.config()),
        }


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of a text: 256 ids; 0 separates documents."""

    def __init__(self) -> None:
        # No character is in the vocabulary, so each falls back to its bytes; a byte's id is its value.
        model = models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[], byte_fallback=True)
        backend = tokenizers.Tokenizer(model)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        super().__init__(backend, BYTES)
        self.fingerprint = hashlib.sha256(b"utf-8 bytes, 0 separates").hexdigest()

    def _ids(self, texts: Sequence[str]) -> list[TokenIds]:  # 100 times as fast as the library
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]

    def tokens(self, text: str) -> Tokens:
        (ids,) = self._ids([text])
        first = np.cumsum((ids & 0xC0) != 0x80) - 1  # all but a character's first byte begin with the bits 10
        return np.stack([ids, first, first + 1, np.ones_like(ids)], axis=1)

    def encode_parts(self, parts: Iterable[str]) -> Iterator[TokenIds]:
        return (self._ids([part])[0] for part in parts)

    def _text(self, ids: TokenIds) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")


def load_tokenizer(
    spec: str, corpus: Corpus | None = None, cache_dir: Path | None = None, heldout_every: int = 20
) -> Tokenizer:
    """The tokenizer that ``spec`` names: "bytes", "bpe:N", or the path of a tokenizer.json.

    Files beside a tokenizer.json may give it a chat template, see `read_chat_template`.
    "bpe:N" is a byte-level BPE of at most N ids, trained on the training split of ``corpus`` and kept in ``cache_dir``
    (None: trained anew each time). Raises ValueError for any other spec and for a missing or invalid file.
    """
    if spec == BYTES:
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        match = re.fullmatch(r"bpe:([0-9]{1,9})", spec)
        if match is None or int(match[1]) < _MIN_BPE_VOCAB:
            raise ValueError(f"tokenizer {spec!r}: write 'bpe:N' with N >= {_MIN_BPE_VOCAB}, e.g. 'bpe:4096'")
        vocab_size = int(match[1])
        if corpus is None:
            raise ValueError(
                f"tokenizer {spec!r}: it is trained on a corpus; give one, or the path of a tokenizer.json"
            )
        if cache_dir is None:
            return Tokenizer(_train_bpe(corpus, vocab_size, heldout_every), spec)
        return _cached_bpe(spec, corpus, vocab_size, heldout_every, cache_dir)
    path = expand_user(spec)
    if not spec or (not path.exists() and path.suffix != ".json"):
        raise ValueError(f"tokenizer {spec!r}: unknown; use 'bytes', 'bpe:N' or the path of a tokenizer.json")
    return Tokenizer(_parse(path, "give the path of a tokenizer.json"), spec, read_chat_template(path.parent))


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of transformers' folder, from chat_template.jinja or tokenizer_config.json; None: it has none.

    ValueError: one of these files is malformed, or there are several templates and none is the default.
    """
    path, fields = folder / TOKENIZER_CONFIG_FILE, {}
    try:
        if path.exists():
            fields = parse_json(read_text(path))
        source = fields.get("chat_template")
        if (folder / TEMPLATE_FILE).exists():
            path = folder / TEMPLATE_FILE
            source = read_text(path)
        if isinstance(source, list):  # transformers before 5 saved several templates as a list
            source = {entry["name"]: entry["template"] for entry in source}
        if isinstance(source, dict):  # transformers applies the one named "default"
            if source and "default" not in source:
                raise ValueError(f"none of its templates {', '.join(map(repr, sorted(source)))} is named 'default'")
            source = source.get("default")
        if source is None:
            return None
        tokens = {name: fields[name] for name in _SPECIAL_TOKENS if fields.get(name) is not None}
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
        for text in (source, *texts.values()):
            text.encode()  # raises for a lone surrogate, which no tokenizer takes, and for what is no text
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no chat template can be read from it ({error}); correct or remove it") from error
    return ChatTemplate(source, tuple(texts.items()))


def _parse(path: Path, fix: str) -> tokenizers.Tokenizer:
    with _readable(str(path), "cannot be read", fix):
        text = read_text(path)
        settings = parse_json(text)
        if isinstance(settings, dict):  # if not, the library says so
            require_loadable(settings)
        backend = tokenizers.Tokenizer.from_str(text)
        require_usable(backend)
        return backend


@contextlib.contextmanager
def _readable(name: str, what: str, fix: str = "correct its tokenizer.json") -> Iterator[None]:
    """Turn errors about a tokenizer.json (the library's are a plain Exception or a Rust panic) into ValueError."""
    try:
        yield
    except BaseException as error:
        is_theirs = type(error) is Exception or type(error).__name__ == "PanicException"
        if not is_theirs and not isinstance(error, (OSError, ValueError)):
            raise
        raise ValueError(f"tokenizer {name!r}: {what} ({told(error)}); {fix}") from error


def _cached_bpe(spec: str, corpus: Corpus, vocab_size: int, heldout_every: int, cache_dir: Path) -> Tokenizer:
    made_from: list[Any] = [corpus.fingerprint(), vocab_size, heldout_every, _BPE_SAMPLE_BYTES]
    digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    path = cache_dir / "tokenizers" / f"bpe-{vocab_size}-{digest}.json"
    if not path.exists():
        with only_one_process(path):
            if not path.exists():
                Tokenizer(_train_bpe(corpus, vocab_size, heldout_every), spec).save(path)
    return Tokenizer(_parse(path, "delete it and it is trained again"), spec)


def _train_bpe(corpus: Corpus, vocab_size: int, heldout_every: int) -> tokenizers.Tokenizer:
    """A byte-level BPE that depends on the training split alone."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = _training_sample(corpus, heldout_every)
    _interruptible(lambda read: backend.train_from_iterator(read(sample), trainer))
    return backend


def _training_sample(corpus: Corpus, heldout_every: int) -> Iterator[str]:
    stride = 1 + corpus.file_bytes() // _BPE_SAMPLE_BYTES
    texts = (text for _, split, text in split_parts(corpus, heldout_every) if split == "train")
    pieces = chain.from_iterable(map(pieces_of, islice(texts, 0, None, stride)))
    return chain.from_iterable(map(_without_longer_words, pieces))


def pieces_of(text: str) -> Iterator[str]:
    """``text`` in pieces of at most `_PIECE` characters; it is cut before a blank if there is one."""
    start = 0
    while len(text) - start > _PIECE:
        blank = text.rfind(" ", start + 1, start + _PIECE)
        end = blank if blank > 0 else start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _without_longer_words(text: str) -> Iterator[str]:
    """``text`` in parts: runs of at least `_LONGEST_WORD` blanks, or non-blanks, are cut every so many characters."""
    start = 0
    for word in _LONGER_WORD.finditer(text):
        yield text[start : word.start()]
        yield from (text[at : min(at + _LONGEST_WORD, word.end())] for at in range(*word.span(), _LONGEST_WORD))
        start = word.end()
    yield text[start:]


def _interruptible(work: Callable[[Callable[[Iterator[str]], Iterator[str]]], object]) -> None:
    """Run ``work``, native code that handles no signals, in a thread that an interrupted caller leaves behind.

    ``work`` gets a function to wrap its texts. The wrapped texts end once the caller has left, so that the thread runs
    no Python while the process ends.
    """
    done: Future[None] = Future()
    left = Event()

    def read(texts: Iterator[str]) -> Iterator[str]:
        for text in texts:
            if left.is_set():
                raise KeyboardInterrupt
            yield text

    def run() -> None:
        try:
            work(read)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    thread = Thread(target=run, name="tilemoe-bpe", daemon=True)
    thread.start()
    try:
        done.result()
    except KeyboardInterrupt:
        left.set()
        thread.join(_LEAVING_S)
        raise

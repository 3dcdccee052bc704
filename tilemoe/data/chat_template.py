"""Examples as tokens, and which of them are learnt: by the tokenizer's chat template, or a plain one.

n tokens of an example

The plain template, of a tokenizer that has none: a turn is its role, a colon, a line end, its content and two line
ends; an assistant's content is followed by the end-of-text token instead. An assistant's content and that token are
learnt, unless the turn's weight is 0. What follows the last assistant's turn is left out.
`PLAIN` is the same for transformers; exports have it.
Of a prompt and its completion, the completion and an end-of-text token after it are learnt, whatever the tokenizer.

A chat template is a Jinja text that transformers applies. The words between ``{% generation %}`` and
``{% endgeneration %}`` are learnt; of a template without these, all that it writes of an assistant's turn after the
words that ask for one (``add_generation_prompt``). Of a turn with weight 0 nothing is; a template that marks must then
mark one run of words in each of the assistant's turns, by which these are told apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import processors

from tilemoe.data.conversations import ASSISTANT, Completion, Conversation, Example, is_learnt

if TYPE_CHECKING:
    from tilemoe.data.tokenizer import Tokenizer

TOKENIZER_CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

Encoded = tuple[NDArray[np.int64], NDArray[np.bool_]]  # ids (n,) and whether each is learnt (n,)


class Piece(NamedTuple):
    """A text of the plain template. ``ends``: the end-of-text token comes after it, learnt if the text is."""

    text: str
    ends: bool = False
    is_learnt: bool = False


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja text and the special tokens that it may name, as (field, text), e.g. ("eos_token", "<|im_end|>")."""

    source: str
    special_tokens: tuple[tuple[str, str], ...]

    def config(self) -> dict[str, str]:
        """The fields of a tokenizer_config.json that hold it."""
        return {**dict(self.special_tokens), "chat_template": self.source}


PLAIN = ChatTemplate(
    "{% for message in messages %}{{ message['role'] + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}",
    (),
)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """That of a folder of transformers, of chat_template.jinja or tokenizer_config.json; None if it has none.

    ValueError: one of these files is not what it should be, or there are several templates and none is the default.
    """
    path, fields = folder / TOKENIZER_CONFIG_FILE, {}
    try:
        if path.exists():
            fields = json.loads(path.read_text(encoding="utf-8"))
        source = fields.get("chat_template")
        if (folder / TEMPLATE_FILE).exists():
            path = folder / TEMPLATE_FILE
            source = path.read_text(encoding="utf-8")
        if isinstance(source, list):  # as transformers' releases before 5 saved several
            source = {entry["name"]: entry["template"] for entry in source}
        if isinstance(source, dict):
            source = _default(source)
        if source is None:
            return None
        tokens = {name: fields.get(name) for name in _SPECIAL_TOKENS}
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
        for text in (source, *texts.values()):
            str(text).encode()  # half of a surrogate pair is in no text that can be tokens
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: no chat template can be read from it ({error}); correct or remove it") from error
    return ChatTemplate(str(source), tuple((name, str(text)) for name, text in texts.items() if text is not None))


def _default(templates: dict[str, str]) -> str | None:
    """Of several by name, the one that transformers applies; None of none. ValueError: it would apply none of them."""
    if templates and "default" not in templates:
        names = ", ".join(map(repr, sorted(templates)))
        raise ValueError(f"of its templates {names} none is named 'default', as the one to apply must be")
    return templates.get("default")


class ChatEncoder:
    """Tokenizes examples, with the loss mask of their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """ValueError: the tokenizer has a chat template, and there is no transformers to apply it."""
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template
        if self._template is not None and self._template.source == PLAIN.source:  # of an export; no need of Jinja
            self._template = None
        self._theirs: Any = None if self._template is None else _of_transformers(tokenizer, self._template)

    def encode(self, example: Example) -> Encoded:
        """ids (n,) and whether each is learnt (n,), of which one at least after the first is.

        ValueError naming the example: its template cannot take it, or learns nothing of it.
        """
        if isinstance(example, Completion):
            encoded = self._encode_pieces([Piece(example.prompt), Piece(example.completion, ends=True, is_learnt=True)])
        elif self._template is None:
            encoded = self._encode_pieces(plain_pieces(example.messages))
        else:
            encoded = self._apply(example, self._template)
        if encoded[0].max(initial=0) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"tokenizer {self._tokenizer.name!r}: its chat template uses tokens that it lacks; add them to its "
                "added_tokens"
            )
        if not encoded[1][1:].any():
            raise ValueError(f"{example.name}: no token to learn; correct the chat template, or remove the line")
        return encoded

    def ask(self, prompt: str) -> tuple[str, list[int]]:
        """The text of a user's turn and of what asks for an answer, and the tokens at any of which the answer ends."""
        ends = self._tokenizer.end_ids
        if self._template is None:
            return f"user:\n{prompt}\n\n{ASSISTANT}:\n", ends
        turns = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": "!"}]
        example = Conversation("prompt", tuple(turns))
        asked: str = self._render(example, turns[:1], tokenize=False, add_generation_prompt=True)
        after: str = self._render(example, turns, tokenize=False).rpartition("!")[2]
        special = self._tokenizer.backend.get_added_tokens_decoder()
        return asked, ends + [token for token in self._tokenizer.encode(after).tolist() if token in special][:1]

    def _encode_pieces(self, pieces: Sequence[Piece]) -> Encoded:
        """Each piece's own tokens, so that none is partly learnt."""
        ids, learnt = [], []
        for piece, found in zip(pieces, self._tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
            ids.append(np.append(found, self._tokenizer.separator_id) if piece.ends else found)
            learnt.append(np.full(ids[-1].size, piece.is_learnt))
        return np.concatenate(ids), np.concatenate(learnt)

    def _apply(self, example: Conversation, template: ChatTemplate) -> Encoded:
        messages = list(example.messages)
        if _MARKED.search(template.source):
            options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            found = self._render(example, messages, **options)
            marked = np.asarray(found["assistant_masks"], np.bool_)
            return np.asarray(found["input_ids"], np.int64), _without_weightless(example, marked)
        text, spans = self._unmarked(example, messages)
        found = self._theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        first, end = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2).T
        learnt = np.zeros(first.size, np.bool_)
        for span_first, span_end in spans:
            learnt |= (first >= span_first) & (first < span_end) & (end > first)
        return np.asarray(found["input_ids"], np.int64), learnt

    def _unmarked(self, example: Conversation, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a template without marks, and [first, end) of the characters of each turn to learn."""
        whole: str = self._render(example, messages, tokenize=False)
        spans = []
        for turn, message in enumerate(messages):
            if not is_learnt(message):
                continue
            before: str = self._render(example, messages[:turn], tokenize=False, add_generation_prompt=True)
            after: str = self._render(example, messages[: turn + 1], tokenize=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"{example.name}: the chat template writes messages[{turn}] otherwise when more turns follow, so "
                    "what the assistant says cannot be told; mark it in the template with {% generation %}"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _render(self, example: Conversation, messages: list[dict[str, Any]], **options: Any) -> Any:
        try:
            return self._theirs.apply_chat_template(messages, **options)
        except Exception as error:  # a template is a program, and may fail like any
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{example.name}: the chat template does not take it ({reason}); correct or remove the line"
            ) from error


def _without_weightless(example: Conversation, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """``marked`` (n,) without the runs of those of the assistant's turns whose weight is 0."""
    are_learnt = [is_learnt(message) for message in example.messages if message["role"] == ASSISTANT]
    if all(are_learnt):
        return marked
    begins = marked & ~np.append(False, marked[:-1])
    if begins.sum() != len(are_learnt):
        raise ValueError(
            f"{example.name}: the chat template marks {begins.sum()} runs of words of {len(are_learnt)} assistant's "
            "turns, so the one with weight 0 cannot be told; mark each turn's once, or leave 'weight' out"
        )
    run = np.cumsum(begins) - 1  # -1 before the first
    return marked & np.array(are_learnt)[run]


def plain_pieces(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    """A conversation by the plain template."""
    pieces, given = [], ""
    for message in messages:
        given += f"{message['role']}:\n"
        if message["role"] == ASSISTANT:
            pieces += [Piece(given), Piece(message["content"], ends=True, is_learnt=is_learnt(message))]
            given = ""
        else:
            given += f"{message['content']}\n\n"
    return pieces  # nothing follows what comes after the last answer, so it is left out


def _of_transformers(tokenizer: Tokenizer, template: ChatTemplate) -> Any:
    try:
        import jinja2  # noqa: F401 (which transformers asks for only when it applies a template)
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(
            f"tokenizer {tokenizer.name!r}: applying its chat template needs transformers; pip install 'tilemoe[hf]'"
        ) from error
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, chat_template=template.source, **dict(template.special_tokens)
    )
    # It would add special tokens again, and may trim whitespace from the offsets, which the loss mask is made of.
    theirs.backend_tokenizer.post_processor = processors.Sequence([])
    return theirs

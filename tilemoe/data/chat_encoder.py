"""Encodes examples to tokens and a loss mask, by the tokenizer's chat template or by a plain one.

n tokens of an example

The plain template, for a tokenizer without one: a turn is its role, a colon, a line end, its content and two line
ends; an assistant's content is followed by the end-of-text token instead. The assistant's content and that token are
learnt, unless the turn's weight is 0. Turns after the last assistant's turn are left out.
`tilemoe.data.tokenizer.PLAIN` is the same template for transformers; exports have it.
For a prompt and its completion, the completion and an end-of-text token after it are learnt, with any tokenizer.

A chat template is a Jinja text that transformers applies. The text between ``{% generation %}`` and
``{% endgeneration %}`` is learnt. If a template has no such marks, the whole assistant's turn is learnt, after the text
that asks for it (``add_generation_prompt``). A turn with weight 0 is not learnt; a template with marks must then mark
one span in each of the assistant's turns, so that spans can be matched to turns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilemoe.checks import told
from tilemoe.data.bounded import Renderer
from tilemoe.data.conversations import ASSISTANT, Completion, Conversation, Example, is_learnt
from tilemoe.data.corpus import clean_text
from tilemoe.data.tokenizer import PLAIN, ChatTemplate, Tokenizer
from tilemoe.data.windows import END, FIRST, ID, Tokens

_NOT_PLAIN = ("tool_calls", "function_call", "reasoning_content", "thinking")  # of a turn; the plain template has none
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Encoded = tuple[NDArray[np.int64], NDArray[np.bool_]]  # ids (n,) and whether each is learnt (n,)
Span = tuple[int, int]  # [first, end) of characters


class Piece(NamedTuple):
    """A text of the plain template. ``ends``: the end-of-text token comes after it, learnt if the text is."""

    text: str
    ends: bool = False
    is_learnt: bool = False


class ChatEncoder:
    """Tokenizes examples, with the loss mask of their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """ValueError: the tokenizer has a chat template, and there is no transformers to apply it."""
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template
        if self._template is not None and self._template.source == PLAIN.source:  # an export's; it needs no Jinja
            self._template = None
        separator, end = tokenizer.separator_id, tokenizer.backend.id_to_token(tokenizer.separator_id)
        is_read = tokenizer.encode(f"a{end}a").tolist().count(separator) == 1
        is_added = separator in tokenizer.backend.get_added_tokens_decoder()
        self._end_in_text = end if is_added and is_read else None
        if self._template is not None:
            self._theirs = _of_transformers(tokenizer, self._template)
            self._with_special_tokens = type(tokenizer)(self._theirs.backend_tokenizer, tokenizer.name)

    def encode(self, example: Example) -> Encoded:
        """ids (n,) and whether each is learnt (n,); at least one after the first is.

        ValueError naming the example: the template cannot take it, or leaves nothing to learn.
        """
        if isinstance(example, Completion):
            encoded = self._encode_pieces([Piece(example.prompt), Piece(example.completion, ends=True, is_learnt=True)])
        elif self._template is None:
            for unread in (field for turn in example.messages for field in filter(turn.get, _NOT_PLAIN)):
                raise ValueError(f"{example.name}: {unread!r} needs a tokenizer with a chat template; remove it")
            encoded = self._encode_pieces(plain_pieces(example.messages))
        else:
            text, spans = self._rendered(example, self._template)
            encoded = _marked(self._with_special_tokens.tokens(text), spans)
        if encoded[0].max(initial=0) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"tokenizer {self._tokenizer.name!r}: its chat template uses tokens that are not in its vocabulary; "
                "add them to its added_tokens"
            )
        if not encoded[1][1:].any():
            raise ValueError(f"{example.name}: no token to learn; correct the chat template, or remove the line")
        return encoded

    def ask(self, prompt: str) -> tuple[str, list[int]]:
        """The text of a user's turn and of the request for an answer, and the ids that end the answer."""
        ends = self._tokenizer.end_ids
        if self._template is None:
            return f"user:\n{prompt}\n\n{ASSISTANT}:\n", ends
        turns = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": "!"}]
        example = Conversation("prompt", tuple(turns))
        asked, _ = self._render(example, turns[:1], add_generation_prompt=True)
        after = self._render(example, turns)[0].rpartition("!")[2]
        special = self._tokenizer.backend.get_added_tokens_decoder()
        return asked, ends + [token for token in self._tokenizer.encode(after).tolist() if token in special][:1]

    def _encode_pieces(self, pieces: Sequence[Piece]) -> Encoded:
        """The tokens of the pieces. If the tokenizer can read the end-of-text token in a text, it is written out there.

        If not, its id is appended, and the next piece begins a new text. The last one's id is always appended.
        """
        end, text, spans, found = self._end_in_text, "", [], []
        for place, piece in enumerate(pieces, start=1):
            is_written = piece.ends and end is not None and place < len(pieces)
            first = len(text)
            text += clean_text(piece.text) + (end if is_written and end else "")
            if piece.is_learnt:
                spans.append((first, len(text)))
            if piece.ends and not is_written:
                ids, learnt = _marked(self._tokenizer.tokens(text), spans)
                found.append((np.append(ids, self._tokenizer.separator_id), np.append(learnt, piece.is_learnt)))
                text, spans = "", []
        ids, learnt = map(np.concatenate, zip(*found, strict=True))
        return ids, learnt

    def _rendered(self, example: Conversation, template: ChatTemplate) -> tuple[str, list[Span]]:
        """The text of a conversation, and the spans that are learnt."""
        messages = list(example.messages)
        if not _MARKED.search(template.source):
            return self._unmarked(example, messages)
        text, marked = self._render(example, messages)
        spans = [(first, end) for first, end in marked if first < end]
        are_learnt = [is_learnt(message) for message in messages if message["role"] == ASSISTANT]
        if all(are_learnt):
            return text, spans
        if len(spans) != len(are_learnt):
            raise ValueError(
                f"{example.name}: the chat template marks {len(spans)} spans in {len(are_learnt)} assistant's turns, "
                "so the span of the turn with weight 0 is unknown; mark one in each turn, or leave 'weight' out"
            )
        return text, list(compress(spans, are_learnt))

    def _unmarked(self, example: Conversation, messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
        """The text by a template without marks, and the spans that are learnt."""
        whole, _ = self._render(example, messages)
        spans = []
        for turn, message in enumerate(messages):
            if not is_learnt(message):
                continue
            before, _ = self._render(example, messages[:turn], add_generation_prompt=True)
            after, _ = self._render(example, messages[: turn + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"{example.name}: the chat template renders messages[{turn}] differently when more turns follow, "
                    "so the assistant's text cannot be found; mark it in the template with {% generation %}"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self._theirs.chat_template)

    def _render(self, example: Conversation, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[Span]]:
        """The text that the template renders, and the spans that it marks."""
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text, marked = self._renderer.render(given, **options, **self._theirs.special_tokens_map)
            if text != clean_text(text):
                raise ValueError("its text has NUL or half of a surrogate pair")
            return text, marked
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(
                f"{example.name}: the chat template cannot render it ({told(error)}); correct or remove the line"
            ) from error


def _marked(tokens: Tokens, spans: Sequence[Span]) -> Encoded:
    """The ids (n,), and the loss mask: a token is learnt if it overlaps a span, or lies in one without a character."""
    first, end = tokens[:, FIRST], np.maximum(tokens[:, END], tokens[:, FIRST] + 1)
    learnt = np.zeros(len(tokens), np.bool_)
    for span_first, span_end in spans:
        learnt |= (first < span_end) & (end > span_first)
    return tokens[:, ID], learnt


def plain_pieces(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    """The pieces of a conversation by the plain template."""
    pieces, given = [], ""
    for message in messages:
        given += f"{message['role']}:\n"
        if message["role"] == ASSISTANT:
            pieces += [Piece(given), Piece(message["content"], ends=True, is_learnt=is_learnt(message))]
            given = ""
        else:
            given += f"{message['content']}\n\n"
    return pieces  # turns after the last answer have no answer, so they are left out


def _of_transformers(tokenizer: Tokenizer, template: ChatTemplate) -> Any:
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(
            f"tokenizer {tokenizer.name!r}: applying its chat template needs transformers; pip install 'tilemoe[hf]'"
        ) from error
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, chat_template=template.source, **dict(template.special_tokens)
    )

"""Fine-tuning examples: conversations, or prompts and their completions, a JSON object on each line.

``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}`` or
``{"prompt": "...", "completion": "..."}``; one file may have both. ShareGPT's "conversations" and Alpaca's
"instruction", "input" and "output" are read as messages: the user's turn is then the instruction, an empty line and the
input. Any other line is an error. So are a line without an assistant's turn or with an empty one, which leaves nothing
to learn, and a line with "tools", "system", "history", "images" or the like, which a template would not see.
An assistant's turn with "weight" 0 is context and not learnt, as in OpenAI's format; with 1 or without, it is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilemoe.data.corpus import Corpus, clean_text, read_records, unreadable

CHAT_SUFFIXES = frozenset({".jsonl"})
ASSISTANT = "assistant"
_UNREAD = ("tools", "functions", "system", "history", "image", "images", "videos", "audios")
_ROLES = MappingProxyType({"human": "user", "gpt": ASSISTANT})  # ShareGPT's


@dataclass(frozen=True)
class Conversation:
    """Turns for a chat template: each has a "role", a "content", and any other fields that the line gives.

    ``name``: the file and the line.
    """

    name: str
    messages: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Completion:
    """A prompt and the text to learn after it. ``name``: the file and the line."""

    name: str
    prompt: str
    completion: str


Example = Conversation | Completion


def is_learnt(message: dict[str, Any]) -> bool:
    """Whether a turn is learnt: the assistant's, unless its weight is 0."""
    return bool(message["role"] == ASSISTANT and message.get("weight") != 0)


def read_examples(corpus: Corpus) -> Iterator[Example]:
    """Every example of the corpus' files, in order. ValueError: a line is no example; it names file and line."""
    for file in corpus.files:
        path = corpus.root / file
        try:
            for number, record in read_records(path, corpus.undecodable, corpus.longest_line):
                yield _example(f"{path}:{number}", record)
        except OSError as error:
            raise unreadable(Path(path), error) from error


def _example(name: str, record: dict[str, Any]) -> Example:
    for unread in filter(record.get, _UNREAD):
        raise ValueError(f"{name}: {unread!r} is not passed to chat templates; write its content into a turn")
    turns = record.get("messages", record.get("conversations"))
    alpaca = [record.get("instruction"), record.get("input") or "", record.get("output")]
    if turns is None and all(isinstance(text, str) for text in alpaca):
        asked = "\n\n".join(filter(None, alpaca[:2]))
        turns = [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": alpaca[2]}]
    if turns is not None:
        return Conversation(name, _messages(name, turns))
    if "prompt" not in record or "completion" not in record:
        raise ValueError(
            f"{name}: no 'messages', no 'prompt' with 'completion', and no ShareGPT or Alpaca fields, but "
            f"{', '.join(map(repr, record)) or 'no field'}; rename them or remove the line"
        )
    texts = []
    for field in ("prompt", "completion"):
        text = record[field]
        if not isinstance(text, str) or not clean_text(text).strip():
            raise ValueError(f"{name}: {field!r} must be a text that is not empty; correct or remove the line")
        texts.append(clean_text(text))
    return Completion(name, *texts)


def _messages(name: str, given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list):
        raise ValueError(f"{name}: 'messages' must be a list; correct or remove the line")
    messages = []
    for turn, message in enumerate(given):
        where = f"{name}: messages[{turn}]"
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{where} must have a 'role' and a 'content' that are texts; correct or remove the line")
        role, content = _ROLES.get(role, role), clean_text(content)
        if role == ASSISTANT and not content.strip():
            raise ValueError(f"{where}: the assistant's turn is empty; fill it in or remove the line")
        if role == ASSISTANT and turn == 0:
            raise ValueError(f"{where}: the assistant speaks first; give the turn that it answers, or remove the line")
        _check_weight(where, role, fields.get("weight"))
        messages.append({**fields, "role": role, "content": content})
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError(f"{name}: no assistant's turn, so nothing to learn; add one or remove the line")
    if not any(map(is_learnt, messages)):
        raise ValueError(f"{name}: every assistant's turn has weight 0, so nothing to learn; remove the line")
    return tuple(messages)


def _check_weight(where: str, role: str, weight: Any) -> None:
    if weight is None:  # as tables write it for a turn without a weight
        return
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{where}: 'weight' must be 0 (not learnt) or 1, got {weight!r}; correct it or leave it out")
    if role != ASSISTANT and weight == 1:
        raise ValueError(f"{where}: 'weight' is 1, but only the assistant's turns are learnt; leave it out")

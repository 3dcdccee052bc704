"""The chat template of a tokenizer, as transformers' folders and our exports keep it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilemoe.checks import parse_json
from tilemoe.files import read_text

TOKENIZER_CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


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
        tokens = {name: fields.get(name) for name in _SPECIAL_TOKENS}
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
        for text in (source, *texts.values()):
            str(text).encode()  # raises for a lone surrogate, which no tokenizer takes
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no chat template can be read from it ({error}); correct or remove it") from error
    return ChatTemplate(str(source), tuple((name, str(text)) for name, text in texts.items() if text is not None))

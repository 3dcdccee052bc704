"""A prompt, continued: what has no text, what a terminal is not to obey."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch

from tilemoe.data import load_tokenizer
from tilemoe.train import sample
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe
from tilemoe.train.sample import continue_text, printable, prompt_ids

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "sampled", "expected"),
    [
        (3, b"abc", (3, False)),
        (6, b"abcdef", (6, False)),
        (7, b"abcdef", (6, True)),
        (7, b"abc\0ef", (3, False)),  # the end was there before the context was full
    ],
)
def test_a_text_that_the_context_cuts_says_so(
    dense_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, asked: int, sampled: bytes, expected: tuple[int, bool]
) -> None:
    def fake(model: object, ids: torch.Tensor, count: int, **options: object) -> torch.Tensor:
        assert count == len(sampled)
        return torch.cat([ids, torch.tensor([list(sampled)])], dim=1)

    monkeypatch.setattr(sample, "generate", fake)
    model, tokenizer = build_model(dense_recipe, CPU), load_tokenizer("bytes")
    found = continue_text(model, tokenizer, "x" * 10, asked, temperature=0.0, top_k=0, seed=0)
    assert found == ("x" * 10 + sampled.partition(b"\0")[0].decode(), *expected)


def test_a_prompt_of_spaces_is_continued(tmp_path: Path, dense_recipe: Recipe) -> None:
    """Some tokenizers see nothing in them; then a document begins."""
    assert prompt_ids(load_tokenizer("bytes"), "  ", 16, "prompt") == [32, 32]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    blind = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert prompt_ids(blind, " \n", 16, "prompt") == [0]
    options: dict[str, object] = {"temperature": 0.0, "top_k": 0, "seed": 0}
    assert continue_text(build_model(dense_recipe, CPU), blind, " ", 2, **options).text in ("", "a", "aa", "a a")
    for empty in ("", "\0"):
        with pytest.raises(ValueError, match="no tokens"):
            prompt_ids(blind, empty, 16, "prompt")


def test_ids_that_the_tokenizer_lacks_are_not_sampled(dense_recipe: Recipe) -> None:
    """A vocabulary is often padded."""
    recipe = replace(dense_recipe, model=replace(dense_recipe.model, vocab_size=320))
    model, tokenizer = build_model(recipe, CPU), load_tokenizer("bytes")
    with torch.no_grad():
        model.head.weight[256:] *= 100
    for options in (
        {"temperature": 0.0, "top_k": 0},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 1.0, "top_k": 0},
    ):
        assert continue_text(model, tokenizer, "ab", 9, seed=0, **options).text.startswith("ab")


def test_a_text_ends_with_the_document_or_with_the_turn(
    dense_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokenizer("bytes").save(tmp_path / "tokenizer.json")
    config = {"eos_token": "<0x21>", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model, plain, chat = (
        build_model(dense_recipe, CPU),
        load_tokenizer("bytes"),
        load_tokenizer(str(tmp_path / "tokenizer.json")),
    )
    assert (plain.end_ids, chat.end_ids) == ([0], [0, ord("!")])
    options: dict[str, object] = {"temperature": 0.0, "top_k": 0, "seed": 0}
    for text, tokenizer, expected in (("a!b\0c", plain, "xa!b"), ("a!b\0c", chat, "xa"), ("a\0b!c", chat, "xa")):
        monkeypatch.setattr(
            sample, "generate", lambda m, ids, *_, text=text, **__: torch.tensor([list(b"x" + text.encode())])
        )
        assert continue_text(model, tokenizer, "x", 5, **options).text == expected


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\tc\n\x07é") == "a\ufffd[31mb\tc\n\ufffdé"

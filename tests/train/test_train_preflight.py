"""What is found before a corpus is read: the corpus of these tests is not there."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import changed

from tilemoe.train.config import LoRAConfig, Recipe, load_recipe
from tilemoe.train.run import train

GB = 10**9


def recipe_with(out_dir: Path, corpus: str = "/no/such/corpus", **model: Any) -> Recipe:
    recipe = changed(load_recipe("tiny"), data__corpus=corpus, train__out_dir=str(out_dir))
    return replace(recipe, model=replace(recipe.model, **model))


def test_a_file_in_the_way_is_called_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    for folder in (tmp_path / "runs", tmp_path / "runs" / "first"):
        with pytest.raises(ValueError, match=rf"^train\.out_dir {folder}: {tmp_path}/runs is a file; choose another"):
            train(recipe_with(folder))
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_run_does_not_become_part_of_its_corpus(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"^train\.out_dir {tmp_path}/a/run lies in corpus '{tmp_path}'; choose another"
    ):
        train(recipe_with(tmp_path / "a" / "run", str(tmp_path)))
    for folder in (tmp_path / ".runs" / "a", tmp_path.with_name("b")):  # not read with the corpus
        with pytest.raises(ValueError, match="no usable file in this folder"):
            train(recipe_with(folder, str(tmp_path)))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, int]] = []

    def access(path: Path, mode: int) -> bool:  # to root, whom tests may run as, everything is allowed
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(ValueError, match=rf"{tmp_path} cannot be written; correct its permissions"):
        train(recipe_with(tmp_path / "a" / "b"))
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("free", "is_enough"), [(0.001, False), (100, True)])
def test_room_for_a_checkpoint(free: float, is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free * GB)))
    message = "no/such/corpus" if is_enough else r"a checkpoint takes .* GB, and 0\.001 GB are free; make room"
    with pytest.raises(ValueError, match=message):
        train(recipe_with(tmp_path / "run"))


@pytest.mark.parametrize(("tokenizer", "ids"), [("bytes", 256), ("bpe:4096", 4096)])
def test_a_vocabulary_that_is_too_small(tokenizer: str, ids: int, tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path / "run", vocab_size=200)
    recipe = replace(recipe, data=replace(recipe.data, tokenizer=tokenizer))
    message = (
        rf"model\.vocab_size \(200\) is below the {ids} ids of tokenizer '{tokenizer}'; set --model\.vocab-size {ids}$"
    )
    with pytest.raises(ValueError, match=message):
        train(recipe)
    with pytest.raises(ValueError, match=rf"than the 200 of the model in {tmp_path}; resize the model's embeddings"):
        train(recipe, init_from=tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer 'bpe:x': write 'bpe:N'"):
        train(replace(recipe, data=replace(recipe.data, tokenizer="bpe:x")))


def test_a_prompt_that_does_not_fit(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path / "run", vocab_size=256)
    data = replace(recipe.data, tokenizer="bytes")
    for prompt, message in (("x" * recipe.model.max_seq_len, "tokens fill the context"), ("\0", "it has no tokens")):
        prompted = changed(recipe, data=data, train__sample_prompt=prompt)
        with pytest.raises(ValueError, match=rf"^train\.sample_prompt: .*{message}"):
            train(prompted)
        with pytest.raises(ValueError, match="no/such/corpus"):
            train(changed(prompted, train__sample_tokens=0))


def test_a_prompt_that_does_not_fit_a_tokenizer_that_is_trained_first(moe_recipe: Recipe) -> None:
    recipe = changed(moe_recipe, data__tokenizer="bpe:300", model__vocab_size=300, train__sample_prompt="#" * 50)
    with pytest.raises(ValueError, match=r"^train\.sample_prompt: \d+ tokens fill the context of 16; shorten it$"):
        train(recipe)
    assert not Path(recipe.train.out_dir).exists()


def test_a_router_that_cannot_learn(tmp_path: Path) -> None:
    """Adapters beside a frozen router can."""
    recipe = recipe_with(tmp_path / "run")
    recipe = changed(recipe, model__moe__num_experts_per_tok=1, optim__name="adamw")
    adapters = replace(recipe, lora=LoRAConfig(rank=2))
    training = replace(recipe, lora=LoRAConfig(rank=2, train_router=True))
    for refused, init_from in ((recipe, None), (training, tmp_path)):
        with pytest.raises(ValueError, match=r"^router cannot learn: .* set router\.normalize=False, or freeze"):
            train(refused, init_from=init_from)
    with pytest.raises(ValueError, match="no/such/corpus"):
        train(adapters, init_from=tmp_path)

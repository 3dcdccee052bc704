"""Recipes: the packaged ones load, mistakes are one line that names the setting, nothing imports torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tilemoe.config import to_dict
from tilemoe.models.flops import flops_per_token
from tilemoe.train.config import (
    DataConfig,
    OptimConfig,
    TrainConfig,
    default_cache_dir,
    differences,
    list_recipes,
    load_recipe,
    parse_recipe,
)


def test_the_packaged_recipes_are_listed_and_load_under_their_own_name() -> None:
    assert {"smoke", "tiny", "tiny-dense", "single-gpu"} <= set(list_recipes())
    for name in list_recipes():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description


def test_a_recipe_survives_json(tmp_path: Path) -> None:
    recipe = load_recipe("tiny")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(to_dict(recipe)))
    assert load_recipe(path) == recipe


def test_tiny_dense_is_the_dense_twin_of_tiny() -> None:
    moe, dense = load_recipe("tiny"), load_recipe("tiny-dense")
    assert moe.data == dense.data
    assert moe.optim == dense.optim
    assert replace(moe.train, out_dir="x") == replace(dense.train, out_dir="x")
    assert flops_per_token(dense.model) == pytest.approx(flops_per_token(moe.model), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (DataConfig, {"seq_len": 0, "batch_size": 1}, "data.seq_len"),
        (DataConfig, {"seq_len": 8, "batch_size": 1.5}, "data.batch_size"),
        (DataConfig, {"seq_len": 8, "batch_size": 1, "heldout_every": 1}, "data.heldout_every"),
        (DataConfig, {"seq_len": 8, "batch_size": 1, "corpus": ""}, "data.corpus"),
        (OptimConfig, {"lr": 0.0}, "optim.lr"),
        (OptimConfig, {"lr": float("nan")}, "optim.lr"),
        (OptimConfig, {"lr": 1.0, "beta2": 1.0}, "optim.beta2"),
        (OptimConfig, {"lr": 1.0, "min_lr_ratio": 1.5}, "optim.min_lr_ratio"),
        (OptimConfig, {"lr": 1.0, "schedule": "linear"}, "optim.schedule"),
        (OptimConfig, {"lr": 1.0, "warmup_steps": -1}, "optim.warmup_steps"),
        (TrainConfig, {"steps": 0, "out_dir": "x"}, "train.steps"),
        (TrainConfig, {"steps": True, "out_dir": "x"}, "train.steps"),
        (TrainConfig, {"steps": 1, "out_dir": ""}, "train.out_dir"),
        (TrainConfig, {"steps": 1, "out_dir": "x", "precision": "fp8"}, "train.precision"),
        (TrainConfig, {"steps": 1, "out_dir": "x", "keep_last": 0}, "train.keep_last"),
        (TrainConfig, {"steps": 1, "out_dir": "x", "recompute": "all"}, "train.recompute"),
        (TrainConfig, {"steps": 1, "out_dir": "x", "sample_prompt": ""}, "train.sample_prompt"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(kind: type, values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        kind(**values)
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_fit_together() -> None:
    recipe = load_recipe("smoke")
    with pytest.raises(ValueError, match=r"data\.seq_len .* model\.max_seq_len"):
        replace(recipe, data=replace(recipe.data, seq_len=10_000))


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="smoke, tiny, tiny-dense"):
        load_recipe("huge")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "somewhere: "),
        ("[]", "table of settings"),
        ('{"name": "x"}', "description: required"),
        ('{"nmae": "x"}', "nmae: no such setting"),
    ],
)
def test_a_broken_recipe_file_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="somewhere") as caught:
        parse_recipe(text, "somewhere")
    assert message in str(caught.value)


def test_a_missing_recipe_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        load_recipe(tmp_path / "none.json")


def test_differences_are_dotted_and_complete() -> None:
    recipe = load_recipe("tiny")
    other = replace(recipe, optim=replace(recipe.optim, lr=1.0), data=replace(recipe.data, corpus="elsewhere"))
    found = list(differences(to_dict(recipe), to_dict(other), ""))
    assert [line.split()[0] for line in found] == ["data.corpus", "optim.lr"]
    assert not list(differences(to_dict(recipe), to_dict(recipe), ""))
    dense = replace(recipe.model, moe=None, dense_intermediate_size=8)
    assert next(differences(to_dict(recipe.model), to_dict(dense), "model.")).startswith(
        "model.moe is a table of settings here and None"
    )


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TILEMOE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "tilemoe"
    monkeypatch.setenv("TILEMOE_CACHE", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    assert DataConfig(8, 1).cache_path == tmp_path / "mine"
    assert DataConfig(8, 1, cache_dir="here").cache_path == Path("here")


def test_recipes_do_not_import_torch() -> None:
    code = (
        "import sys; from tilemoe.train.config import load_recipe; load_recipe('tiny'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"[" * 100_000, b"{'name': 1}"])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.json: not JSON \(.*\); correct the file") as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)

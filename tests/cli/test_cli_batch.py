"""``--data.batch-size auto`` and ``--global-batch``: the plan, the run and recipe 7b agree; what is given stays."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import raises_one_line

from tilemoe.cli import train as command
from tilemoe.cli.batch import proposal_for, proposed
from tilemoe.config import ModelConfig, ParallelConfig, to_dict
from tilemoe.perf.hardware import GPUS
from tilemoe.train import run as trainer
from tilemoe.train.config import LoRAConfig, Recipe, load_recipe

H100, H200 = GPUS["H100"], GPUS["H200"]
RECIPE = load_recipe("7b")
Run, Fails = Callable[..., tuple[int, str, str]], Callable[..., str]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that are to be trained, by one of four processes with an H100 each."""
    recipes: list[Recipe] = []
    done = SimpleNamespace(sample=None, plot=None, evaluation=SimpleNamespace(shown=str))

    def train(recipe: Recipe, *_: object) -> object:
        recipes.append(recipe)
        return done

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr(command, "gpu_here", lambda *_: H100)
    return recipes


def test_the_plan_and_auto_propose_recipe_7b_on_80_gb_cards(run: Run, taken: list[Recipe], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    status, text, _ = run("train", "--recipe", "7b", "--data.batch-size", "auto", "--train.out-dir", out)
    assert status == 0
    assert taken == [replace(RECIPE, train=replace(RECIPE.train, out_dir=out))]
    assert text.startswith("data.batch_size auto: data.batch_size 6, train.accumulation 4, parallel.expert 1, ")
    status, text, _ = run("plan", "--train", "--recipe", "7b", "--gpu", "h100", "--gpus", 4, "--json")
    first = json.loads(text)["train"]["proposals"][0]
    assert (first["memory_gb"], first["bytes"] <= 74 * 2**30) == (80, True)
    found = proposal_for(RECIPE, H100, 4, RECIPE.sequences_per_step)
    assert first["settings"] == found.settings()
    assert proposed(RECIPE, found) == RECIPE


def test_a_step_of_a_stated_size(run: Run, fails: Fails, taken: list[Recipe], tmp_path: Path) -> None:
    start = ("train", "--recipe", "7b", "--train.out-dir", tmp_path / "run", "--global-batch", 48)
    for more in (("--data.batch_size=auto",), ("--data.batch-size", 3)):
        assert run(*start, *more)[0] == 0
    assert [(each.data.batch_size, each.train.accumulation) for each in taken] == [(6, 2), (3, 4)]
    expected = r"--global-batch gives each process 12 sequences, no multiple of data.batch_size (5)"
    assert expected in fails(*start, "--data.batch-size", 5)
    assert "must be a multiple of 4 processes, got 6" in fails(*start, "--global-batch", 6)
    assert "--train.accumulation follows from" in fails(*start, "--train.accumulation", 2)
    assert "--global-batch: invalid int value: 'many'" in fails(*start, "--global-batch", "many")


def test_a_resumed_step_keeps_its_sequences(run: Run, taken: list[Recipe], finished: Path) -> None:
    """Of 8 in one process, two in each of four."""
    options = ("--train.precision", "bf16", "--train.compile", "blocks", "--data.batch-size", "auto")
    assert run("train", "--resume", finished, *options)[0] == 0
    assert [each.sequences_per_step for each in taken] == [2]


@pytest.mark.parametrize("name", ["tiny", "smoke", "single-gpu"])
def test_the_plan_says_what_auto_takes(run: Run, fails: Fails, taken: list[Recipe], name: str, tmp_path: Path) -> None:
    """With the options that it says, and only with them."""
    _, text, _ = run("plan", "--train", "--recipe", name, "--gpu", "h100", "--gpus", 4, "--json")
    plan = json.loads(text)["train"]
    auto, *options = (f"--{option}".split() for option in plan["taken_by"].removeprefix("--").split(" --"))
    start = ("train", "--recipe", name, "--train.out-dir", tmp_path / "run", *auto)
    assert run(*start, *chain(*options))[0] == 0
    settings = plan["proposals"][0]["settings"]
    assert (taken[0].data.batch_size, taken[0].train.accumulation) == (
        settings["data.batch_size"],
        settings["train.accumulation"],
    )
    for lacking in options:
        others = chain(*(option for option in options if option != lacking))
        assert " ".join(lacking) in fails(*start, *others)


def test_the_plan_of_a_preset_for_a_stated_step(run: Run, fails: Fails) -> None:
    ask = ("plan", "--train", "--preset", "olmoe", "--gpus", 8)
    status, text, _ = run(*ask, "--global-batch", 64, "--gpu", "rtx-4090")
    assert status == 0
    assert "proposed for steps of 64 sequences, 8 of each of 8 GPUs: the first line" in text
    assert "none fits, on 16 GPUs one sequence would" in text
    assert "must be a multiple of 8 processes, got 63" in fails(*ask, "--global-batch", 63)
    assert "name a layer each" in fails(*ask, "--recipe", "7b")


def test_more_memory_takes_larger_micro_batches_of_the_same_step() -> None:
    recipe = proposed(RECIPE, proposal_for(RECIPE, H200, 4, RECIPE.sequences_per_step))
    assert recipe.data.batch_size > RECIPE.data.batch_size
    assert recipe.tokens_per_step == RECIPE.tokens_per_step
    assert recipe.parallel.between_micro_batches != "nothing"


def test_what_is_given_stays() -> None:
    parallel = replace(RECIPE.parallel, expert=4, checkpointing="attention")
    recipe = replace(RECIPE, parallel=parallel)
    found = proposal_for(recipe, H200, 4, 24, {"--parallel.expert", "--parallel.checkpointing"})
    assert (found.setup.expert_parallel, found.setup.checkpointing) == (4, "attention")
    kept = replace(recipe, parallel=replace(parallel, reshard_after_forward=False))
    given = {"--parallel.reshard-after-forward"}
    assert proposal_for(kept, H200, 4, 24, given).setup.kept != "nothing"
    given.add("--parallel.between-micro-batches")
    assert proposal_for(kept, H200, 4, 1, given).setup.kept == "weights"  # as given, of one micro-batch, too
    taken = proposed(kept, proposal_for(kept, H200, 4, 24, given), given)
    assert taken.parallel == replace(kept.parallel, expert=1, checkpointing="none")


def test_copies_of_the_model_are_planned_one_by_one() -> None:
    copies = replace(RECIPE, parallel=replace(RECIPE.parallel, replicate=2))
    assert proposal_for(copies, H100, 8, 24).setup.gpus == 4
    with raises_one_line("the job's 4 processes are not divided evenly by replicate 3"):
        proposal_for(replace(RECIPE, parallel=replace(RECIPE.parallel, replicate=3)), H100, 4, 24)


@pytest.mark.parametrize("gpu", ["A100", "B200", "H200"])
def test_fp8_is_planned_where_it_is_computed(gpu: str, tmp_path: Path, run: Run) -> None:
    assert isinstance(RECIPE.model, ModelConfig)
    assert RECIPE.model.moe is not None
    fp8 = replace(RECIPE, model=replace(RECIPE.model, moe=replace(RECIPE.model.moe, precision="fp8")))
    seconds = [proposal_for(recipe, GPUS[gpu], 4, 24).seconds for recipe in (RECIPE, fp8)]
    assert (seconds[0] == seconds[1]) == (gpu != "H200")
    (tmp_path / "fp8.json").write_text(json.dumps(to_dict(fp8)))
    assert run("plan", "--train", "--recipe", tmp_path / "fp8.json", "--gpu", gpu, "--gpus", 16)[0] == 0


def test_what_cannot_be_proposed_is_one_line(fails: Fails, tmp_path: Path) -> None:
    with raises_one_line("not even one sequence of 4096 tokens fits in 80 GB of a H100; take more GPUs"):
        proposal_for(RECIPE, H100, 1, 24)
    with raises_one_line("data.batch_size auto cannot plan the training of adapters; give a number"):
        proposal_for(replace(RECIPE, lora=LoRAConfig(modules=("attention",))), H100, 4, 24)
    change = {"train": replace(RECIPE.train, compile="none"), "parallel": ParallelConfig(param_dtype=None)}
    options = "--train.compile blocks --parallel.param-dtype bfloat16"
    with raises_one_line(f"data.batch_size auto needs compiled blocks in bf16; add {options} or a number"):
        proposal_for(replace(RECIPE, **change), H100, 4, 24)
    start = ("train", "--recipe", "tiny", "--train.device", "cpu", "--train.out-dir", tmp_path / "run")
    assert "auto works on GPUs only; give a number" in fails(*start, "--data.batch-size", "auto")

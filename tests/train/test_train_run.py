"""A run's folder is one run's; signals lose nothing; what cannot be gone on with; bf16 by autocast or FSDP alone."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from helpers import losses, raises_one_line, timeless
from small_runs import changed

from tilemoe.cli.main import main
from tilemoe.config import ParallelConfig, TokenRounding, to_dict
from tilemoe.files import owned_folder
from tilemoe.layers.norm import RMSNorm
from tilemoe.routing.topk import NonFiniteLogitsError
from tilemoe.train import loop
from tilemoe.train import run as runs
from tilemoe.train.checkpoints import pending
from tilemoe.train.checkpoints.folder import CheckpointError, find_latest, open_checkpoint, publish
from tilemoe.train.checkpoints.restore import build_model, build_shared_model
from tilemoe.train.config import MuonConfig, Recipe
from tilemoe.train.datasets import prepare_data
from tilemoe.train.job.processes import ALONE
from tilemoe.train.loop import Trainer
from tilemoe.train.progress import StepStats, make_reporter
from tilemoe.train.run import RunResult, Stopped, require_fresh, require_resumable, train


def test_a_run_is_not_started_over_another_nor_beside_it(dense_recipe: Recipe) -> None:
    folder = Path(dense_recipe.train.out_dir)
    folder.mkdir()
    with owned_folder(folder), raises_one_line("another process is training in it"):
        train(dense_recipe)
    assert not any(folder.iterdir())
    train(dense_recipe)
    before = (folder / "metrics.jsonl").read_bytes()
    with raises_one_line("holds checkpoints, perhaps of a run .*; .* with --resume auto goes on from the newest"):
        train(dense_recipe)
    assert (folder / "metrics.jsonl").read_bytes() == before
    with raises_one_line("not empty; add --resume"):
        require_fresh(folder)


def test_a_run_that_ended_in_its_first_step_may_be_begun_anew(moe_recipe: Recipe) -> None:
    settings = replace(moe_recipe.train, tensorboard=True)
    with raises_one_line("Triton does not run on cpu"):
        train(replace(moe_recipe, model=changed(moe_recipe.model, moe__invariance="batch"), train=settings))
    require_fresh(Path(settings.out_dir))
    train(replace(moe_recipe, train=settings))
    with raises_one_line("not empty; add --resume"):
        require_fresh(Path(settings.out_dir))
    (piped := Path(settings.out_dir) / "piped").mkdir()
    os.mkfifo(piped / "metrics.jsonl")
    with raises_one_line("not empty; add --resume"):
        require_fresh(piped)


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder: Path) -> None:
    """By that of a run that was started meanwhile."""
    moved(folder)
    folder.mkdir()
    (folder / "metrics.jsonl").touch()


@pytest.mark.parametrize("noticed", ["by a record", "by a checkpoint"])
@pytest.mark.parametrize("change", [removed, moved, replaced])
def test_a_folder_that_goes_during_the_run_ends_it(
    dense_recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    noticed: str,
) -> None:
    """In the very step, before anything is written at its name; a folder that was moved can be gone on in."""
    every = {"log_every": 1, "save_every": 3} if noticed == "by a record" else {"log_every": 100, "save_every": 2}
    recipe = replace(dense_recipe, train=replace(dense_recipe.train, eval_every=0, **every))
    folder, last, real = Path(recipe.train.out_dir), 0, Trainer.train_step

    def step(trainer: Trainer) -> StepStats:
        nonlocal last
        last = trainer.step + 1
        if last == 4:
            trainer.finish_save()
            change(folder)
        return real(trainer)

    path = folder.with_name("recipe.json")
    path.write_text(json.dumps(to_dict(recipe)))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        assert main(["train", "--recipe", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tilemoe: error: train.out_dir {folder}: metrics.jsonl was removed, moved or replaced")
    assert last == 4
    assert [*folder.rglob("*")] == [folder / "metrics.jsonl"] * (change is replaced)
    if change is not removed:
        found = find_latest(folder.with_name("elsewhere"))
        assert found is not None
        assert found.state.step == every["save_every"]
        settings = replace(recipe.train, out_dir=str(folder.with_name("elsewhere")))
        assert isinstance(train(replace(recipe, train=settings), found), RunResult)


def test_a_folder_that_goes_after_the_last_record_is_named_by_the_result(
    dense_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runs._result

    def result(trainer: Trainer, *arguments: Any) -> dict[str, Any]:
        trainer.finish_save()
        shutil.rmtree(dense_recipe.train.out_dir)
        return real(trainer, *arguments)

    monkeypatch.setattr(runs, "_result", result)
    with raises_one_line(rf"^train\.out_dir {dense_recipe.train.out_dir}: cannot be used \(No such file"):
        train(dense_recipe)


@pytest.mark.parametrize("named", ["a.bin", "runs/one/a.bin", b"runs/one/a.bin", None])
def test_a_path_that_cannot_be_used_is_named_with_its_folder(
    named: str | bytes | None, dense_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shutil.rmtree` names a file by its last part alone."""

    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", named)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "clean_stale", refuse)
    expected = "runs/one" if named is None else "runs/one/a.bin"
    with raises_one_line(rf"^train\.out_dir {expected}: cannot be used \(Permission denied"):
        train(changed(dense_recipe, train__out_dir="runs/one"))


def test_going_on_from_a_copy_sets_the_newer_aside(dense_recipe: Recipe) -> None:
    """Whatever the copy's name: its step counts."""
    train(dense_recipe)
    folder = Path(dense_recipe.train.out_dir)
    copy = shutil.copytree(folder / "step_00000003", folder / "the_best")
    train(dense_recipe, open_checkpoint(copy))
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "abandoned_step_00000006", "step_00000003", "step_00000006", "the_best",
    ]  # fmt: skip


@pytest.mark.parametrize("first", [3, 4])
def test_what_another_run_adds_stays(dense_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """It trains to step 5 while this one, which is to go on from step 3, prepares its data."""
    of_steps = {n: replace(dense_recipe, train=replace(dense_recipe.train, steps=n, keep_last=9)) for n in range(3, 7)}
    train(of_steps[first])
    folder, real = Path(dense_recipe.train.out_dir), runs._prepare
    opened = find_latest(folder) if first == 3 else open_checkpoint(folder / "step_00000003")

    def prepare(*arguments: Any) -> Any:
        monkeypatch.setattr(runs, "_prepare", real)
        train(of_steps[5], find_latest(folder))
        return real(*arguments)

    monkeypatch.setattr(runs, "_prepare", prepare)
    with nullcontext() if first == 3 else raises_one_line("another process has written step_00000005 in it since"):
        train(of_steps[6], opened)
    assert {path.name for path in folder.glob("*step*")} >= {"step_00000003", "step_00000005"}


@pytest.mark.parametrize("name", ["draw", "continue_text"])
def test_what_fails_after_training_costs_nothing_else(
    dense_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise ValueError("nothing to be seen")

    recipe = replace(dense_recipe, train=replace(dense_recipe.train, steps=2, plot=True))
    monkeypatch.setattr(runs, name, fails)
    result = train(recipe)
    what = {"draw": "plot", "continue_text": "sample"}[name]
    assert f"no {what}: nothing to be seen" in capsys.readouterr().out.splitlines()
    assert isinstance(result, RunResult)
    assert (result.plot is None, result.sample is None) == (name == "draw", name != "draw")
    assert (Path(recipe.train.out_dir) / "result.json").exists()


CPU = torch.device("cpu")


def trainer_of(recipe: Recipe, shared: bool) -> Trainer:
    model = build_shared_model(recipe, CPU, ALONE) if shared else build_model(recipe, CPU)
    return Trainer(recipe, model, prepare_data(recipe.data, "bytes"), CPU)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("shared", "param_dtype", "autocast"), [(False, "bfloat16", True), (True, None, True), (True, "bfloat16", False)]
)
def test_bf16(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, shared: bool, param_dtype: str | None, autocast: bool
) -> None:
    monkeypatch.setattr(loop, "has_fast_gemm", lambda device_type, dtype: True)
    settings = replace(moe_recipe.train, precision="bf16")
    recipe = replace(moe_recipe, train=settings, parallel=ParallelConfig(param_dtype=param_dtype))  # type: ignore[arg-type]
    trainer = trainer_of(recipe, shared)
    seen: set[tuple[bool, torch.dtype]] = set()
    for module in trainer.model.modules():
        if isinstance(module, RMSNorm):
            module.register_forward_hook(
                lambda norm, args, out: seen.add((torch.is_autocast_enabled("cpu"), out.dtype))
            )
    found = [trainer.train_step().nats_per_token for _ in range(3)]
    expected = trainer_of(moe_recipe, False)
    assert found == pytest.approx([expected.train_step().nats_per_token for _ in range(3)], rel=5e-3)
    assert seen == {(autocast, torch.bfloat16)}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}, "what the optimiser updates"


@pytest.mark.usefixtures("one_process")
def test_fp32_is_fp32_throughout(moe_recipe: Recipe) -> None:
    trainer, expected = trainer_of(moe_recipe, True), trainer_of(moe_recipe, False)
    for _ in range(3):
        assert trainer.train_step().nats_per_token == pytest.approx(expected.train_step().nats_per_token, rel=1e-6)


@pytest.mark.parametrize("error", [ValueError("of one process"), NonFiniteLogitsError("logits are not finite")])
def test_a_checkpoint_on_its_way_is_kept_whatever_fails(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Others of a job go on with their part of it, in threads."""

    class Pending:
        def finish(self) -> None:
            (trainer.run_dir / "step_00000001").mkdir()
            raise RuntimeError("lost, and no word of it")

    def fails() -> None:
        raise error

    trainer = trainer_of(moe_recipe, shared=False)
    trainer.run_dir.mkdir()
    trainer._pending, trainer.seconds_of_saves = Pending(), [0.0]  # type: ignore[assignment]
    monkeypatch.setattr(trainer, "_accumulate", fails)
    monkeypatch.setattr(trainer, "_origin", str)
    told = "the last checkpoint is .*step_00000001" if isinstance(error, NonFiniteLogitsError) else "of one process"
    with raises_one_line(told):
        runs._fit(trainer, make_reporter(1), lambda: False)  # type: ignore[arg-type]
    assert list(trainer.run_dir.glob("step_*"))


@pytest.mark.parametrize("fails", ["draw", "continue_text", ""])
def test_the_last_checkpoint_is_written_beside_plot_and_sample_whatever_fails(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """And result.json after it, by the same thread."""
    done: list[str] = []
    may_publish = Event()

    def note(name: str, real: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            if name == (fails or "continue_text"):
                may_publish.set()
            if name == fails:
                raise RuntimeError("a defect")
            return real(*arguments, **options)

        return noted

    def publish_later(*arguments: Any) -> None:
        assert may_publish.wait(60)
        assert not (trainer.run_dir / "result.json").exists()
        done.append("published")
        publish(*arguments)

    trainer = trainer_of(replace(moe_recipe, train=replace(moe_recipe.train, steps=1, plot=True)), shared=False)
    trainer.run_dir.mkdir()
    monkeypatch.setattr(pending, "publish", publish_later)
    names = ["draw", "continue_text"]
    for name in names:
        monkeypatch.setattr(runs, name, note(name, getattr(runs, name)))
    with pytest.raises(RuntimeError, match="a defect") if fails else nullcontext():
        runs._fit(trainer, make_reporter(1), lambda: False)  # type: ignore[arg-type]
    begun = names[: names.index(fails) + 1] if fails else names
    assert done == [*begun, "published"]
    assert len(list(trainer.run_dir.glob("step_*"))) == 1
    (of_process,) = json.loads((trainer.run_dir / "result.json").read_text())["phases"]
    assert ("sample" in of_process) == (not fails)


def test_a_step_keeps_its_sequences_when_they_are_divided_anew(dense_recipe: Recipe) -> None:
    """By batch_size, accumulation and the number of processes, which may change when a run goes on."""
    run_dir = Path(dense_recipe.train.out_dir)
    recipe = replace(dense_recipe, train=replace(dense_recipe.train, keep_last=9))
    train(recipe)
    expected = losses(run_dir)
    checkpoint = open_checkpoint(run_dir / "step_00000003")
    divided = replace(recipe, data=replace(recipe.data, batch_size=2), train=replace(recipe.train, accumulation=2))
    assert isinstance(train(divided, checkpoint), RunResult)
    found = losses(run_dir)
    assert found[:3] == expected[:3]
    assert found[3:] == pytest.approx(expected[3:], rel=1e-5)

    halved = replace(recipe, data=replace(recipe.data, batch_size=2))
    twice = "a step has 8 sequences here and 4 in the checkpoint; --global-batch 4 keeps it"
    assert require_resumable(recipe, checkpoint, 2) == [twice]
    assert require_resumable(recipe, checkpoint, 3) == ["a step has 12 sequences here and 4 in the checkpoint"]
    assert require_resumable(halved, checkpoint, 2) == ["data.batch_size is 2 here and 4 in the checkpoint"]
    for processes in (1, 4):
        with raises_one_line("of another run: data.batch_size is 2 here and 4 in the checkpoint; keep the saved value"):
            require_resumable(halved, checkpoint, processes)
    unknown = replace(checkpoint, state=replace(checkpoint.state, processes=0))
    with raises_one_line("of another run: data.batch_size is 2"):
        require_resumable(halved, unknown, 2)


TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


def test_random_rounding_is_a_function_of_the_seed(
    moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever random numbers the process had before, with the data in the cache or not, stopped or not."""
    recipe = changed(moe_recipe, model__moe__rounding=TokenRounding("stochastic", 16), model__vocab_size=300)

    def run(name: str, cache: str, seed: int) -> Recipe:
        torch.manual_seed(hash(name))
        data = replace(recipe.data, cache_dir=str(tmp_path / cache), tokenizer="bpe:300")
        return replace(recipe, data=data, train=replace(recipe.train, out_dir=str(tmp_path / name), seed=seed))

    train(run("first", "cold", 0))
    train(run("second", "cold", 0))
    train(run("other", "cold", 1))
    stopped = run("stopped", "cold too", 0)
    real = Trainer.train_step

    def step(trainer: Trainer) -> object:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        assert train(stopped) == Stopped(signal.SIGTERM)
    torch.manual_seed(99)
    train(stopped, open_checkpoint(Path(stopped.train.out_dir) / "step_00000004"))
    ends = {}
    for name in ("first", "second", "stopped", "other"):
        ends[name] = [(tmp_path / name / "step_00000006" / file).read_bytes() for file in TENSOR_FILES]
    assert timeless(tmp_path / "first") == timeless(tmp_path / "second") == timeless(tmp_path / "stopped")
    assert ends["first"] == ends["second"] == ends["stopped"] != ends["other"]


def test_a_stop_during_evaluation_saves_and_evaluates_again(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a training step: tests/faults/test_faults_signals.py."""
    from tilemoe.train import evaluate as module

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    real = module._batches

    def interrupted(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_batches", interrupted)
        assert train(moe_recipe) == Stopped(signal.SIGTERM)
    assert f"--resume {moe_recipe.train.out_dir}" in capsys.readouterr().out
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    records = timeless(moe_recipe.train.out_dir)
    assert [(r["kind"], r["step"]) for r in records] == [("train", 1), ("train", 2)]
    train(moe_recipe, open_checkpoint(Path(moe_recipe.train.out_dir) / "step_00000002"))
    evaluated = [r["step"] for r in timeless(moe_recipe.train.out_dir) if r["kind"] == "eval"]
    assert evaluated == [2, 4, 6]


def test_what_cannot_be_resumed(moe_recipe: Recipe, dense_recipe: Recipe, tmp_path: Path, corpus: Path) -> None:
    train(moe_recipe)
    checkpoint = open_checkpoint(Path(moe_recipe.train.out_dir) / "step_00000003")
    with pytest.raises(CheckpointError, match=r"another model: model\.moe is None here"):
        train(dense_recipe, checkpoint)
    fixed = {"train__seed": 1, "train__accumulation": 2, "data__batch_size": 5, "optim__name": "muon"}
    for path, value in fixed.items():
        with pytest.raises(CheckpointError, match=rf"{path.replace('__', '.')} is {value!r} here"):
            train(changed(moe_recipe, **{path: value}), checkpoint)
    free = changed(moe_recipe, optim__muon=MuonConfig(momentum=0.9))
    assert require_resumable(free, checkpoint) == ["optim.muon.momentum is 0.9 here and 0.95 in the checkpoint"]
    with pytest.raises(CheckpointError, match=r"past train\.steps \(2\)"):
        train(replace(moe_recipe, train=replace(moe_recipe.train, steps=2)), checkpoint)
    text = tmp_path / "other"
    text.mkdir()
    for path in corpus.iterdir():
        (text / path.name).write_text(path.read_text().upper())
    with pytest.raises(CheckpointError, match="is not the text that checkpoint"):
        train(replace(moe_recipe, data=replace(moe_recipe.data, corpus=str(text))), checkpoint)

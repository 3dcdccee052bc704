"""Jobs of several processes: the run of one process, and what happens when one of them fails.

Each process is a copy of this one under torchrun's agent (tests/faults/processes.py); docs/quickstart starts jobs as
users do.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import losses, raises_one_line
from processes import Ended, run
from small_runs import changed
from test_train_hf_base import adapted, write_base

from tilemoe.cli.main import main
from tilemoe.cli.train import run as run_command
from tilemoe.config import ModelConfig, MoEConfig, ParallelConfig, to_dict
from tilemoe.data.tokenizer import ByteTokenizer
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import load_hf, save_hf
from tilemoe.testing import relative_error
from tilemoe.train import run as runs
from tilemoe.train.checkpoints import folder as checkpoints
from tilemoe.train.checkpoints.folder import find_latest, open_checkpoint
from tilemoe.train.checkpoints.initial import adopt
from tilemoe.train.checkpoints.names import list_checkpoints
from tilemoe.train.checkpoints.restore import restore
from tilemoe.train.config import LoRAConfig, Recipe
from tilemoe.train.job.processes import ALONE, Job, JobError
from tilemoe.train.loop import Trainer, seed_process
from tilemoe.train.run import RunResult, train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("forks")]
STEPS = 6


@pytest.fixture
def recipe(moe_recipe: Recipe) -> Recipe:
    """For a job of two processes or more, which divide the experts by two."""
    settings = replace(moe_recipe.train, steps=STEPS, accumulation=2, eval_every=0, save_every=2, timeout=60)
    return replace(moe_recipe, train=settings, parallel=ParallelConfig(expert=2))


def written(recipe: Recipe, folder: Path, **train_settings: Any) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps(to_dict(replace(recipe, train=replace(recipe.train, **train_settings)))))
    return path


def trained_by(processes: int, path: Path, *words: object) -> Ended:
    """A job that trains by the recipe in ``path`` and comes to its end."""
    ended = run(["train", "--recipe", path, *words], processes, 0, None, path.parent)
    assert (ended.code, ended.left) == (0, []), ended.err
    return ended


@pytest.fixture
def uninterrupted(recipe: Recipe, tmp_path: Path) -> list[float]:
    """The losses of one process that reads what two read together; it has parsed a command line before they do."""
    data = replace(recipe.data, batch_size=2 * recipe.data.batch_size)
    path = written(replace(recipe, data=data, parallel=ParallelConfig()), tmp_path, out_dir=str(tmp_path / "one"))
    assert main(["train", "--recipe", str(path)]) == 0
    return losses(tmp_path / "one")


@pytest.mark.dist
def test_four_processes_train_as_one_does_and_any_number_goes_on(
    recipe: Recipe, uninterrupted: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts over two processes, FSDP over the others; then two processes, then one, then an export of that."""
    run_dir = tmp_path / "run"
    four = replace(recipe, data=replace(recipe.data, batch_size=recipe.data.batch_size // 2))
    path = written(four, tmp_path, out_dir=str(run_dir))
    said = trained_by(4, path).out
    assert said.count(f"step {STEPS}/{STEPS}  loss") == 1, "only rank 0 speaks"
    assert "in each of 4 processes" in said
    assert losses(run_dir) == pytest.approx(uninterrupted, rel=1e-5)
    result, expected = (json.loads((tmp_path / name / "result.json").read_bytes()) for name in ("run", "one"))
    assert result["processes"] == 4
    assert [next(iter(phases)) for phases in result["phases"]] == ["torchrun"] * 4
    assert "\nseconds: torchrun " in said
    for name in ("parameters", "training_tokens", "heldout_tokens"):
        assert result[name] == expected[name], name
    assert result["heldout_nats_per_byte"] == pytest.approx(expected["heldout_nats_per_byte"], rel=1e-5)

    said = trained_by(2, path, "--resume", "auto", "--train.steps", STEPS + 2).out
    assert f"resuming from {run_dir}/step_{STEPS:08d}" in said
    words = ["--resume", "auto", f"--train.steps={STEPS + 4}", "--parallel.expert=1"]
    assert main(["train", "--recipe", str(path), *words]) == 0
    assert len(losses(run_dir)) == STEPS + 4
    sharded = str(run_dir / f"step_{STEPS + 2:08d}")
    capsys.readouterr()
    assert main(["eval", "--checkpoint", sharded]) == 0
    assert main(["export", "--checkpoint", sharded, "--out", str(tmp_path / "exported")]) == 2
    assert "selection_bias=True has no place" in capsys.readouterr().err, "the model has one, and was read whole"


@pytest.mark.thorough
@pytest.mark.dist
@pytest.mark.parametrize("expert", [1, 2])
def test_two_processes_train_adapters_on_4_bit_as_one_does(expert: int, moe_recipe: Recipe, tmp_path: Path) -> None:
    """By moments of a byte; one goes on, and exports what it then computes."""
    base = tmp_path / "base"
    model = DecoderLM(ModelConfig(256, 64, 2, 2, 1, 32, 16, moe=MoEConfig(64, 64, 4, 2)))
    save_hf(model, base)
    ByteTokenizer().save(base / "tokenizer.json")
    lora = LoRAConfig(rank=8, storage="nf4_double", base=str(base))
    settings = replace(moe_recipe.train, steps=STEPS, eval_every=0, save_every=2, selection_bias_rate=0.0, timeout=60)
    optim = replace(moe_recipe.optim, name="adamw8bit", schedule="constant")
    recipe = replace(adopt(moe_recipe, base), train=settings, optim=optim, lora=lora)
    path = written(
        replace(recipe, data=replace(recipe.data, batch_size=2), parallel=ParallelConfig(expert=expert)),
        tmp_path,
        out_dir=str(tmp_path / "run"),
    )
    assert "of them trained, on 2 x cpu" in trained_by(2, path, "--init-from", base).out
    train(replace(recipe, train=replace(settings, out_dir=str(tmp_path / "one"))), init_from=base)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    words = ["--resume", str(tmp_path / "run"), f"--train.steps={STEPS + 2}", "--parallel.expert=1"]
    assert main(["train", *words, "--data.batch-size=4"]) == 0
    assert main(["export", "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours, merged = restore(tmp_path / "run", "cpu").model(ids).logits, load_hf(tmp_path / "merged")(ids).logits
    assert relative_error(merged, ours) < 1e-5


@pytest.mark.dist
def test_two_processes_train_a_class_of_transformers_as_one_does(moe_recipe: Recipe, tmp_path: Path) -> None:
    """And one goes on from their checkpoint."""
    base = write_base("gpt_oss", tmp_path / "base")
    recipe = adapted(moe_recipe, base, "nf4", steps=3, eval_every=0, save_every=0, timeout=60)
    recipe = replace(recipe, parallel=ParallelConfig(checkpointing="block"))
    one = replace(recipe, train=replace(recipe.train, out_dir=str(tmp_path / "one")))
    train(one, init_from=base)
    half = replace(recipe, data=replace(recipe.data, batch_size=recipe.data.batch_size // 2))
    (path := tmp_path / "recipe.json").write_text(json.dumps(to_dict(half)))
    trained_by(2, path, "--init-from", base)
    run_dir = Path(recipe.train.out_dir)
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    known = [open_checkpoint(each / "step_00000003").state.recipe.model for each in (run_dir, tmp_path / "one")]
    assert known[0] == known[1] != recipe.model, "with the digest of the same files"
    assert main(["train", "--resume", str(run_dir), "--train.steps", "4", "--data.batch-size", "4"]) == 0
    assert len(losses(run_dir)) == 4


@pytest.mark.thorough
@pytest.mark.dist
def test_weights_that_stay_whole_are_evaluated_saved_and_gone_on_from(
    recipe: Recipe, uninterrupted: list[float], tmp_path: Path
) -> None:
    """An evaluation gathers weights that a checkpoint is made of, and that the next step changes."""
    run_dir = tmp_path / "run"
    parallel = replace(recipe.parallel, reshard_after_forward=False, between_micro_batches="weights_and_gradients")
    settings = {"out_dir": str(run_dir), "eval_every": 1, "save_every": 1, "keep_last": STEPS}
    path = written(replace(recipe, parallel=parallel), tmp_path, **settings)
    for _ in range(2):
        said = trained_by(2, path, "--resume", "auto").out
        assert losses(run_dir) == pytest.approx(uninterrupted, rel=1e-5)
        for later in list_checkpoints(run_dir)[2:]:
            shutil.rmtree(later)
    assert "resuming from" in said


@pytest.fixture
def hurt(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """A job of two processes, in rank 1 of which something happens in step 4."""

    def start(how: Callable[[Trainer, torch.Tensor], object], **settings: Any) -> Ended:
        real = Trainer._accumulate

        def accumulate(trainer: Trainer) -> Any:
            loss, *others = real(trainer)
            is_hit = os.environ.get("RANK") == "1" and trainer.step == 3
            return (how(trainer, loss) if is_hit else loss, *others)

        monkeypatch.setattr(Trainer, "_accumulate", accumulate)
        path = written(recipe, tmp_path, out_dir=str(tmp_path / "run"), **settings)
        return run(["train", "--recipe", path], 2, 0, None, tmp_path)

    return start


def has_nan(trainer: Trainer, loss: torch.Tensor) -> torch.Tensor:
    return loss * float("nan")


def spoils_weights(trainer: Trainer, loss: torch.Tensor) -> torch.Tensor:
    next(iter(trainer.optimizer.state.values()))["exp_avg"].to_local().fill_(float("nan"))
    return loss


def removes_the_folder(trainer: Trainer, loss: torch.Tensor) -> torch.Tensor:
    shutil.rmtree(trainer.run_dir)
    return loss


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "settings", "lines"),
    [
        (has_nan, {}, [f"rank {rank} of 2: the loss of rank 1 became nan in step 4; the last" for rank in (0, 1)]),
        (
            spoils_weights,
            {},
            [f"rank {r} of 2: blocks.0.attention.q_proj.weight of rank 1 is not finite after the" for r in (0, 1)],
        ),
        (
            removes_the_folder,
            {"save_every": 0},
            [
                f"rank {who}: train.out_dir {{run}}: metrics.jsonl was removed"
                for who in ("0 of 2", "1 of 2: rank 0 failed")
            ],
        ),
    ],
)
def test_a_failure_ends_the_job_and_every_process_says_which_and_why(
    hurt: Callable[..., Ended], how: object, settings: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    """In one line. That a process is killed, raises or hangs: tests/faults."""
    ended = hurt(how, **settings)
    assert ended.code == 1
    for line, beginning in zip(sorted(ended.lines), lines, strict=True):
        assert line.startswith(f"tilemoe: error: {beginning.format(run=tmp_path / 'run')}"), ended.err
    assert "Traceback" not in ended.err.partition("tilemoe: error")[0]
    for found in list_checkpoints(tmp_path / "run"):
        assert found.name == "step_00000002"
    if (last := find_latest(tmp_path / "run")) is not None:
        with last.compared():
            pass


@pytest.mark.dist
def test_the_schedulers_signal_saves_in_all_processes_together(hurt: Callable[..., Ended], tmp_path: Path) -> None:
    def asks_to_stop(trainer: Trainer, loss: torch.Tensor) -> torch.Tensor:
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun's agent
        return loss

    ended = hurt(asks_to_stop)
    checkpoint = find_latest(tmp_path / "run")
    assert checkpoint is not None
    assert 4 <= checkpoint.state.step < STEPS
    assert f"stopped after step {checkpoint.state.step} of {STEPS} and saved" in ended.out
    assert (ended.lines, ended.left) == ([], [])


@pytest.mark.dist
def test_a_job_that_does_not_fit_is_told_once(recipe: Recipe, tmp_path: Path) -> None:
    ended = run(["train", "--recipe", written(recipe, tmp_path), "--parallel.expert", "4"], 2, 0, None, tmp_path)
    [line] = ended.lines
    assert "rank 0 of 2: parallel: replicate 1 x shard any x expert 4 needs 4 processes" in line
    assert not Path(recipe.train.out_dir).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(expert=4)}, r"expert 4 needs 4 processes and the job has 2; start it with"),
        ({"parallel": ParallelConfig(shard=1)}, r"job's 2 processes are not divided evenly by replicate 1 x shard 1"),
        ({"model__moe__num_experts": 5}, r"parallel.expert \(2\) must divide model.moe.num_experts \(5\)"),
        (
            {"model__moe__num_experts": 8},
            r"is of another model: model.moe.num_experts is 8 here and 4 in the checkpoint; use",
        ),
    ],
)
def test_what_does_not_fit_is_found_before_a_device_is_touched(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """By every process for itself, without a word to the others."""
    alone = replace(recipe, train=replace(recipe.train, steps=1, save_every=1), parallel=ParallelConfig())
    assert isinstance(train(alone), RunResult)
    checkpoint = find_latest(Path(recipe.train.out_dir))
    recipe = changed(recipe, **changes)
    monkeypatch.setattr(runs, "select_device", lambda *_: pytest.fail("a device was chosen"))
    for rank in (0, 1):
        with raises_one_line(message):
            train(recipe, checkpoint, Job(rank, 2))


def test_tensors_are_verified_after_all_have_looked_whether_it_fits(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifying takes long; another rank would speak first of what all find."""
    alone = replace(recipe, train=replace(recipe.train, steps=1, save_every=1), parallel=ParallelConfig())
    assert isinstance(train(alone), RunResult)
    run_dir, path = recipe.train.out_dir, str(written(recipe, tmp_path))
    monkeypatch.setattr(checkpoints.Checkpoint, "compared", lambda *_: pytest.fail("verified before"))
    monkeypatch.setattr("time.sleep", lambda _: None)
    for rank in ("0", "1"):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, value)
        for resume in ("auto", run_dir):
            with pytest.raises(JobError, match=f"^rank {rank} of 2: .* model.num_layers is 3 here and 2 in the"):
                run_command(["--recipe", path, "--resume", resume, "--model.num-layers", "3"])
    (Path(run_dir) / "step_00000001" / "state.json").write_text("{")
    with pytest.raises(JobError, match=r"state\.json has 1 bytes instead of"):
        run_command(["--recipe", path, "--resume", run_dir])


def test_ranks_come_from_the_environment() -> None:
    assert Job.from_environment({}) == ALONE
    assert Job.from_environment({"WORLD_SIZE": "4"}) == ALONE
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Job.from_environment(environment) == Job(5, 8, 1)
    for wrong in ({"RANK": "8"}, {"RANK": "one"}, {"RANK": "-1"}, {"LOCAL_RANK": "-1"}):
        with pytest.raises(ValueError, match="start the job with torchrun"):
            Job.from_environment(environment | wrong)


def test_an_error_gets_its_rank_in_a_job_alone() -> None:
    with pytest.raises(JobError, match=r"^rank 0 of 2: no room$"), Job(0, 2).errors_with_rank():
        raise OSError("no room")
    with pytest.raises(OSError, match=r"^no room$"), ALONE.errors_with_rank():
        raise OSError("no room")


def test_random_numbers_differ_by_rank_and_by_the_step_a_job_goes_on_from() -> None:
    drawn = set()
    for job, step in ((Job(0, 2), 0), (Job(1, 2), 0), (Job(0, 4), 0), (Job(0, 2), 7), (ALONE, 0), (ALONE, 7)):
        seed_process(3, job, step)
        drawn.add(torch.rand(()).item())
    assert len(drawn) == 6

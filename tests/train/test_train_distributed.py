"""Jobs of several processes as users start them: the run of one process, and what happens when one of them fails."""

import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raises_one_line, torchrun

from tilemoe.cli.main import main
from tilemoe.cli.train import run as run_command
from tilemoe.config import ParallelConfig, to_dict
from tilemoe.train import run as runs
from tilemoe.train.checkpoints import folder as checkpoints
from tilemoe.train.checkpoints.folder import find_latest, list_checkpoints
from tilemoe.train.config import Recipe
from tilemoe.train.job.processes import ALONE, Job, JobError
from tilemoe.train.loop import seed_process
from tilemoe.train.metrics import read_metrics
from tilemoe.train.run import RunResult, train

STEPS = 6

# Started by torchrun in the place of ``-m tilemoe``: something happens to rank 1 in step 4, once.
HURT = """
import os, shutil, signal, sys, time
from pathlib import Path
from tilemoe.cli.main import main
from tilemoe.train.loop import Trainer

how, marker = sys.argv[1], Path(sys.argv[2])
real = Trainer._accumulate

def hurt(trainer):
    loss, aux_loss, counts = real(trainer)
    if os.environ["RANK"] == "1" and trainer.step == 3 and not marker.exists():
        marker.touch()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("made up")
        elif how == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(600)
        elif how == "has NaN":
            loss = loss * float("nan")
        elif how == "spoils weights":
            next(iter(trainer.optimizer.state.values()))["exp_avg"].to_local().fill_(float("nan"))
        elif how == "removes the folder":
            shutil.rmtree(trainer.run_dir)
        elif how == "is asked to stop":
            os.kill(os.getppid(), signal.SIGTERM)
    return loss, aux_loss, counts

Trainer._accumulate = hurt
sys.exit(main(sys.argv[3:]))
"""


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What our processes say of their failure."""
    return [line for line in done.stderr.splitlines() if line.startswith("tilemoe: error")]


def losses(run: Path) -> list[float]:
    return [record["nats_per_token"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]


def thorough(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


@pytest.fixture
def recipe(moe_recipe: Recipe) -> Recipe:
    """For a job of two processes or more, which divide the experts by two."""
    settings = replace(moe_recipe.train, steps=STEPS, accumulation=2, eval_every=0, save_every=2, timeout=15)
    return replace(moe_recipe, train=settings, parallel=ParallelConfig(expert=2))


def written(recipe: Recipe, folder: Path, **train_settings: Any) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps(to_dict(replace(recipe, train=replace(recipe.train, **train_settings)))))
    return path


@pytest.fixture
def uninterrupted(recipe: Recipe, tmp_path: Path) -> list[float]:
    """The losses of one process that reads what two read together."""
    data = replace(recipe.data, batch_size=2 * recipe.data.batch_size)
    settings = replace(recipe.train, out_dir=str(tmp_path / "one"))
    assert train(replace(recipe, data=data, train=settings, parallel=ParallelConfig())) is not None
    return losses(tmp_path / "one")


@pytest.mark.dist
def test_four_processes_train_as_one_does_and_any_number_goes_on(
    recipe: Recipe, uninterrupted: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts over two processes, FSDP over the others; then two processes, then one, then an export of that."""
    run = tmp_path / "run"
    four = replace(recipe, data=replace(recipe.data, batch_size=recipe.data.batch_size // 2))
    done = torchrun(tmp_path, 4, "-m", "tilemoe", "train", "--recipe", written(four, tmp_path, out_dir=str(run)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"step {STEPS}/{STEPS}  loss") == 1, "only rank 0 speaks"
    assert "each of 4" in done.stdout
    assert losses(run) == pytest.approx(uninterrupted, rel=1e-5)
    result, expected = (json.loads((tmp_path / name / "result.json").read_bytes()) for name in ("run", "one"))
    assert result["processes"] == 4
    for name in ("parameters", "training_tokens", "heldout_tokens"):
        assert result[name] == expected[name], name
    assert result["heldout_nats_per_byte"] == pytest.approx(expected["heldout_nats_per_byte"], rel=1e-5)

    options = ["--recipe", written(four, tmp_path, out_dir=str(run)), "--resume", "auto"]
    done = torchrun(tmp_path, 2, "-m", "tilemoe", "train", *options, "--train.steps", STEPS + 2)
    assert done.returncode == 0, done.stderr
    assert f"resuming from {run}/step_{STEPS:08d}" in done.stdout
    assert main(["train", *map(str, options), "--train.steps", str(STEPS + 4), "--parallel.expert", "1"]) == 0
    assert len(losses(run)) == STEPS + 4
    capsys.readouterr()
    sharded = str(run / f"step_{STEPS + 2:08d}")
    assert (run / sharded / ".metadata").exists()
    assert main(["eval", "--checkpoint", sharded]) == 0
    assert main(["export", "--checkpoint", sharded, "--out", str(tmp_path / "out")]) == 2
    assert "selection_bias=True has no place" in capsys.readouterr().err, "the model has one, and was read whole"


@pytest.mark.thorough
@pytest.mark.dist
def test_weights_that_stay_whole_are_evaluated_saved_and_gone_on_from(
    recipe: Recipe, uninterrupted: list[float], tmp_path: Path
) -> None:
    """An evaluation gathers weights that a checkpoint is made of, and that the next step changes."""
    run = tmp_path / "run"
    parallel = replace(recipe.parallel, reshard_after_forward=False, between_micro_batches="weights_and_gradients")
    settings = {"out_dir": str(run), "eval_every": 1, "save_every": 1, "keep_last": STEPS}
    path = written(replace(recipe, parallel=parallel), tmp_path, **settings)
    for _ in range(2):
        done = torchrun(tmp_path, 2, "-m", "tilemoe", "train", "--recipe", path, "--resume", "auto")
        assert done.returncode == 0, done.stderr
        assert losses(run) == pytest.approx(uninterrupted, rel=1e-5)
        for later in list_checkpoints(run)[2:]:
            shutil.rmtree(later)
    assert "resuming from" in done.stdout


@pytest.fixture
def hurt(recipe: Recipe, tmp_path: Path) -> Any:
    (tmp_path / "hurt.py").write_text(HURT)

    def start(how: str, restarts: int = 0, **settings: Any) -> subprocess.CompletedProcess[str]:
        path = written(recipe, tmp_path, out_dir=str(tmp_path / "run"), **settings)
        script = (tmp_path / "hurt.py", how, tmp_path / "marker")
        return torchrun(tmp_path, 2, *script, "train", "--recipe", path, "--resume", "auto", restarts=restarts)

    return start


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "settings", "lines"),
    [
        ("is killed", {}, ["rank 0 of 2: rank 1 is gone: it was killed or it crashed"]),
        *thorough(
            ("raises", {}, ["rank 0 of 2: rank 1 failed: made up", "rank 1 of 2: made up"]),
            (
                "has NaN",
                {},
                [f"rank {rank} of 2: the loss of rank 1 became nan in step 4; the last" for rank in (0, 1)],
            ),
            (
                "spoils weights",
                {},
                [f"rank {r} of 2: blocks.0.attention.q_proj.weight of rank 1 is not finite after the" for r in (0, 1)],
            ),
            (
                "removes the folder",
                {"save_every": 0},
                [
                    f"rank {who}: train.out_dir {{run}}: metrics.jsonl was removed"
                    for who in ("0 of 2", "1 of 2: rank 0 failed")
                ],
            ),
            ("hangs", {"timeout": 4}, [f"rank {rank} of 2: rank 1 hangs in step 4: no process has" for rank in (0, 1)]),
        ),
    ],
)
def test_a_failure_ends_the_job_and_every_process_says_which_and_why(
    hurt: Any, how: str, settings: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    """Every one that is left, in one line."""
    begun = time.monotonic()
    done = hurt(how, **settings)
    assert time.monotonic() - begun < 60, "torchrun would need half a minute more to end one that hangs"
    assert done.returncode != 0
    found = sorted(said(done))
    assert len(found) == len(lines), done.stderr
    for line, beginning in zip(found, lines, strict=True):
        assert line.startswith(f"tilemoe: error: {beginning.format(run=tmp_path / 'run')}"), done.stderr
    assert "Traceback" not in done.stderr.partition("tilemoe: error")[0]
    for found in list_checkpoints(tmp_path / "run"):
        assert found.name == "step_00000002"
    find_latest(tmp_path / "run")  # verifies it


@pytest.mark.dist
def test_the_schedulers_signal_saves_in_all_processes_together(hurt: Any, tmp_path: Path) -> None:
    done = hurt("is asked to stop")
    checkpoint = find_latest(tmp_path / "run")
    assert 4 <= checkpoint.state.step < STEPS
    assert f"stopped after step {checkpoint.state.step} of {STEPS} and saved" in done.stdout
    assert not said(done)


@pytest.mark.thorough
@pytest.mark.dist
def test_two_processes_fine_tune_as_one_does(recipe: Recipe, tmp_path: Path) -> None:
    """Each has other numbers of tokens to learn, whose mean is over all of them."""
    rows = [{"prompt": "ask " * (i % 5 + 1), "completion": "answer " * (i * i % 7 + 1)} for i in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    moe = recipe.model.moe
    assert moe is not None
    moe = replace(moe, router=replace(moe.router, aux_loss_coef=0.0, selection_bias=False))
    data = replace(recipe.data, format="chat", corpus=str(tmp_path / "chats.jsonl"), seq_len=80)
    optim = replace(recipe.optim, schedule="constant")  # whatever the number of steps
    both = replace(recipe, data=data, optim=optim, model=replace(recipe.model, moe=moe, max_seq_len=80))
    one = replace(both, data=replace(data, batch_size=2 * data.batch_size), parallel=ParallelConfig())
    one = replace(one, train=replace(one.train, out_dir=str(tmp_path / "one")))
    assert isinstance(train(one), RunResult)
    path = written(both, tmp_path, out_dir=str(tmp_path / "two"), steps=4)
    done = torchrun(tmp_path, 2, "-m", "tilemoe", "train", "--recipe", path)
    assert done.returncode == 0, done.stderr
    path = written(both, tmp_path, out_dir=str(tmp_path / "two"))
    done = torchrun(tmp_path, 2, "-m", "tilemoe", "train", "--recipe", path, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    heldout = [list(read_metrics(tmp_path / run / "metrics.jsonl"))[-1]["nats_per_token"] for run in ("one", "two")]
    assert heldout[0] == pytest.approx(heldout[1], rel=1e-4)


@pytest.mark.thorough
@pytest.mark.dist
def test_a_job_that_does_not_fit_is_told_once(recipe: Recipe, tmp_path: Path) -> None:
    path = written(recipe, tmp_path)
    done = torchrun(tmp_path, 2, "-m", "tilemoe", "train", "--recipe", path, "--parallel.expert", "4")
    assert done.returncode != 0
    assert len(said(done)) == 1
    assert "rank 0 of 2: parallel: replicate 1 x shard any x expert 4 needs 4 processes" in said(done)[0]
    assert not Path(recipe.train.out_dir).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(expert=4)}, r"expert 4 needs 4 processes and the job has 2; start it with"),
        ({"parallel": ParallelConfig(shard=1)}, r"job's 2 processes are not divided evenly by replicate 1 x shard 1"),
        ({"experts": 5}, r"parallel.expert \(2\) must divide model.moe.num_experts \(5\)"),
        ({"experts": 8}, r"is of another model: model.moe.num_experts is 8 here and 4 in the checkpoint; use"),
    ],
)
def test_what_does_not_fit_is_found_before_a_device_is_touched(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """By every process for itself, without a word to the others."""
    alone = replace(recipe, train=replace(recipe.train, steps=1, save_every=1), parallel=ParallelConfig())
    assert isinstance(train(alone), RunResult)
    checkpoint = find_latest(Path(recipe.train.out_dir))
    experts = changes.pop("experts", 4)
    assert recipe.model.moe is not None
    model = replace(recipe.model, moe=replace(recipe.model.moe, num_experts=experts))
    monkeypatch.setattr(runs, "select_device", lambda *_: pytest.fail("a device was chosen"))
    for rank in (0, 1):
        with raises_one_line(message):
            train(replace(recipe, model=model, **changes), checkpoint, Job(rank, 2))


def test_the_first_process_verifies_after_all_have_looked_whether_it_fits(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifying takes long; another rank would speak first of what all find."""
    alone = replace(recipe, train=replace(recipe.train, steps=1, save_every=1), parallel=ParallelConfig())
    assert isinstance(train(alone), RunResult)
    run, path = recipe.train.out_dir, str(written(recipe, tmp_path))
    monkeypatch.setattr(checkpoints, "require_files", lambda *_: pytest.fail("verified before"))
    monkeypatch.setattr("time.sleep", lambda _: None)
    for rank in ("0", "1"):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, value)
        for resume in ("auto", run):
            with pytest.raises(JobError, match=f"^rank {rank} of 2: .* model.num_layers is 3 here and 2 in the"):
                run_command(["--recipe", path, "--resume", resume, "--model.num-layers", "3"])
    (Path(run) / "step_00000001" / "state.json").write_text("{")
    with pytest.raises(JobError, match=r"state\.json is not JSON"):
        run_command(["--recipe", path, "--resume", run])


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

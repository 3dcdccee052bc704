"""Adapters on several processes: what one process trains, and a checkpoint that any number of them goes on from."""

from dataclasses import replace
from pathlib import Path

import lora_checks as checks
import pytest
import torch
from distributed_checkpoint_checks import assert_state
from peft import PeftModel
from ranks import run_on_ranks
from test_train_distributed import losses, trained_by, written
from test_train_initial import write_model
from transformers import AutoModelForCausalLM

from tilemoe.cli.main import main
from tilemoe.config import ParallelConfig
from tilemoe.testing import relative_error
from tilemoe.train.checkpoints.folder import open_checkpoint
from tilemoe.train.checkpoints.initial import adopt
from tilemoe.train.checkpoints.restore import make_decoder, restore
from tilemoe.train.config import LoRAConfig, OptimConfig, Recipe
from tilemoe.train.optim import make_optimizer
from tilemoe.train.run import train

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def on_four(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(checks.ON_FOUR, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", [check.__name__ for check in checks.ON_FOUR])
def test_four_processes_save_and_resume(name: str, on_four: dict[str, str]) -> None:
    assert not on_four[name], on_four[name]


@pytest.mark.usefixtures("on_four")
def test_two_processes_resume(run_dir: Path, tmp_path: Path) -> None:
    results = run_on_ranks(checks.ON_TWO, 2, tmp_path)
    assert not any(results.values()), results


@pytest.mark.usefixtures("on_four")
def test_one_process_resumes(run_dir: Path) -> None:
    model = make_decoder(checks.recipe())
    training = (model, make_optimizer(model, OptimConfig(lr=0.1)))
    open_checkpoint(run_dir / "step_00000002").load_training(*training)
    assert_state(training, "state_2.pt")


@pytest.mark.thorough
def test_four_processes_train_as_one_does_and_any_number_goes_on(
    moe_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts over two processes, FSDP over the others; then two, then one, then an export of what the two wrote."""
    write_model("olmoe", tmp_path / "base")
    options = ["--init-from", tmp_path / "base", "--resume", "auto"]
    recipe = replace(adopt(moe_recipe, tmp_path / "base"), lora=LoRAConfig(rank=3, base=str(tmp_path / "base")))
    settings = replace(recipe.train, steps=6, eval_every=0, save_every=2, selection_bias_rate=0.0, timeout=30)
    optim = replace(recipe.optim, schedule="constant")  # whatever the number of steps
    recipe = replace(recipe, train=settings, optim=optim, parallel=ParallelConfig(expert=2))
    run, four = tmp_path / "run", replace(recipe, data=replace(recipe.data, batch_size=1))
    path = written(four, tmp_path, out_dir=str(run))
    assert "of them trained, on 4 x cpu" in trained_by(4, path, *options).out
    one = replace(recipe, train=replace(settings, out_dir=str(tmp_path / "one")), parallel=ParallelConfig())
    train(one, init_from=tmp_path / "base")
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    said = trained_by(2, path, *options, "--train.steps", 8).out
    assert f"resuming from {run}/step_00000006" in said
    words = ["train", "--recipe", path, *options, "--train.steps", "10", "--parallel.expert", "1"]
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    assert len(losses(run)) == 10
    sharded = run / "step_00000008"
    assert (sharded / ".metadata").exists()
    assert main(["eval", "--checkpoint", str(sharded)]) == 0
    for out, more in (("merged", []), ("adapter", ["--adapter"])):
        assert main(["export", "--checkpoint", str(sharded), "--out", str(tmp_path / out), *more]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours = restore(sharded, "cpu").model(ids).logits
        base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "merged"))
        assert relative_error(base(ids).logits, ours) > 0.01
        assert relative_error(merged(ids).logits, ours) < 1e-5
        assert relative_error(PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits, ours) < 1e-5

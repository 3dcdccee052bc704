"""train.deterministic: PyTorch's deterministic algorithms for a run, and for nothing after it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import losses
from torch._inductor import config as inductor
from torch.utils import deterministic

from tilemoe.config import ModelConfig, MoEConfig
from tilemoe.train.config import Recipe
from tilemoe.train.loop import Trainer
from tilemoe.train.run import train

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> tuple[Any, ...]:
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = deterministic  # a module whose attributes are properties: opaque to type checkers
    return *algorithms, memory.fill_uninitialized_memory, inductor.deterministic


def trained_losses(recipe: Recipe, out_dir: Path) -> list[float]:
    train(replace(recipe, train=replace(recipe.train, out_dir=str(out_dir))))
    return losses(out_dir)


@pytest.mark.parametrize(
    ("compile", "fails"), [("none", False), ("none", True), pytest.param("blocks", False, marks=pytest.mark.thorough)]
)
def test_it_holds_in_the_run_alone(
    moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile: str, fails: bool
) -> None:
    monkeypatch.setenv(WORKSPACE, "")  # so that monkeypatch restores it, though the run is what sets it
    monkeypatch.delenv(WORKSPACE)
    recipe = replace(moe_recipe, train=replace(moe_recipe.train, steps=2, compile=compile))
    expected, before, found = trained_losses(recipe, tmp_path / "plain"), settings(), []
    assert WORKSPACE not in os.environ
    real = Trainer.train_step

    def step(trainer: Trainer) -> object:
        found.append(settings())
        if fails:
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return real(trainer)

    monkeypatch.setattr(Trainer, "train_step", step)
    recipe = replace(recipe, train=replace(recipe.train, deterministic=True))
    if fails:
        with pytest.raises(RuntimeError, match="cumsum_cuda_kernel"):
            trained_losses(recipe, tmp_path / "run")
    else:
        assert trained_losses(recipe, tmp_path / "run") == pytest.approx(expected, rel=1e-6)
    assert set(found) == {(True, False, False, True)}
    assert os.environ[WORKSPACE] == ":4096:8"
    assert settings() == before


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "blocks"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_steps_on_a_gpu_repeat_to_the_bit(moe_recipe: Recipe, tmp_path: Path, compile: str, precision: str) -> None:
    """Sequences of several of attention's tiles: without the setting dq is added to in any order."""
    moe = MoEConfig(256, 128, 8, 2, precision=precision)
    run = replace(
        moe_recipe.train, steps=4, device="cuda", precision="bf16", compile=compile, sample_tokens=0, deterministic=True
    )
    recipe = replace(
        moe_recipe, model=ModelConfig(256, 256, 2, 4, 2, 64, 1024, moe=moe), train=run,
        data=replace(moe_recipe.data, seq_len=1024, heldout_every=2),
    )  # fmt: skip
    assert trained_losses(recipe, tmp_path / "one") == trained_losses(recipe, tmp_path / "another")

"""A small corpus and a recipe over it that trains in well under a second."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from distributed_checkpoint_checks import RUN
from helpers import write_corpus
from small_runs import write_checkpoint, write_sharded

from tilemoe.config import ModelConfig, MoEConfig, RouterConfig
from tilemoe.train.config import DataConfig, OptimConfig, Recipe, TrainConfig


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 0)


@pytest.fixture
def moe_recipe(corpus: Path, tmp_path: Path) -> Recipe:
    moe = MoEConfig(16, 16, 4, 2, router=RouterConfig(selection_bias=True, aux_loss_coef=0.01))
    return Recipe(
        "test",
        "for tests",
        ModelConfig(256, 16, 2, 2, 1, 8, 16, moe=moe),
        DataConfig(16, 4, str(corpus), cache_dir=str(corpus.parent / "cache"), heldout_every=40),
        OptimConfig(lr=0.01, warmup_steps=2),
        TrainConfig(
            steps=6, out_dir=str(tmp_path / "run"), precision="fp32", log_every=1, eval_every=2, eval_batches=2,
            save_every=3, plot=False, sample_prompt="ab", sample_tokens=4, selection_bias_rate=0.01,
        ),
    )  # fmt: skip


@pytest.fixture
def dense_recipe(moe_recipe: Recipe) -> Recipe:
    return replace(moe_recipe, model=replace(moe_recipe.model, moe=None, dense_intermediate_size=32))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the jobs of a module share; their checks find it as `distributed_checkpoint_checks.run_dir`."""
    folder: Path = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN, str(folder))
        yield folder


@pytest.fixture(params=["moe", "dense"])
def recipe(request: pytest.FixtureRequest, moe_recipe: Recipe, dense_recipe: Recipe) -> Recipe:
    return moe_recipe if request.param == "moe" else dense_recipe


@pytest.fixture
def checkpoint(dense_recipe: Recipe) -> Path:
    """One process' checkpoint in the run's folder, which is ``tmp_path / "run"``."""
    return write_checkpoint(dense_recipe)


@pytest.fixture
def sharded(dense_recipe: Recipe) -> Path:
    """A job's, as it was written when manifests said nothing of tensors."""
    return write_sharded(dense_recipe)

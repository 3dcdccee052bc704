"""Where bf16 comes from: autocast over fp32 weights, or FSDP, which gathers them in bf16, but never both."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tilemoe.config import ParallelConfig
from tilemoe.data import prepare
from tilemoe.layers.norm import RMSNorm
from tilemoe.train.checkpoints.restore import build_model, build_shared_model
from tilemoe.train.config import Recipe
from tilemoe.train.job.processes import ALONE
from tilemoe.train.loop import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    """A job of this process alone, which shards its model over itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def trainer_of(recipe: Recipe, shared: bool) -> Trainer:
    data = prepare(recipe.data.corpus, "bytes", recipe.data.cache_path, recipe.data.heldout_every)
    model = build_shared_model(recipe, CPU, ALONE) if shared else build_model(recipe, CPU)
    return Trainer(recipe, model, data, CPU)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("shared", "param_dtype", "autocast", "normed"),
    [
        (False, "bfloat16", True, torch.float32),
        (True, None, True, torch.float32),
        (True, "bfloat16", False, torch.bfloat16),
    ],
)
def test_bf16(moe_recipe: Recipe, shared: bool, param_dtype: str | None, autocast: bool, normed: torch.dtype) -> None:
    settings = replace(moe_recipe.train, precision="bf16")
    recipe = replace(moe_recipe, train=settings, parallel=ParallelConfig(param_dtype=param_dtype))  # type: ignore[arg-type]
    trainer = trainer_of(recipe, shared)
    seen: set[tuple[bool, torch.dtype]] = set()
    for module in trainer.model.modules():
        if isinstance(module, RMSNorm):
            module.register_forward_hook(
                lambda norm, args, out: seen.add((torch.is_autocast_enabled("cpu"), out.dtype))
            )
    losses = [trainer.train_step().loss for _ in range(3)]
    expected = trainer_of(moe_recipe, False)
    assert losses == pytest.approx([expected.train_step().loss for _ in range(3)], rel=5e-3)
    # q and k are bf16 under autocast; with its fp32 weight their norm makes fp32 of them again.
    assert seen == {(autocast, normed)}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}, "what the optimiser updates"


@pytest.mark.usefixtures("group")
def test_fp32_is_fp32_throughout(moe_recipe: Recipe) -> None:
    trainer, expected = trainer_of(moe_recipe, True), trainer_of(moe_recipe, False)
    for _ in range(3):
        assert trainer.train_step().loss == pytest.approx(expected.train_step().loss, rel=1e-6)

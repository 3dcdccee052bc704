"""AdamW with moments of a byte: torchao's updates near AdamW's; saved as plain tensors, and resumed to the bit."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import raises_one_line
from safetensors.torch import load_file, save_file
from torch import nn

from tilemoe.models.decoder import DecoderLM
from tilemoe.train import optim
from tilemoe.train.checkpoints.folder import find_latest
from tilemoe.train.checkpoints.sharded_state import read_training, whole_tensors
from tilemoe.train.config import OptimConfig, Recipe
from tilemoe.train.job.processes import Job
from tilemoe.train.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors, set_learning_rate
from tilemoe.train.preflight import require_ready
from tilemoe.train.run import train

CONFIG = OptimConfig(lr=0.01, name="adamw8bit")


def test_updates_are_near_adamw_s_and_moments_take_a_byte() -> None:
    changes = []
    for name in ("adamw", "adamw8bit"):
        torch.manual_seed(0)
        model = nn.Linear(64, 128)
        before = model.weight.detach().clone()
        optimizer = make_optimizer(model, replace(CONFIG, name=name))
        for _ in range(4):
            set_learning_rate(optimizer, 0.02)
            model.weight.grad, model.bias.grad = torch.randn(128, 64), torch.randn(128)
            optimizer.step()
        changes.append(model.weight.detach() - before)
    assert (changes[0] - changes[1]).norm() < 0.05 * changes[0].norm()
    held = optimizer_tensors(model, optimizer)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in held.items() if name.startswith("weight")} == {
        "weight.step": (torch.float32, ()),
        "weight.exp_avg.codes": (torch.uint8, (128, 64)),
        "weight.exp_avg.scale": (torch.float32, (32,)),
        "weight.exp_avg_sq.codes": (torch.uint8, (128, 64)),
        "weight.exp_avg_sq.scale": (torch.float32, (32,)),
    }


@pytest.mark.parametrize(
    ("gone", "added"), [("exp_avg.scale", None), ("exp_avg.codes", None), (None, "exp_avg"), (None, "step.scale")]
)
def test_half_a_moment_or_two_of_it_are_refused(gone: str | None, added: str | None) -> None:
    model = nn.Linear(64, 128)
    optimizer = make_optimizer(model, CONFIG)
    model.weight.grad = torch.randn(128, 64)
    optimizer.step()
    held = optimizer_tensors(model, optimizer)
    held.pop(f"weight.{gone}", None)
    if added is not None:
        held[f"weight.{added}"] = torch.zeros(128, 64)
    with raises_one_line("the optimiser's state of weight has"):
        load_optimizer_tensors(model, optimizer, held)


def test_many_shapes_are_compiled_few_times_into_torchao_s_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments and weights agree to the bit with torchao's optimiser, which compiles once for each shape."""
    from torch._dynamo.testing import CompileCounter
    from torchao.optim import AdamW8bit

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compiled = optim.update_on.__wrapped__("cuda")
    monkeypatch.setattr(optim, "update_on", lambda device_type: compiled)
    shapes = [(64, 64), (8, 4, 256), (64, 96), (32, 256), (16, 256), (128, 64), (40,), (50,), (6, 7)]
    torch.manual_seed(0)
    models = [nn.ParameterList(torch.ones(shape) for shape in shapes) for _ in range(2)]
    ours = make_optimizer(models[0], CONFIG)
    groups = [{**group, "params": []} for group in ours.param_groups]
    for parameter in models[1]:
        groups[parameter.ndim == 1]["params"].append(parameter)
    theirs = AdamW8bit(groups)
    for _ in range(3):
        for a, b in zip(*models, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
    assert counter.frame_count <= 4  # blocks or values, with and without weight decay
    held, expected = (optimizer_tensors(*each) for each in zip(models, (ours, theirs), strict=True))
    assert held.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))


def recipe_of(moe_recipe: Recipe, out: Path, steps: int) -> Recipe:
    """Its embeddings have moments of a byte; other parameters are too small."""
    return replace(
        moe_recipe,
        optim=replace(moe_recipe.optim, name="adamw8bit", schedule="constant", warmup_steps=0),
        train=replace(moe_recipe.train, steps=steps, out_dir=str(out), eval_every=0, sample_tokens=0),
    )


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_part_of_another_size_is_named(part: str, moe_recipe: Recipe, tmp_path: Path) -> None:
    recipe = recipe_of(moe_recipe, tmp_path / "run", 1)
    train(recipe)
    files = [tmp_path / "run" / "step_00000001" / f"{what}.safetensors" for what in ("model", "optimizer")]
    name = f"embed.weight.exp_avg.{part}"
    held = load_file(files[1])
    save_file(held | {name: held[name][1:].clone()}, files[1])
    model = DecoderLM(recipe.model)
    with raises_one_line(f"{name} is .* use the settings it was trained with"), whole_tensors(*files) as tensors:
        read_training(tensors, model, make_optimizer(model, recipe.optim))


def test_it_needs_torchao(moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(moe_recipe, tmp_path / "run", 1)
    monkeypatch.setattr(optim, "find_spec", lambda name: None)
    with raises_one_line("pip install 'tilemoe\\[fp8\\]', or use --optim.name adamw"):
        require_ready(recipe, Job(rank=0, local_rank=0, world_size=1), is_new=True)


def test_a_resumed_run_is_the_same_to_the_bit(moe_recipe: Recipe, tmp_path: Path) -> None:
    for steps, out in ((5, "whole"), (3, "part")):
        train(recipe_of(moe_recipe, tmp_path / out, steps))
    train(recipe_of(moe_recipe, tmp_path / "part", 5), find_latest(tmp_path / "part"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, part = (load_file(tmp_path / out / "step_00000005" / file) for out in ("whole", "part"))
        assert whole.keys() == part.keys()
        assert all(torch.equal(part[name], tensor) for name, tensor in whole.items())
    assert whole["embed.weight.exp_avg_sq.codes"].any()

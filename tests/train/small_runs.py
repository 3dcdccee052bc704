"""Recipes, command lines and checkpoints on a small scale, to be changed, and signed anew, as anybody can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tilemoe.data import load_tokenizer
from tilemoe.models.sums import file_entries, manifest_of
from tilemoe.train.checkpoints.folder import TrainState
from tilemoe.train.checkpoints.pending import PendingCheckpoint, Saver
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe
from tilemoe.train.optim import make_optimizer


def changed(config: Any, **settings: Any) -> Any:
    """``config`` with other settings, by their paths: ``changed(recipe, train__steps=3, model__moe__save="fp8")``."""
    for path, value in settings.items():
        name, _, rest = path.partition("__")
        config = replace(config, **{name: changed(getattr(config, name), **{rest: value}) if rest else value})
    return config


def words_of(options: Mapping[str, object]) -> list[str]:
    """The command line of ``options``, by name."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def begin(
    folder: Path, recipe: Recipe, step: int, training: tuple[Any, Any], saver: Saver, keep_last: int = 9
) -> PendingCheckpoint:
    """The checkpoint of a model and its optimiser after ``step`` steps, on bytes."""
    state = TrainState(recipe, step, 10 * step, 1.5, "abc")
    tokenizer = load_tokenizer("bytes")
    return PendingCheckpoint(folder, state, *training, tokenizer=tokenizer, keep_last=keep_last, saver=saver)


def write_checkpoint(recipe: Recipe) -> Path:
    model = build_model(recipe, torch.device("cpu"))
    training = model, make_optimizer(model, recipe.optim)
    return begin(Path(recipe.train.out_dir), recipe, 3, training, Saver(), keep_last=2).finish()


def sign(path: Path, tensors: Any = None) -> None:
    """Make the manifest list what is in the folder, and where a job's tensors are."""
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_bytes(manifest_of(file_entries(path.iterdir()), tensors))


def write_sharded(recipe: Recipe, more: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Path:
    """A checkpoint as a job of this process alone wrote it when manifests said nothing of tensors."""
    path = write_checkpoint(recipe)
    model = build_model(recipe, torch.device("cpu"))
    torch.manual_seed(7)
    tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.save({**tensors, "rng_cpu.0": torch.get_rng_state(), **more}, checkpoint_id=str(path), no_dist=True)
    for name in ("model.safetensors", "optimizer.safetensors"):
        (path / name).unlink()
    sign(path)
    return path

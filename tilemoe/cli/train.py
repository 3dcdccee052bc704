"""``tilemoe train``: a recipe, overrides of any of its settings, and resuming."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tilemoe.cli.parsing import parse
from tilemoe.config import ModelConfig
from tilemoe.train.config import DataConfig, OptimConfig, Recipe, TrainConfig, list_recipes, load_recipe

if TYPE_CHECKING:
    from tilemoe.train.checkpoint import Checkpoint

_LATEST = ""  # --resume without a path


@dataclass(frozen=True)
class Overrides:
    """The settings of a recipe that can be given on the command line: all of them."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see tilemoe train --help)")


def run(arguments: Sequence[str]) -> None:
    """Parse, train, and print the sample, the plot's path and the held-out loss."""
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe")
    first.add_argument("--resume", nargs="?", const=_LATEST)
    known, overrides = first.parse_known_args(list(arguments))
    if "-h" in overrides or "--help" in overrides:
        _override(load_recipe(known.recipe or list_recipes()[0]), overrides)
    recipe, checkpoint = _choose(known.recipe, known.resume, overrides)

    from tilemoe.train.run import train

    result = train(recipe, checkpoint)
    if result is None:
        return
    if result.sample is not None:
        print(f"\nsample:\n{result.sample}\n")
    if result.plot is not None:
        print(f"plot: {result.plot}")
    print(f"held-out loss {result.evaluation.shown(2)}")


def _choose(name: str | None, resume: str | None, overrides: Sequence[str]) -> tuple[Recipe, Checkpoint | None]:
    """The recipe to run and the checkpoint to go on from."""
    if name is None and not resume:
        raise ValueError(f"--recipe NAME is missing; choose one of {', '.join(list_recipes())} or a .json file")
    base = load_recipe(name) if name is not None else None
    if resume:
        return _resume_from(Path(resume).expanduser(), base, overrides)
    assert base is not None
    recipe = _override(base, overrides)
    run_dir = Path(recipe.train.out_dir).expanduser()

    from tilemoe.train.checkpoint import find_latest
    from tilemoe.train.run import require_fresh

    if resume is None:
        require_fresh(run_dir)
        return recipe, None
    checkpoint = find_latest(run_dir)
    print(f"resuming from {checkpoint.path}" if checkpoint else f"no checkpoint in {run_dir} yet: starting at step 0")
    return recipe, checkpoint


def _resume_from(path: Path, base: Recipe | None, overrides: Sequence[str]) -> tuple[Recipe, Checkpoint]:
    """``--resume PATH``: the run stays in PATH's folder, with the checkpoint's own recipe unless one is named."""
    from tilemoe.train.checkpoint import resolve_checkpoint

    checkpoint = resolve_checkpoint(path)
    run_dir = str(checkpoint.path.parent)
    base = base or checkpoint.state.recipe
    recipe = _override(replace(base, train=replace(base.train, out_dir=run_dir)), overrides)
    if recipe.train.out_dir != run_dir:
        raise ValueError(f"train.out_dir: a run resumed from {path} stays in {run_dir}; leave --train.out-dir out")
    print(f"resuming from {checkpoint.path}")
    return recipe, checkpoint


def _override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    description = (
        "Train a model. --recipe NAME picks the settings that the options below override "
        f"({', '.join(list_recipes())}, or a .json file; shown: {recipe.name}). --resume goes on from the newest "
        "checkpoint in train.out_dir, --resume PATH from a run's folder or a step_* folder."
    )
    settings = parse(
        Overrides,
        overrides,
        prog="tilemoe train",
        description=description,
        default=Overrides(recipe.model, recipe.data, recipe.optim, recipe.train),
    )
    return replace(recipe, model=settings.model, data=settings.data, optim=settings.optim, train=settings.train)

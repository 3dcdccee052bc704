"""The names of a run's checkpoints, and the recipe of one. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tilemoe.checks import parse_json
from tilemoe.files import read_text
from tilemoe.train.config import Recipe, parse_recipe

Made = TypeVar("Made")
STATE_FILE = "state.json"
GONE = "is gone, perhaps deleted by a running training; give a newer one, or try again when that has ended"
_TRIES = 3  # attempts to read a run while it adds and drops checkpoints
_STEP_DIR = re.compile(r"step_([0-9]{8,})")


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / f"step_{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def is_step_dir(path: Path) -> bool:
    """Whether ``path`` has the name of a checkpoint's folder."""
    return _STEP_DIR.fullmatch(path.name) is not None


def list_checkpoints(run_dir: Path, after: int = -1) -> list[Path]:
    """The run's checkpoint folders of steps after ``after``, oldest first, judged by name alone."""
    try:
        found = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _STEP_DIR.fullmatch(path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for step, path in sorted(found) if step > after]


def read_newest(folder: Path, read: Callable[[], Made]) -> Made:
    """The result of ``read``, which reads ``folder``'s newest checkpoint; tried again if training dropped that one
    meanwhile. ValueError: ``read`` raised it, or the checkpoint was dropped in every attempt.
    """
    was_there = folder.exists()
    for _ in range(_TRIES):
        there = list_checkpoints(folder)
        try:
            return read()
        except (ValueError, OSError) as error:
            if list_checkpoints(folder) == there and (folder.exists() or not was_there):
                raise
            failure = error
    raise ValueError(f"checkpoint {there[-1] if there else folder} {GONE}") from failure


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run's newest checkpoint, or of a checkpoint's folder; the tensors are neither read nor verified.

    ValueError: there is no recipe.
    """
    return read_newest(folder, lambda: _read_recipe(folder))


def _read_recipe(folder: Path) -> Recipe:
    path = [folder, *list_checkpoints(folder)][-1] / STATE_FILE
    try:
        recipe = parse_json(read_text(path))["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: no model can be read from it; give a run, a step_* folder, or transformers' folder"
        ) from error
    return parse_recipe(json.dumps(recipe), str(path))

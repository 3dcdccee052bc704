"""The names of a run's checkpoints, the folders in which they are written or deleted, and the recipe of one.

``.tmp-step_*`` is being written, ``.trash-step_*`` is being deleted. Leftovers can be removed: their names end in a
digest of the rest of the name, unlike other people's (`tilemoe.files.own_name`). Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tilemoe.checks import parse_json
from tilemoe.files import own_name, read_text
from tilemoe.train.config import Recipe, parse_recipe

Made = TypeVar("Made")
STATE_FILE = "state.json"
GONE = "is gone, perhaps deleted by a running training; give a newer one, or try again when that has ended"
_TRIES = 3  # attempts to read a run while it adds and drops checkpoints
_STEP_DIR = re.compile(r"step_([0-9]{8,})")
_LEFTOVER = re.compile(r"(\.(tmp|trash)-step_[0-9]{8,})-[0-9a-f]+")


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


def temporary_of(target: Path) -> Path:
    """The name of a checkpoint's folder while it is written."""
    return target.with_name(own_name(f".tmp-{target.name}"))


def trash_of(target: Path) -> Path:
    """The name of a checkpoint's folder while it is deleted."""
    return target.with_name(own_name(f".trash-{target.name}"))


def aside_of(target: Path) -> Path:
    """A free name, ``abandoned_step_*``, for a checkpoint's folder that is kept but no longer belongs to the run."""
    path, n = target.with_name(f"abandoned_{target.name}"), 1
    while os.path.lexists(path):
        path, n = target.with_name(f"abandoned_{target.name}.{n}"), n + 1
    return path


def make_temporary(target: Path) -> None:
    """Make the folder `temporary_of`, and remove what interrupted writes have left.

    OSError: see `clean_stale`, or the folder cannot be made, or ``target`` exists already.
    """
    if os.path.lexists(target):  # newer checkpoints were set aside before the run went on
        raise FileExistsError(errno.EEXIST, "something else has this checkpoint's name: move it away", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    clean_stale(target.parent)
    temporary_of(target).mkdir()


def delete_files(path: Path, names: Iterable[str]) -> None:
    """Delete a checkpoint's files ``names`` and its folder. It is renamed first, so a kill leaves no half checkpoint.

    If other files have come into the folder meanwhile, it stays, as ``abandoned_step_*``. OSError: it cannot be done.
    """
    trash = trash_of(path)
    os.rename(path, trash)
    for file in {*trash.iterdir()} & {trash / name for name in names}:  # a listed name may be none that a file can have
        file.unlink()
    if any(trash.iterdir()):
        os.rename(trash, aside_of(path))
    else:
        trash.rmdir()


def discard(temporary: Path) -> None:
    """Remove what a failed write has left; errors are ignored."""
    shutil.rmtree(temporary, ignore_errors=True)


def clean_stale(run_dir: Path) -> None:
    """Remove what an interrupted write or deletion left behind.

    FileExistsError: a file or a link, which is not removed, has a name that a checkpoint needs.
    """
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or path.name != own_name(found[1]):
            continue
        if path.is_symlink() or not path.is_dir():
            raise FileExistsError(errno.EEXIST, "tilemoe did not make it and needs its name: move it away", str(path))
        shutil.rmtree(path)

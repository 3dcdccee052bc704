"""Folders of checkpoints that are being written or deleted. Only we give such names, so leftovers can be removed.

``.tmp-step_*`` is being written, ``.trash-step_*`` is being deleted. Our names end in a digest of the rest of the name,
which tells them from other people's folders (`tilemoe.files.own_name`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from tilemoe.files import own_name

_NAME = re.compile(r"(\.(tmp|trash)-step_[0-9]{8,})-[0-9a-f]+")


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
    for name in names:
        (trash / name).unlink(missing_ok=True)
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
        found = _NAME.fullmatch(path.name)
        if found is None or path.name != own_name(found[1]):
            continue
        if path.is_symlink() or not path.is_dir():
            raise FileExistsError(errno.EEXIST, "tilemoe did not make it and needs its name: move it away", str(path))
        shutil.rmtree(path)

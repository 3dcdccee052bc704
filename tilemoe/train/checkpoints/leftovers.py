"""What is on its way to a checkpoint's name, or from it: folders by names that only we give, so that they may go.

``.tmp-step_*`` is being written, ``.trash-step_*`` deleted. Other people's folders may be called the same but for the
digest of the rest, in which our names end (`tilemoe.files.own_name`).
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
    """A free name for a checkpoint's folder that is kept out of the run's way."""
    path, n = target.with_name(f"abandoned_{target.name}"), 1
    while os.path.lexists(path):
        path, n = target.with_name(f"abandoned_{target.name}.{n}"), n + 1
    return path


def make_temporary(target: Path) -> None:
    """Make the folder `temporary_of`; what interrupted writes have left is removed.

    OSError: as `clean_stale`, or it cannot be made, or ``target`` is there already.
    """
    if os.path.lexists(target):  # newer checkpoints were set aside before the run went on
        raise FileExistsError(errno.EEXIST, "something else has this checkpoint's name: move it away", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    clean_stale(target.parent)
    temporary_of(target).mkdir()


def delete_files(path: Path, names: Iterable[str]) -> None:
    """Delete a checkpoint of these files; first it loses its name, so that a kill half-way leaves no half checkpoint.

    What else has come into the folder meanwhile stays, in ``abandoned_step_*``. OSError: it cannot be done.
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
    """Remove what a failed write has left, as far as that can be done."""
    shutil.rmtree(temporary, ignore_errors=True)


def clean_stale(run_dir: Path) -> None:
    """Remove what an interrupted write or deletion left behind.

    FileExistsError: a file or a link has a name that a checkpoint needs; it is left as it is.
    """
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        found = _NAME.fullmatch(path.name)
        if found is None or path.name != own_name(found[1]):
            continue
        if path.is_symlink() or not path.is_dir():
            raise FileExistsError(errno.EEXIST, "tilemoe did not make it and needs its name: move it away", str(path))
        shutil.rmtree(path)

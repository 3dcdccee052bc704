"""What is on its way to a checkpoint's name, or from it: folders that bear a mark, by which they may be removed.

``.tmp-step_*`` is being written, ``.trash-step_*`` deleted. Other people's folders may be called the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from tilemoe.files import never_a_link, open_regular, rename_synced
from tilemoe.train.checkpoints.names import list_checkpoints

MARK_FILE = ".tilemoe"
_MARK = b"Written by tilemoe, which removes this folder when it finds it.\n"
_NAME = re.compile(r"\.(tmp|trash)-step_[0-9]{8,}")


def temporary_of(target: Path) -> Path:
    """The name of a checkpoint's folder while it is written."""
    return target.with_name(f".tmp-{target.name}")


def make_temporary(target: Path) -> None:
    """Make that folder, with its mark; what interrupted writes have left is removed.

    Raises:
        OSError: as `clean_stale`, or it cannot be made, or ``target`` is there already.
    """
    if os.path.lexists(target):  # newer checkpoints were set aside before the run went on
        raise FileExistsError(errno.EEXIST, "something else has this checkpoint's name: move it away", str(target))
    make_marked(temporary_of(target))


def make_marked(folder: Path) -> None:
    """Make a folder of a name that `clean_stale` knows, with its mark; what interrupted writes have left is removed.

    Raises:
        OSError: as `clean_stale`, or it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    clean_stale(folder.parent)
    folder.mkdir()
    _mark(folder)


def publish_folder(temporary: Path, target: Path) -> None:
    """Give a folder that is complete its name, for good or not at all; the mark goes last, for without it nobody may
    remove the folder.
    """
    rename_synced(temporary, target)
    with contextlib.suppress(OSError):  # the checkpoint is there; nobody reads a mark in it
        (target / MARK_FILE).unlink()


def delete_files(path: Path, names: Iterable[str]) -> None:
    """Delete a checkpoint of these files; first it loses its name, so that a kill half-way leaves no half checkpoint.

    Raises:
        OSError: it cannot be done, or something else has come into the folder meanwhile, which stays.
    """
    with contextlib.suppress(OSError):  # a disk that is full is no reason to keep it
        _mark(path)
    trash = path.with_name(f".trash-{path.name}")
    os.rename(path, trash)
    for name in names:
        (trash / name).unlink(missing_ok=True)
    (trash / MARK_FILE).unlink(missing_ok=True)
    trash.rmdir()


def discard(temporary: Path) -> None:
    """Remove what a failed write has left, if it is ours, as far as that can be done."""
    with contextlib.suppress(OSError):
        if is_ours(temporary):
            _remove(temporary)


def clean_stale(run_dir: Path) -> None:
    """Remove what an interrupted write or deletion left behind: what bears our mark, or is an empty folder.

    Raises:
        FileExistsError: something else has a name that a checkpoint needs; it is left as it is.
    """
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if _NAME.fullmatch(path.name) is None:
            continue
        if not is_ours(path):
            raise FileExistsError(errno.EEXIST, "tilemoe did not make it and needs its name: move it away", str(path))
        _remove(path)
    for path in filter(is_ours, list_checkpoints(run_dir)):  # that got its name when the disk was gone or full
        with contextlib.suppress(OSError):
            (path / MARK_FILE).unlink()


def _mark(folder: Path) -> None:
    with open(folder / MARK_FILE, "wb", opener=never_a_link) as file:
        file.write(_MARK)


def is_ours(path: Path) -> bool:
    """Whether it is a folder with our mark, which a kill may have cut short.

    An empty folder is what a kill leaves between making it and marking it; to remove it loses nothing.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    mark = path / MARK_FILE
    if not mark.is_file() or mark.is_symlink():
        return not any(path.iterdir())
    with open_regular(mark) as file:
        return _MARK.startswith(file.read(len(_MARK) + 1))


def _remove(folder: Path) -> None:
    """Delete the folder, the mark last: after a kill the rest is still recognised as ours."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK_FILE:
            path.unlink()
    (folder / MARK_FILE).unlink(missing_ok=True)
    folder.rmdir()

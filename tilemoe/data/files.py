"""Durable, atomic publication of files and folders in a cache that several processes may fill at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_TEMPORARY = ".tmp-"


def write_atomic(path: Path, content: str) -> None:
    """Make ``path`` hold ``content``: at every moment it has its old content or the new one, whole."""
    temporary = _temporary_beside(path)
    try:
        temporary.write_text(content, encoding="utf-8")
        _fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync(path.parent)


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """A new folder beside ``final`` that takes its name when the block ends, and is gone if the block fails.

    Where another process has published ``final`` meanwhile, its folder stays and ours is dropped.
    """
    temporary = _temporary_beside(final)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _fsync(path)
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.is_dir():
                raise
        _fsync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def only_one_process(target: Path) -> Iterator[None]:
    """Hold the lock of ``target`` for the block: who comes second waits, then finds the work done.

    The lock saves work and lets what killed processes left behind be removed. It is not what keeps ``target`` whole:
    publication is atomic, so systems without such locks only work twice.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".lock-{target.name}").open("a") as lock:
        if _locks(lock.fileno()):
            for leftover in target.parent.glob(f"{_TEMPORARY}{target.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def _locks(descriptor: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # released with the file, also when the process is killed
    except OSError:
        return False
    return True


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(8)}")


def _fsync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

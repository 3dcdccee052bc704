"""Files and folders that are either whole or not there, and locks between processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_TEMPORARY = ".tmp-"
_HASH_CHUNK = 1 << 18  # bytes


def write_atomic(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content``: at every moment it has its old content or the new one, whole."""
    temporary = _temporary_beside(path)
    try:
        temporary.write_bytes(content)
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


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
            fsync(path)
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.is_dir() or not any(final.iterdir()):
                raise
        fsync(final.parent)
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
        if _locked(lock.fileno(), waits=True):
            for leftover in target.parent.glob(f"{_TEMPORARY}{target.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextlib.contextmanager
def owned_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` itself for the block, without waiting and without a file of its own.

    Raises:
        BlockingIOError: another process holds it. (Where folders cannot be locked, nobody is kept out.)
    """
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _locked(descriptor, waits=False)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, *, waits: bool) -> bool:
    """Lock it until it is closed, also by a kill; False where the system has no such locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(8)}")


def sha256_file(path: Path) -> str:
    """Hex digest of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's entries (creations, renames, deletions), to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Atomic writes of files and folders (never through a link), locks between processes, and the cache folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tilemoe.checks import expand_user

_TEMPORARY = ".tmp-"
_HASH_CHUNK = 1 << 18  # bytes
_LARGEST = 1 << 26  # most bytes of a file that is read whole: settings, a tokenizer, an index of tensors


def default_cache_dir() -> Path:
    """``$TILEMOE_CACHE``, else ``$XDG_CACHE_HOME/tilemoe``, else ``~/.cache/tilemoe``."""
    explicit = os.environ.get("TILEMOE_CACHE")
    if explicit:
        return expand_user(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else expand_user("~/.cache")) / "tilemoe"


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. OSError: as ``open``, or it is a pipe or a device, whose read may never end.

    Opening a pipe does not wait for its writer.
    """
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def read_bytes(path: Path, largest: int = _LARGEST) -> bytes:
    """The content of a file of at most ``largest`` bytes. OSError: as in `open_regular`, or it is larger."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > largest:
            raise OSError(errno.EFBIG, f"it has more than {largest >> 20} MiB", str(path))
        return file.read()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, read as by `read_bytes`."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8").read()


def never_a_link(path: str, flags: int) -> int:
    """The ``opener`` for files written in place. OSError: ``path`` is a link, a pipe or a device."""
    _require_no_link(path)
    return _regular(path, flags | os.O_NOFOLLOW)


def _require_no_link(path: str | Path) -> None:
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link, which tilemoe never writes to: move it away", str(path))


def write_atomic(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content``: at every moment it has either its whole old content or the whole new one.

    Raises:
        OSError: ``path`` cannot be written, or is a link; the error names the file.
    """
    try:
        _require_no_link(path)
        with _temporary_beside(path, Path.touch) as temporary:
            temporary.write_bytes(content)
            fsync(temporary)
            os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk's error has none
        raise


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """A new folder beside ``final`` that is renamed to it when the block ends, or removed if the block fails.

    OSError: the folder cannot be written, or another process has published ``final`` meanwhile, whose folder stays.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_beside(final, Path.mkdir) as temporary:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            fsync(path)
        rename_synced(temporary, final)


def rename_synced(source: Path, target: Path) -> None:
    """Rename a folder durably; if the rename cannot be synced to the disk, undo it and raise."""
    os.rename(source, target)
    try:
        fsync(target.parent)
    except OSError:
        os.rename(target, source)
        raise


@contextlib.contextmanager
def only_one_process(target: Path, seconds: float = math.inf) -> Iterator[None]:
    """Hold the lock of ``target`` for the block: a second process waits, then finds the work done.

    The lock only saves work. ``target`` is always whole, since it is published atomically: on file systems without
    such locks both processes do the work.

    Raises:
        TimeoutError: another process still holds the lock after ``seconds``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".lock-{target.name}", "a", opener=never_a_link) as lock:
        if seconds == math.inf:
            _locked(lock.fileno(), waits=True)
        else:
            _lock_within(lock.fileno(), seconds)
        yield


@contextlib.contextmanager
def owned_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` itself for the block, without waiting and without a lock file.

    Raises:
        BlockingIOError: another process holds it. (Never where folders cannot be locked.)
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _locked(descriptor, waits=False)
        yield
    finally:
        os.close(descriptor)


def _lock_within(descriptor: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            _locked(descriptor, waits=False)
            return
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"another process has held its lock for {seconds:g} s") from error
        time.sleep(0.1)


def _locked(descriptor: int, *, waits: bool) -> bool:
    """Lock the file until it is closed or the process ends. Returns False if the file system has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _temporary_beside(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """A temporary file or folder beside ``path``, created by ``make``, for the block; removes killed processes' ones.

    A writer holds its temporary's lock until it is done, so that others can tell whether that writer is alive.
    """
    _remove_abandoned(path)
    while True:
        temporary = path.with_name(own_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(8)}"))
        make(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        _locked(descriptor, waits=True)
        if temporary.exists():  # otherwise another process removed it before it was locked
            break
        os.close(descriptor)
    try:
        yield temporary
    finally:
        _remove(temporary)
        os.close(descriptor)


def own_name(start: str) -> str:
    """A name that only this package makes: it ends in a digest of ``start``."""
    return f"{start}-{hashlib.sha256(start.encode(errors='surrogateescape')).hexdigest()[:16]}"


def _remove_abandoned(path: Path) -> None:
    for leftover in path.parent.iterdir():
        start = leftover.name.rpartition("-")[0]
        is_own = start.startswith(f"{_TEMPORARY}{path.name}-") and leftover.name == own_name(start)
        if not is_own or leftover.is_symlink():
            continue
        with contextlib.suppress(OSError):  # BlockingIOError: its writer is alive
            descriptor = os.open(leftover, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
            try:
                if _locked(descriptor, waits=False):
                    _remove(leftover)
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove as much as possible; the next writer tries again."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sha256_file(path: Path, piece: int = _HASH_CHUNK) -> str:
    """SHA-256 hex digest of a file's content, read ``piece`` bytes at a time."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        chunk = memoryview(bytearray(min(piece, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(chunk):
            digest.update(chunk[:size])
    return digest.hexdigest()


def digest_of_sources(folder: Path) -> str:
    """SHA-256 hex digest of all Python files in and below ``folder``: checkouts of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's entries (creations, renames, deletions), to the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

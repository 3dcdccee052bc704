"""Atomic writes of files and folders, never through a link, locks between processes, and the cache folder."""

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
_LARGEST = 1 << 26  # bytes of a file that is read whole: settings, a tokenizer, an index of tensors


def default_cache_dir() -> Path:
    """``$TILEMOE_CACHE``, else ``$XDG_CACHE_HOME/tilemoe``, else ``~/.cache/tilemoe``."""
    explicit = os.environ.get("TILEMOE_CACHE")
    if explicit:
        return expand_user(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else expand_user("~/.cache")) / "tilemoe"


def open_regular(path: Path) -> io.BufferedReader:
    """A regular file for reading. OSError: it is a pipe or a device, of which a read may never end, or as of ``open``.

    To open a pipe does not wait for its writer here.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_bytes(path: Path, largest: int = _LARGEST) -> bytes:
    """A file of at most ``largest`` bytes. OSError: as `open_regular`, or it is larger."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > largest:
            raise OSError(errno.EFBIG, f"it has more than {largest >> 20} MiB", str(path))
        return file.read()


def read_text(path: Path) -> str:
    """As `read_bytes`, the text of a file of UTF-8."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8").read()


def never_a_link(path: str, flags: int) -> int:
    """The ``opener`` for what is written in place: OSError where the name is a link, wherever that leads."""
    _require_no_link(path)
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _require_no_link(path: str | Path) -> None:
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link, through which nothing is written: move it away", str(path))


def write_atomic(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content``: at every moment it has its old content or the new one, whole.

    Raises:
        OSError: it cannot be written, or is a link; it names a file.
    """
    try:
        _require_no_link(path)
        with _temporary_beside(path, Path.touch) as temporary:
            temporary.write_bytes(content)
            fsync(temporary)
            os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not know it
        raise


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """A new folder beside ``final`` that takes its name when the block ends, and is gone if the block fails.

    Where another process has published ``final`` meanwhile, its folder stays and ours is dropped.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_beside(final, Path.mkdir) as temporary:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            fsync(path)
        try:
            rename_synced(temporary, final)
        except OSError:
            if not final.is_dir() or not any(final.iterdir()):
                raise


def rename_synced(source: Path, target: Path) -> None:
    """Rename a folder for good, or not at all: it has its old name where the new one may not outlive a crash."""
    os.rename(source, target)
    try:
        fsync(target.parent)
    except OSError:
        os.rename(target, source)
        raise


@contextlib.contextmanager
def only_one_process(target: Path, seconds: float = math.inf) -> Iterator[None]:
    """Hold the lock of ``target`` for the block: who comes second waits, then finds the work done.

    The lock saves work. It is not what keeps ``target`` whole: publication is atomic, so on file systems without
    such locks they only work twice.

    Raises:
        TimeoutError: another process still holds it after so many ``seconds``.
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
    """Hold the lock of ``folder`` itself for the block, without waiting and without a file of its own.

    Raises:
        BlockingIOError: another process holds it. (Where folders cannot be locked, nobody is kept out.)
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
                raise TimeoutError(f"another process has held it for {seconds:g} s") from error
        time.sleep(0.1)


def _locked(descriptor: int, *, waits: bool) -> bool:
    """Lock it until it is closed, also by a kill; False where the file system has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _temporary_beside(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """What ``make`` makes beside ``path``, for the block; what killed processes have left there is removed.

    Its writer holds the lock of each until it is done with it, so that of another one can tell whether it is alive.
    """
    _remove_abandoned(path)
    while True:
        temporary = path.with_name(own_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(8)}"))
        make(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        _locked(descriptor, waits=True)
        if temporary.exists():  # or another process has found it before it was locked
            break
        os.close(descriptor)
    try:
        yield temporary
    finally:
        _remove(temporary)
        os.close(descriptor)


def own_name(start: str) -> str:
    """A name that only we give: it ends in a digest of the rest."""
    return f"{start}-{hashlib.sha256(start.encode(errors='surrogateescape')).hexdigest()[:16]}"


def _remove_abandoned(path: Path) -> None:
    for leftover in path.parent.iterdir():
        start = leftover.name.rpartition("-")[0]
        is_own = start.startswith(f"{_TEMPORARY}{path.name}-") and leftover.name == own_name(start)
        if not is_own or leftover.is_symlink():
            continue
        with contextlib.suppress(OSError):  # BlockingIOError: its writer is alive
            descriptor = os.open(leftover, os.O_RDONLY)
            try:
                if _locked(descriptor, waits=False):
                    _remove(leftover)
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    """As far as that can be done; who comes next tries again."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sha256_file(path: Path, piece: int = _HASH_CHUNK) -> str:
    """Hex digest of a file's content, read in pieces of so many bytes."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        chunk = memoryview(bytearray(min(piece, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(chunk):
            digest.update(chunk[:size])
    return digest.hexdigest()


def digest_of_sources(folder: Path) -> str:
    """Hex digest of the Python files in a folder and below: checkouts of one version differ."""
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

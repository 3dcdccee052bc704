"""Durable file writes: what is on disk is either the old content or the new one, never a mixture."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_CHUNK = 1 << 22  # bytes read at a time when hashing


def fsync_file(path: Path) -> None:
    """Force a file's content to the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_dir(path: Path) -> None:
    """Force a folder's entries (creations, renames, deletions) to the disk."""
    _fsync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: written beside it, synced, renamed over it."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        fsync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def sha256_file(path: Path) -> str:
    """Hex digest of a file's content, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

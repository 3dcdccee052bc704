"""Manifests of folders that we write: size and SHA-256 of each file, so that reading finds changes. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilemoe.checks import parse_json
from tilemoe.files import read_bytes, sha256_file

SUMS_FILE = "checksums.json"  # the manifest of an export
_LARGEST_MANIFEST = 1 << 30  # bytes; a job's manifest lists where each process wrote its part of each tensor
_THREADS = max(1, min(8, (os.cpu_count() or 1) - 1))  # one core is left for reading the weights meanwhile
_PIECE = 1 << 23  # bytes hashed at once; for each piece a thread waits for the interpreter, which may read weights
_WEIGHTS = ".safetensors"
SHARD_BYTES = 1 << 30  # largest file of an export: each thread hashes one file, so several are hashed at once
_READ = (_WEIGHTS, ".json", ".jinja")  # the kinds of file that are read from an export

Entries = dict[str, dict[str, Any]]


class Damage(ValueError):
    """A file differs from the manifest; one line that names the file, but not its folder."""


def file_entries(paths: Iterable[Path]) -> Entries:
    """The manifest entries of these files: size and SHA-256, by name."""
    files = sorted(paths)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda path: sha256_file(path, _PIECE), files)
        return {p.name: {"bytes": p.stat().st_size, "sha256": found} for p, found in zip(files, digests, strict=True)}


def manifest_of(files: Entries, tensors: dict[str, Any] | None = None) -> bytes:
    """A manifest of ``files``, and of the places of a job's ``tensors`` in them, with a checksum of its own."""
    content = {"files": files} if tensors is None else {"files": files, "tensors": tensors}
    return canonical(content | {"sha256": _digest(content)})


def canonical(value: Any) -> bytes:
    """Canonical JSON: the same value always gives the same bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its checksum; without tensors it covers the files alone, as in older releases."""
    return hashlib.sha256(canonical(content if "tensors" in content else content["files"])).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest at ``path``. Damage: missing or changed, or its ``files`` are no table of files in its folder."""
    if not path.is_file():
        raise Damage(f"{path.name} is missing")
    raw = read_bytes(path, _LARGEST_MANIFEST)
    try:
        manifest: dict[str, Any] = parse_json(raw)
        content = {name: value for name, value in manifest.items() if name != "sha256"}
        intact = canonical(manifest) == raw and _digest(content) == manifest["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise Damage(f"{path.name} does not match its checksum")
    if not isinstance(manifest["files"], dict):
        raise Damage(f"{path.name} lists no files")
    for name, entry in manifest["files"].items():
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise Damage(f"{path.name} lists {name!r}, which is not in the folder")
        fields = entry if isinstance(entry, dict) else {}
        if type(fields.get("bytes")) is not int or fields["bytes"] < 0 or not isinstance(fields.get("sha256"), str):
            raise Damage(f"{path.name} gives no size and SHA-256 of {name!r}")
    return manifest


def require_files(folder: Path, files: Mapping[str, dict[str, Any]]) -> None:
    """Damage if one of ``files`` is missing or differs from its entry."""
    with compared(folder, files):
        pass


def require_sizes(folder: Path, files: Mapping[str, dict[str, Any]]) -> None:
    """`require_files` for the sizes alone, not the content."""
    for name, expected in files.items():
        if not (folder / name).is_file():
            raise Damage(f"{name} is missing")
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            raise Damage(f"{name} has {size} bytes instead of {expected['bytes']}")


@contextmanager
def compared(folder: Path, files: Mapping[str, dict[str, Any]]) -> Iterator[None]:
    """`require_files`, whose threads compare the content while the block runs."""
    require_sizes(folder, files)
    pool, failure = ThreadPoolExecutor(_THREADS), None
    try:
        found = pool.map(lambda name: sha256_file(folder / name, _PIECE), files)
        try:
            yield
        except (ValueError, OSError) as error:  # a changed file may have caused it
            failure = error
        for digest, (name, expected) in zip(found, files.items(), strict=True):
            if digest != expected["sha256"]:
                raise Damage(f"{name} does not match its checksum")
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(cancel_futures=True)


def require_listed(folder: Path, found: Entries) -> None:
    """ValueError as for `checked`, from the entries ``found`` for the weights instead of reading them again."""
    weights = require_settings(folder)
    with _named(folder):
        for name, expected in weights.items():
            if found.get(name) != expected:
                raise Damage(f"{name} is missing" if name not in found else f"{name} does not match its checksum")


def write_sums(folder: Path) -> None:
    """Write the manifest that `checked` reads into a folder that is no checkpoint, such as an export."""
    (folder / SUMS_FILE).write_bytes(manifest_of(file_entries(folder.iterdir())))


def sums_line(folder: Path) -> str | None:
    """A note for the user that a model's folder has no checksums to compare its files to; None if it has them."""
    return None if (folder / SUMS_FILE).exists() else f"{folder} has no {SUMS_FILE}, so its files are used unchecked"


def require_settings(folder: Path) -> Entries:
    """Do as `checked` for all files but the weights, and return the manifest's entries of the weights."""
    if not (folder / SUMS_FILE).exists():
        return {}
    with _named(folder):
        files: Entries = read_manifest(folder / SUMS_FILE)["files"]
        require_files(folder, {name: entry for name, entry in files.items() if not name.endswith(_WEIGHTS)})
    read = {path.name for path in folder.iterdir() if path.suffix in _READ}
    for name in sorted(read - {*files, SUMS_FILE}):
        raise ValueError(f"{folder} is not to be trusted: {name} is not listed in {SUMS_FILE}; remove that file")
    return {name: entry for name, entry in files.items() if name.endswith(_WEIGHTS)}


@contextmanager
def checked(folder: Path) -> Iterator[None]:
    """Check an export while the block reads it. What the block read is right if this ends without an error.

    Threads compare the weights while the block reads them. A folder without checksums is not checked.

    Raises:
        ValueError: a file is missing or changed, or is of a kind that is read and not listed; the message names it.
    """
    weights = require_settings(folder)
    with _named(folder), compared(folder, weights):
        yield


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except Damage as damage:
        raise ValueError(
            f"{folder} is damaged: {damage}; export it again, or remove {SUMS_FILE} if you changed that file yourself"
        ) from None

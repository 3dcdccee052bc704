"""The file-system calls that a block makes, in order, of which one (or all from one on) fails or ends the process.

Python's own are seen one by one: the functions of ``os`` that open, change, sync or remove, and each write(2) and close
of a file that is open for writing. Native code writes by itself: a file of safetensors' is one call, `serialize_file`.
A sync is noted and not done: it would take most of the time, and what was written outlives the process anyway.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError

from tilemoe.cli.main import one_line

ALL = os.environ.get("TILEMOE_FAULTS") == "all"  # every fault, as `make faults` sets it; else a selection
KILLED = 77  # the exit code of a process that was ended at a call
# What may come of each call. "short": a part is written, and the caller told how much. "torn": a part, then ENOSPC.
ERRORS = {
    "open": ("EACCES", "ENOSPC", "EIO"),
    "write": ("ENOSPC", "EIO", "short", "torn"),
    "close": ("EIO",),
    "fsync": ("EIO", "ENOSPC"),
    "mkdir": ("EACCES", "ENOSPC", "EIO"),
    "rename": ("EACCES", "ENOSPC", "EIO"),
    "replace": ("EACCES", "ENOSPC", "EIO"),
    "link": ("EACCES", "ENOSPC", "EIO"),
    "symlink": ("EACCES", "ENOSPC", "EIO"),
    "chmod": ("EPERM", "EIO"),
    "truncate": ("EIO",),
    "ftruncate": ("EIO",),
    "unlink": ("EACCES", "EIO"),
    "remove": ("EACCES", "EIO"),
    "rmdir": ("EACCES", "EIO"),
    "flock": ("ENOLCK",),
    "serialize_file": ("ENOSPC", "EIO", "torn"),
}
GROWING = frozenset({"open", "write", "mkdir", "rename", "replace", "link", "symlink", "serialize_file"})
FAULTS = ("ENOSPC", "EIO", "EACCES", "EPERM", "ENOLCK", "short", "torn", "full", "gone", "kill", "torn kill")


@dataclass(frozen=True)
class Call:
    name: str
    path: str  # in the folder; "": the folder itself

    def fits(self, fault: str) -> bool:
        """Whether this fault can begin at this call: a full disk where something grows, a lost one anywhere."""
        if fault == "torn kill":
            return "torn" in ERRORS[self.name]
        if fault == "full":
            return self.name in GROWING
        return fault in ("gone", "kill") or fault in ERRORS[self.name]


@dataclass(frozen=True)
class Fault:
    """``kind`` happens at call ``number``; "full" (ENOSPC) and "gone" (EIO) to what follows, too."""

    kind: str
    number: int


class Calls:
    """What is done in ``folder``, and the fault that is due."""

    def __init__(self, folder: Path, fault: Fault | None) -> None:
        self.made: list[Call] = []
        self._folder, self._fault = f"{folder}{os.sep}", fault

    def relative(self, target: Any, dir_fd: int | None = None) -> str | None:
        """The path within the folder of a path or a descriptor; None: it is not there."""
        try:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fsdecode(target)
            above = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        except (OSError, TypeError):
            return None
        path = os.path.join(above, path, "")
        return path.removeprefix(self._folder).rstrip(os.sep) if path.startswith(self._folder) else None

    def call(self, name: str, path: str | None, do: Callable[[], Any], tear: Callable[[], Any] | None = None) -> Any:
        """Do it, or what the fault makes of it; ``tear`` does a part of it."""
        if path is None:
            return do()
        self.made.append(Call(name, path))
        fault, number = self._fault, len(self.made) - 1
        if fault is None or number < fault.number or (number > fault.number and fault.kind not in ("full", "gone")):
            return do()
        if fault.kind == "full":
            if name not in GROWING:
                return do()
            raise _error("ENOSPC", name, self._folder + path)
        if "kill" in fault.kind:
            if tear is not None and fault.kind == "torn kill":
                tear()
            os._exit(KILLED)
        if fault.kind in ("short", "torn"):
            assert tear is not None
            done = tear()
            if fault.kind == "short":
                return done
            raise _error("ENOSPC", name, self._folder + path)
        if name == "close":
            do()  # as the system does, whatever it then says
        raise _error("EIO" if fault.kind == "gone" else fault.kind, name, self._folder + path)


def _error(kind: str, name: str, path: str) -> Exception:
    """As the system's: a failed write, sync or close does not know its file's name."""
    number = getattr(errno, kind)
    if name == "serialize_file":
        return SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
    named = () if name in ("write", "close", "fsync", "flock", "truncate", "ftruncate") else (path,)
    return OSError(number, os.strerror(number), *named)


class _Raw(io.FileIO):
    """A file whose system calls are seen."""

    def __init__(self, calls: Calls, path: str, *arguments: Any, **options: Any) -> None:
        self._calls, self._path = calls, path
        super().__init__(*arguments, **options)

    def write(self, data: Any) -> int:
        half = memoryview(data).cast("B")[: (len(memoryview(data).cast("B")) + 1) // 2]
        real = super().write
        done: int = self._calls.call("write", self._path, lambda: real(data), lambda: real(half))
        return done

    def truncate(self, size: int | None = None) -> int:
        real = super().truncate
        left: int = self._calls.call("truncate", self._path, lambda: real(size))
        return left

    def close(self) -> None:
        if not self.closed:
            self._calls.call("close", self._path, super().close)


def _open(calls: Calls) -> Callable[..., Any]:
    real = io.open

    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
        closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        path = None if isinstance(file, int) else calls.relative(file)
        if path is None or not set(mode) & set("wxa+"):
            return calls.call(
                "open", path, lambda: real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            )
        kept = mode.replace("b", "").replace("t", "")
        raw = calls.call("open", path, lambda: _Raw(calls, path, file, kept, closefd, opener))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    return opened


@contextmanager
def watched(folder: Path, fault: Fault | None = None) -> Iterator[Calls]:
    """The calls that the block makes in ``folder``, with its fault."""
    calls = Calls(folder, fault)

    def seen(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(target: Any, *arguments: Any, **options: Any) -> Any:
            path = calls.relative(target, options.get("dir_fd", options.get("src_dir_fd")))
            sync = name == "fsync" and path is not None
            return calls.call(name, path, lambda: None if sync else real(target, *arguments, **options))

        return function

    def serialize(tensors: Any, file: Any, metadata: Any = None) -> None:
        def tear() -> None:
            real_serialize(tensors, file, metadata)
            truncate(file, os.path.getsize(file) // 2)

        calls.call("serialize_file", calls.relative(file), lambda: real_serialize(tensors, file, metadata), tear)

    real_serialize, truncate = safetensors.torch.serialize_file, os.truncate
    with pytest.MonkeyPatch.context() as patch:
        opened = _open(calls)
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        patch.setattr(safetensors.torch, "serialize_file", serialize)
        patch.setattr(fcntl, "flock", seen("flock", fcntl.flock))
        for name in ERRORS:
            if name not in ("write", "close", "flock", "serialize_file"):
                patch.setattr(os, name, seen(name, getattr(os, name)))
        yield calls


def complaint(error: BaseException, place: Path) -> str | None:
    """What is wrong with an error that the command line is to turn into one line that names a file; None: nothing."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return None  # of which the command line makes a line of its own
    if not isinstance(error, (ValueError, OSError)):
        return f"{type(error).__name__}: {error}"
    if "\n" in str(error) or str(place) not in one_line(error):
        return f"not one line with a path: {error}"
    return None

"""A verdict on code that may hang, crash or be wrong: a command tries the code once on each host; the result is kept.

The command's last line of output is a `Verdict` as JSON. Whatever it does, its process group is killed at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tilemoe.checks import parse_json
from tilemoe.files import default_cache_dir, only_one_process, read_text, write_atomic

_REAP_SECONDS = 10.0  # how long to wait for a killed process; one that waits for a hanging GPU may take long


@dataclass(frozen=True)
class Verdict:
    """``why``: what is wrong, in one line, or None. ``is_kept``: whether later processes use it without a new trial.

    A failure that says nothing about the code, such as too little memory, is not kept.
    """

    why: str | None
    is_kept: bool = True
    seconds: float = 0.0


def verdict_of(
    name: str,
    key: Mapping[str, str],
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    hindrance: str | None = None,
    again: bool = False,
) -> Verdict:
    """The verdict of ``command``, which has ``seconds`` to run; or the verdict that an earlier run on this host gave.

    It is kept in the cache folder under ``name`` and ``key``; ``again`` runs the command anyway. Of several processes
    the first runs it; the others wait at most twice its seconds. ``hindrance``: why it cannot be run, in a line.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = default_cache_dir() / "verdicts" / f"{name}-{digest}.json"
    found = None if again else _kept(path)
    if found is not None:
        return found
    if hindrance is not None:
        return Verdict(hindrance, is_kept=False)
    try:
        with only_one_process(path, 2 * seconds):
            found = None if again else _kept(path)
            if found is None:
                found = _tried(command, environment, seconds)
                if found.is_kept:
                    write_atomic(path, json.dumps({**asdict(found), "key": dict(key)}, indent=1).encode())
    except TimeoutError as error:
        return Verdict(f"{path}: {error}", is_kept=False)
    except OSError as error:
        return Verdict(f"{path} cannot be written ({error}); set TILEMOE_CACHE to a folder that can", is_kept=False)
    return found


def _kept(path: Path) -> Verdict | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # no file, or a damaged one, which will be replaced
        return _verdict(read_text(path))
    return None


def _verdict(text: str) -> Verdict:
    """The verdict in ``text``. ValueError, KeyError or TypeError: the text is not a verdict's JSON."""
    fields = parse_json(text)
    why, is_kept = fields["why"], fields["is_kept"]
    if not isinstance(why, str | None) or not isinstance(is_kept, bool):
        raise TypeError("a verdict is a line or null, and whether it is kept")
    return Verdict(why, is_kept, float(fields["seconds"]))


def _tried(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Verdict:
    """Run the command in its own session, which is killed when the command ends, at the time limit, or on Ctrl-C."""
    start, out, err = time.perf_counter(), "", ""
    process = subprocess.Popen(
        command,
        env={**environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Verdict(f"it did not end within {seconds:g} s and was killed", seconds=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_REAP_SECONDS)
    took = round(time.perf_counter() - start, 1)
    with suppress(IndexError, ValueError, KeyError, TypeError):
        return replace(_verdict(out.splitlines()[-1]), seconds=took)
    last = (err.strip().splitlines() or ["it printed nothing"])[-1][:300]
    if process.returncode < 0:
        return Verdict(f"it ended by {signal.Signals(-process.returncode).name}: {last}", seconds=took)
    return Verdict(f"it ended with status {process.returncode}: {last}", is_kept=False, seconds=took)

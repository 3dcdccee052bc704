"""Copies of this process: each has imported everything, so it is at work in a moment."""

from __future__ import annotations

import faulthandler
import gc
import io
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class Copy:
    """A copy of this process that does ``work``, as what `subprocess.Popen` gives.

    Its exit code is what ``work`` returns, 0 for None, 1 where it raised; below 0: a signal's.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _do_and_exit(work)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a copy", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """It hangs: its stacks, and those of the processes below it, go to their standard error."""
        _print_stacks(self.pid)
        os.kill(self.pid, signal.SIGKILL)

    def finish(self, timeout: float) -> int:
        """`wait`, which ends the process at the time-out."""
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()


def _do_and_exit(work: Callable[[], object]) -> NoReturn:
    code: Any = 1
    try:
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2)
        )
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()  # what it inherited may wait for its threads, which are not here: a process group's destructor does
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        code = work() or 0
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_stacks(process: int) -> None:
    """To its standard error: where it and each process below it hangs."""
    for child in children(process):
        _print_stacks(child)
    os.kill(process, signal.SIGUSR1)
    time.sleep(0.1)  # one after the other


def children(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]

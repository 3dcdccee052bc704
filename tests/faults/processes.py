"""Runs of one process, or of torchrun's several, of which one gets a signal exactly when it comes to a stage.

Each process is a copy of this one, which has imported everything, so that a run takes a second or two: where torchrun's
agent would start interpreters it starts copies, too. All else is torchrun's own.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tilemoe.cli.main import main
from tilemoe.train.loop import Trainer

PATIENCE = 90.0  # seconds that a run may take
GRACE = 4.0  # seconds that torchrun's agent gives a process to end, here; 30 by itself
PAUSE = 0.3  # seconds after which a process that was stopped goes on, if it does
_SUBREAPER = 36  # of prctl(2): orphans become this process' children

# Where a process is in each stage, and after how many of four steps: functions, of which a run calls one or more.
STAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "start": (0, ("cli.train:_run",)),
    "data": (0, ("train.run:prepare_data",)),
    "setup": (0, ("train.run:_fit",)),
    "checkpoint": (2, ("train.checkpoints.folder:file_entries", "train.checkpoints.distributed:file_entries")),
    "forward": (2, ("models.decoder:DecoderLM.forward",)),
    "dispatch": (2, ("dispatch.base:LocalDispatcher.dispatch", "dispatch.all_to_all:AllToAllDispatcher.dispatch")),
    "backward": (2, ("ops.experts:down_proj_dgrad_dact",)),
    "update": (2, ("train.loop:Trainer._require_finite",)),
    "evaluation": (3, ("train.evaluate:device_batch",)),
    "shutdown": (4, ("train.run:_finish",)),
    "exit": (4, ("train.run:train",)),  # when it returns
}


@dataclass(frozen=True)
class Fault:
    """``rank`` gets a signal when it first comes to ``stage``; then the file ``reached`` has its process id.

    lasts: a process that was stopped stays so; else it goes on after `PAUSE`.
    """

    stage: str
    number: signal.Signals
    rank: int
    reached: Path
    lasts: bool = False


@dataclass(frozen=True)
class Ended:
    """A run's exit code (below 0: a signal's; None: it hung), what it printed, the processes that it left behind."""

    code: int | None
    left: list[str]
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("tilemoe: error: ")]


class Copy:
    """A copy of this process that does ``work``, as what `subprocess.Popen` gives."""

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


def _do_and_exit(work: Callable[[], object]) -> NoReturn:
    code: Any = 1
    try:
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2)
        )
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = work() or 0
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(arguments: Sequence[object], processes: int, restarts: int | None, fault: Fault | None, folder: Path) -> Ended:
    """``tilemoe`` with these arguments, by torchrun unless ``restarts`` is None; ``folder`` is for what it prints."""
    out, err, ended = folder / "out", folder / "err", folder / "ended"

    def command() -> int:
        is_hit = fault is not None and int(os.environ.get("RANK", 0)) == fault.rank
        with planted(fault) if fault is not None and is_hit else nullcontext():
            return main([*map(str, arguments)])

    def watched() -> None:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC), number)
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        copy = Copy(command if restarts is None else lambda: torchrun(command, processes, restarts))
        code = _until_it_ends(copy, fault)
        ended.write_text(json.dumps([code, [*_orphans()]]))

    Copy(watched).wait(2 * PATIENCE)
    return Ended(*json.loads(ended.read_text()), out.read_text(), err.read_text())


def _until_it_ends(copy: Copy, fault: Fault | None) -> int | None:
    deadline = time.monotonic() + PATIENCE
    is_stopped = fault is not None and fault.number == signal.SIGSTOP and not fault.lasts
    while time.monotonic() < deadline:
        if is_stopped and fault is not None and fault.reached.exists():
            time.sleep(PAUSE)
            os.kill(int(fault.reached.read_text()), signal.SIGCONT)
            is_stopped = False
        try:
            return copy.wait(0.05)
        except subprocess.TimeoutExpired:
            pass
    os.kill(copy.pid, signal.SIGKILL)
    return None


def _orphans() -> Iterator[str]:
    """What still runs a moment after its parent has ended; it is ended."""
    deadline = time.monotonic() + GRACE
    while True:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not found and time.monotonic() > deadline:
            break
        time.sleep(0 if found else 0.01)
    for child in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        yield Path("/proc", child, "cmdline").read_text()
        os.kill(int(child), signal.SIGKILL)


def torchrun(command: Callable[[], object], processes: int, restarts: int) -> int:
    """As ``torchrun --nproc-per-node PROCESSES --max-restarts RESTARTS``, of copies of this process."""

    def popen(handler: SubprocessHandler, arguments: Sequence[str], environment: dict[str, str]) -> Copy:
        def work() -> object:
            os.environ.update(environment)
            return command()

        copy = Copy(work)
        os.setpgid(copy.pid, copy.pid)  # the agent signals its group
        return copy

    close = SubprocessContext._close
    config = LaunchConfig(
        1, 1, processes, run_id="faults", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=restarts,
        monitor_interval=0.05,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SubprocessHandler, "_popen", popen)
        patch.setattr(SubprocessContext, "_close", lambda context, death_sig, timeout: close(context, death_sig, GRACE))
        try:
            elastic_launch(config, "a copy")()
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Within the block this process gets the fault's signal where it is due, once."""
    trainers: list[Trainer] = []
    steps, places = STAGES[fault.stage]

    def hit() -> None:
        if (trainers[-1].step if trainers else 0) >= steps and not fault.reached.exists():
            fault.reached.write_text(str(os.getpid()))
            os.kill(os.getpid(), fault.number)

    def seen(real: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            if fault.stage == "exit":
                result = real(*arguments, **options)
                hit()
                return result
            hit()
            return real(*arguments, **options)

        return function

    def noted(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        trainers.append(trainer)
        real_init(trainer, *arguments, **options)

    real_init = Trainer.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "__init__", noted)
        for place in places:
            owner, name = place_of(place)
            patch.setattr(owner, name, seen(getattr(owner, name)))
        yield


def place_of(place: str) -> tuple[Any, str]:
    """Module or class and attribute of what "module:Class.name" means, below tilemoe."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"tilemoe.{module}")
    for attribute in owners:
        owner = getattr(owner, attribute)
    return owner, name

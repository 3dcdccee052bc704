"""Runs of one process, or of torchrun's several, to one of which something happens exactly when it comes to a stage.

Each process is a copy of this one, which has imported everything, so that a run takes a second or two: where torchrun's
agent would start interpreters it starts copies, too. All else is torchrun's own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from copies import Copy, children
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from writes import end_of_run, little

from tilemoe.cli.main import main
from tilemoe.config import ParallelConfig, to_dict
from tilemoe.data import load_tokenizer
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import save_hf
from tilemoe.train.checkpoints.initial import adopt
from tilemoe.train.config import LoRAConfig, Recipe
from tilemoe.train.loop import Trainer

STEPS = 4  # of a run
TIMEOUT_S = 4  # train.timeout where a process stays stopped, else as long as the run may take
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
    "backward": (2, ("ops.experts:down_proj_dgrad_dact", "kernels.experts.base:Backend.dact")),
    "update": (2, ("train.loop:Trainer._require_finite",)),
    "evaluation": (3, ("train.evaluate:device_batch",)),
    "shutdown": (4, ("train.run:_finish",)),
    "exit": (4, ("train.run:train",)),  # when it returns
}


class Fault(Protocol):
    """Something that happens to process ``rank`` of a run, within the block that ``planted`` gives."""

    @property
    def rank(self) -> int: ...

    def planted(self) -> AbstractContextManager[object]: ...


@dataclass(frozen=True)
class Signal:
    """``rank`` gets a signal when it first comes to ``stage``; then the file ``reached`` has its process id.

    lasts: a process that was stopped stays so; else it goes on after `PAUSE`.
    """

    stage: str
    number: signal.Signals
    rank: int
    reached: Path
    lasts: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        trainers: list[Trainer] = []
        steps, places = STAGES[self.stage]

        def hit() -> None:
            if (trainers[-1].step if trainers else 0) >= steps and not self.reached.exists():
                self.reached.write_text(str(os.getpid()))
                os.kill(os.getpid(), self.number)

        def seen(real: Callable[..., Any]) -> Callable[..., Any]:
            def function(*arguments: Any, **options: Any) -> Any:
                if self.stage == "exit":
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


def four_steps(corpus: Path, trained: str = "text") -> Recipe:
    """A run of so many, with a checkpoint after every other; ``trained``: one of `TRAINED`."""
    base = TRAINED[trained](little("bytes", corpus))
    settings = replace(
        base.train, steps=STEPS, save_every=2, keep_last=2, log_every=1, eval_every=3, eval_batches=4, plot=False,
        tensorboard=False, sample_tokens=0, precision="fp32", device="cpu", threads=1,
    )  # fmt: skip
    return replace(base, data=replace(base.data, heldout_every=40), train=settings)


def _by_muon(base: Recipe) -> Recipe:
    return replace(base, optim=replace(base.optim, name="muon"))


def _on_a_base(base: Recipe) -> Recipe:
    """Of the model that is written beside the corpus, as of transformers."""
    folder = Path(base.data.corpus).parent / f"base of {base.model.max_seq_len}"
    model = DecoderLM(base.model)
    model.reset_parameters(torch.Generator().manual_seed(8))
    save_hf(model, folder)
    load_tokenizer("bytes").save(folder / "tokenizer.json")
    return adopt(base, folder)


def _on_conversations(base: Recipe) -> Recipe:
    """Prompts and turns of different lengths, of which several share a sequence; it begins from a base."""
    chats = Path(base.data.corpus).parent / "chats.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "ask" * (i % 3 + 1), "completion": "a" * (i % 7 + 1)} for i in range(30)]
    roles = ("user", "assistant") * 2
    rows += [{"messages": [{"role": role, "content": "b" * (i % 4 + 1)} for role in roles]} for i in range(90)]
    chats.write_text("\n".join(map(json.dumps, rows)))
    base = replace(base, model=replace(base.model, max_seq_len=64))
    return _on_a_base(replace(base, data=replace(base.data, corpus=str(chats), format="chat", seq_len=64)))


def _adapters(base: Recipe) -> Recipe:
    return replace(_on_a_base(base), lora=LoRAConfig(rank=3))


# What a run trains, and how.
TRAINED: dict[str, Callable[[Recipe], Recipe]] = {
    "text": lambda base: base, "muon": _by_muon, "conversations": _on_conversations, "adapters": _adapters,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A folder of a run, and its command."""

    folder: Path
    recipe: Recipe

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def command(self, processes: int, timeout: int) -> list[str]:
        settings = replace(self.recipe.train, out_dir=str(self.run), timeout=timeout)
        data = replace(self.recipe.data, batch_size=4 // processes, cache_dir=str(self.folder / "cache"))
        parallel = ParallelConfig(expert=min(processes, 2))
        path = self.folder / "recipe.json"
        path.write_text(json.dumps(to_dict(replace(self.recipe, train=settings, data=data, parallel=parallel))))
        tokenizer = Path(self.recipe.data.tokenizer)  # that of its base, if the run begins from one
        base = ["--init-from", str(tokenizer.parent)] if tokenizer.suffix else []
        return ["train", "--recipe", str(path), "--resume", "auto", *base]

    def go(self, processes: int, restarts: int | None, fault: Fault | None = None) -> Ended:
        timeout = TIMEOUT_S if isinstance(fault, Signal) and fault.lasts else 60
        return run(self.command(processes, timeout), processes, restarts, fault, self.folder)

    def end(self) -> Any:
        return end_of_run(self.run, self.folder / "cache")


def run(arguments: Sequence[object], processes: int, restarts: int | None, fault: Fault | None, folder: Path) -> Ended:
    """``tilemoe`` with these arguments, by torchrun unless ``restarts`` is None; ``folder`` is for what it prints."""
    out, err, ended = folder / "out", folder / "err", folder / "ended"

    def command() -> int:
        is_hit = fault is not None and int(os.environ.get("RANK", 0)) == fault.rank
        with fault.planted() if fault is not None and is_hit else nullcontext():
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
    is_stopped = isinstance(fault, Signal) and fault.number == signal.SIGSTOP and not fault.lasts
    while time.monotonic() < deadline:
        if is_stopped and isinstance(fault, Signal) and fault.reached.exists():
            time.sleep(PAUSE)
            os.kill(int(fault.reached.read_text()), signal.SIGCONT)
            is_stopped = False
        try:
            return copy.wait(0.05)
        except subprocess.TimeoutExpired:
            pass
    copy.kill()
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
    for child in children(os.getpid()):
        yield Path("/proc", str(child), "cmdline").read_text()
        os.kill(child, signal.SIGKILL)


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


def place_of(place: str) -> tuple[Any, str]:
    """Module or class and attribute of what "module:Class.name" means, below tilemoe."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"tilemoe.{module}")
    for attribute in owners:
        owner = getattr(owner, attribute)
    return owner, name

"""What a run shows: a live bar on a terminal, plain lines elsewhere (logs, pipes); and the time of its phases."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from tilemoe.train.job.processes import ALONE, Job


@dataclass(frozen=True)
class StepStats:
    """One optimiser step, as shown and as recorded."""

    step: int  # steps done, this one included
    tokens: int  # training tokens so far
    nats_per_token: float  # the cross-entropy loss
    aux_loss: float
    lr: float
    grad_norm: float
    expert_load: list[float]  # per MoE layer: tokens of the busiest expert / mean; empty for a dense model
    expert_load_p95: list[float]  # per MoE layer: 95th percentile of tokens per expert / mean
    dead_experts: list[float]  # per MoE layer: experts without a token in this step
    dropped_pairs: list[float]  # per MoE layer: pairs that token rounding dropped / pairs of top-K
    added_pairs: list[float]  # per MoE layer: pairs that token rounding added / pairs of top-K
    tile_waste: list[float]  # per MoE layer: rows of padding to whole tiles / rows
    router_entropy: list[float]  # per MoE layer: entropy of router probabilities / log(experts), mean over tokens
    rank_load: list[float]  # per MoE layer: rows of the busiest process that shares its experts / mean
    _: KW_ONLY
    capacity: int | None = None  # the most rows of a layer that a process can have room for; None: any number
    most_rows: int | None = None  # most rows that a process received, over layers and micro-batches; None likewise
    repeats: int = 0  # repeats in this run so far, because rows did not fit


@dataclass(frozen=True)
class Speed:
    """The speed of training, smoothed over steps.

    tokens_per_second   of all processes together
    processes           of the job, each with its own GPU if it trains on GPUs
    mfu                 model FLOPs utilisation: FLOP per token (`flops_per_token`: recomputation does not count)
                        x tokens_per_second / processes / the GPU's dense peak; None if one of them is unknown
    """

    tokens_per_second: float
    processes: int = 1
    mfu: float | None = None

    def __str__(self) -> str:
        text = f"{_thousands(self.tokens_per_second)} tokens/s"
        if self.processes > 1:
            text += f" ({_thousands(self.tokens_per_second / self.processes)} in each of {self.processes} processes)"
        return text if self.mfu is None else f"{text}  MFU {self.mfu:.1%}"


def summary(stats: StepStats, speed: Speed) -> str:
    """The most important numbers in one line: loss, speed, the worst layer's expert load, the mean padding."""
    text = f"loss {stats.nats_per_token:.4f} nats/token  {speed}"
    if stats.expert_load:
        waste = sum(stats.tile_waste) / len(stats.tile_waste)
        text += f"  load {max(stats.expert_load):.2f}x  pad {waste:.1%}"
    return text


def duration(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _thousands(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k"


class Phases:
    """Seconds of a run's phases in one process; each phase begins where the one before has ended."""

    def __init__(self, seconds_ago: float = 0.0) -> None:
        """``seconds_ago``: when the first phase began."""
        self.seconds: dict[str, float] = {}
        self._ended = time.perf_counter() - seconds_ago

    @classmethod
    def since_command(cls) -> Phases:
        """Phases that begin with this process, or with torchrun, which then is the first phase. Without /proc they
        begin now.
        """
        own, launcher = _age("self"), _age(os.getppid()) if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" else 0.0
        phases = cls(own)
        if launcher:
            phases.seconds["torchrun"] = launcher - own
        return phases

    def end(self, name: str) -> float:
        """Add the time since the last call to phase ``name``, and return that time in seconds."""
        now = time.perf_counter()
        lasted, self._ended = now - self._ended, now
        self.seconds[name] = self.seconds.get(name, 0.0) + lasted
        return lasted

    def rounded(self) -> dict[str, float]:
        return {name: round(seconds, 3) for name, seconds in self.seconds.items()}

    def __str__(self) -> str:
        told = [f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if seconds >= 0.05]
        return f"{', '.join(told)}; together {sum(self.seconds.values()):.1f} s"


def _age(process: int | str) -> float:
    """Seconds since a process was started; 0.0 where that is not known."""
    try:
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]  # field 22: ticks since boot
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


class Reporter:
    """Prints what happens in the loop, with one line per ``log_every`` steps.

    stream: None: print nothing, as in a job's processes other than rank 0.
    """

    def __init__(self, stream: TextIO | None, log_every: int) -> None:
        self._stream, self._log_every, self._steps = stream, log_every, 0

    def start(self, step: int, steps: int) -> None:
        self._steps = steps

    def update(self, stats: StepStats, speed: Speed, seconds_left: float) -> None:
        if stats.step % self._log_every == 0 or stats.step == self._steps:
            self.say(f"step {stats.step}/{self._steps}  {summary(stats, speed)}  eta {duration(seconds_left)}")

    def say(self, line: str) -> None:
        if self._stream is not None:
            print(line, file=self._stream, flush=True)

    def stop(self) -> None:
        pass


class TerminalReporter(Reporter):
    """A rich progress bar; other lines scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._bar = Progress(  # on a narrow terminal the bar shrinks first
            TextColumn("{task.description}"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[summary]}", markup=False),
            BarColumn(),
            console=self._console,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("step", total=None, summary="")

    def start(self, step: int, steps: int) -> None:
        self._bar.update(self._task, total=steps, completed=step)
        self._bar.start()

    def update(self, stats: StepStats, speed: Speed, seconds_left: float) -> None:
        self._bar.update(self._task, completed=stats.step, summary=summary(stats, speed))

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()


def make_reporter(log_every: int, job: Job = ALONE) -> Reporter:
    """The reporter for this standard output and this process' rank."""
    if job.is_first and sys.stdout.isatty():
        return TerminalReporter(sys.stdout)
    return Reporter(sys.stdout if job.is_first else None, log_every)

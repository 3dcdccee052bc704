"""Train, evaluate, save and generate in one process for a long time, and see whether anything of it grows.

    python benchmarks/soak.py [--minutes 10] [--device cpu]

A round trains steps of each of three shapes in turn, evaluates, saves and generates; after it memory, the host's time
for a step, open files, threads and what caches hold are measured. A line is fitted to each but for a warm-up. Exits
with 1 where one grows by more than 0.1% per 1,000 steps, its uncertainty apart. Recorded in results/soak.jsonl; what is
interrupted, by SIGTERM too, after nine rounds or more.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_tests import interrupt_once

from tilemoe.bench.record import append
from tilemoe.runtime.launch_cache import LaunchCache
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe, load_recipe
from tilemoe.train.datasets import make_sampler, prepare_data
from tilemoe.train.evaluate import evaluate
from tilemoe.train.loop import Trainer
from tilemoe.train.sample import continue_text

BOUND = 1e-3  # of growth per 1,000 steps
WARM_UP = 1 / 3  # of the rounds, which are left out
ROUNDS = 9  # at least, of which six are judged
STEPS = 20  # of each shape in a round
SHAPES = ((8, 32), (3, 128), (16, 16))  # (sequences, tokens of each)


@dataclass(frozen=True)
class Growth:
    """By what part of its mean a quantity grows per 1,000 steps, and the standard error of that."""

    per_1000: float
    error: float

    @property
    def is_bounded(self) -> bool:
        """Whether the fit allows that it grows by no more than `BOUND`."""
        return self.per_1000 - 2 * self.error <= BOUND


def growth(steps: list[int], values: list[float]) -> Growth:
    """Of the line of least squares through the values after the warm-up; at least three of them."""
    kept = slice(int(WARM_UP * len(steps)), None)
    x, y = (torch.tensor(column[kept], dtype=torch.float64) for column in (steps, values))
    x, mean = x - x.mean(), y.mean()
    slope = (x * y).sum() / x.square().sum()
    left = y - mean - slope * x
    error = (left.square().sum() / (len(y) - 2) / x.square().sum()).sqrt()
    scale = 1000 / mean.abs().clamp(min=1e-9)
    return Growth(float(slope * scale), float(error * scale))


def measured(device: torch.device) -> dict[str, float]:
    """What a process could have more and more of."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    gc.collect()
    objects = gc.get_objects()
    found = {
        "resident_mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "open_files": len([*Path("/proc/self/fd").iterdir()]),
        "objects": len(objects),
        "kept_launches": sum(len(o.known) for o in objects if type(o) is LaunchCache),
        "cached_calls": sum(o.cache_info().currsize for o in objects if type(o) is functools._lru_cache_wrapper),
    }
    if device.type == "cuda":
        found["gpu_mib"] = torch.cuda.memory_allocated(device) / 2**20
        found["reserved_gpu_mib"] = torch.cuda.memory_reserved(device) / 2**20
    return found


class Soak:
    """The run: a small model of the recipe "smoke" on Python's standard library, in ``folder``."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        base = load_recipe("smoke")
        settings = replace(base.train, out_dir=str(folder / "run"), keep_last=2, precision="fp32", steps=1 << 40)
        base = replace(base, train=settings, data=replace(base.data, cache_dir=str(folder / "cache")))
        if device.type == "cuda":  # widths that its kernels take
            moe = replace(base.model.moe, hidden_size=128, intermediate_size=64)
            base = replace(
                base, model=replace(base.model, hidden_size=128, moe=moe), train=replace(settings, precision="bf16")
            )
        self.recipes = [self._with_shape(base, *shape) for shape in SHAPES]
        data = prepare_data(base.data, base.data.tokenizer)
        self.trainer = Trainer(base, build_model(base, device), data, device)
        self.samplers = [make_sampler(data, recipe.data, 0, self.trainer.job) for recipe in self.recipes]

    @staticmethod
    def _with_shape(recipe: Recipe, batch_size: int, seq_len: int) -> Recipe:
        return replace(recipe, data=replace(recipe.data, batch_size=batch_size, seq_len=seq_len))

    def round(self) -> float:
        """Do it all once; the median of the host's milliseconds for a step."""
        trainer, seconds = self.trainer, []
        for _, (recipe, sampler) in itertools.product(range(STEPS), zip(self.recipes, self.samplers, strict=True)):
            trainer.recipe, trainer.sampler = recipe, sampler
            begun = time.process_time()
            trainer.train_step()
            seconds.append(time.process_time() - begun)
        data = trainer.recipe.data
        evaluate(
            trainer.model, trainer.data.heldout, seq_len=data.seq_len, batch_size=data.batch_size,
            device=trainer.device, autocast=trainer.autocast, max_batches=4,
        )  # fmt: skip
        trainer.save()
        settings: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "seed": trainer.step}
        continue_text(trainer.model, trainer.data.tokenizer, "def ", 16, **settings)
        return 1e3 * sorted(seconds)[len(seconds) // 2]


def soak(device: torch.device, minutes: float) -> dict[str, Any]:
    """Rounds for so long, at least `ROUNDS`, or until it is interrupted; the row to record."""
    steps: list[int] = []
    values: dict[str, list[float]] = {}
    begun, unfinished = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = Soak(device, Path(folder))
            while len(steps) < ROUNDS or time.monotonic() < begun + 60 * minutes:
                found = {"step_ms": run.round(), **measured(device)}
                for name, value in found.items():
                    values.setdefault(name, []).append(value)
                steps.append(run.trainer.step)
        except KeyboardInterrupt:
            unfinished["unfinished"] = f"interrupted after {(time.monotonic() - begun) / 60:.1f} minutes"
    if len(steps) < ROUNDS:
        raise SystemExit(f"interrupted after {len(steps)} of at least {ROUNDS} rounds: nothing is recorded")
    fits = {name: growth(steps, column[: len(steps)]) for name, column in values.items()}
    return {
        "device": device.type,
        "minutes": minutes,
        "rounds": len(steps),
        "steps": steps[-1],
        "last": {name: round(column[-1], 3) for name, column in values.items()},
        "growth_per_1000_steps": {name: round(fit.per_1000, 6) for name, fit in fits.items()},
        "standard_error": {name: round(fit.error, 6) for name, fit in fits.items()},
        "growing": [name for name, fit in fits.items() if not fit.is_bounded],
        **unfinished,
    }


def sleep_while_waiting() -> None:
    """Let the host sleep while it waits for the GPU, before PyTorch makes its context: spinning would count as the
    host's time, and a GPU that others share makes it spin for longer.
    """
    cuda, device, blocking_sync = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), 4  # CU_CTX_SCHED_BLOCKING_SYNC
    for status in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxSetFlags_v2(device, blocking_sync),
    ):
        assert status == 0, f"CUDA error {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    interrupt_once()
    if arguments.device == "cuda":
        sleep_while_waiting()
    row = soak(torch.device(arguments.device), arguments.minutes)
    print(f"{row}\nrecorded in {append('soak', [row])}")
    return 1 if row["growing"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Whether a job of several processes trains as one process does, and goes on after a kill as if nothing had been.

    python benchmarks/train_agreement.py losses --processes 2
    python benchmarks/train_agreement.py kill --processes 2

``losses``: the recipe on one process and on several, which read the same text in each step; the greatest difference of
their losses must stay below --limit nats/token. ``kill``: one process is killed (signal 9) in a step, and
torchrun starts the job again; every step's loss must be that of a job that went through, to the last bit, with
PyTorch's deterministic algorithms. Both append a row to results/train_agreement.jsonl before they judge it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tilemoe.bench import record
from tilemoe.config import ParallelConfig, to_dict
from tilemoe.train.config import Recipe, load_recipe
from tilemoe.train.metrics import METRICS_FILE, read_metrics

NAME = "train_agreement"
RECIPE = Path(__file__).with_name("agreement.json")
HELDOUT_EVERY = 1000  # a run evaluates at its end, which is not what is looked at here


def losses(args: argparse.Namespace, folder: Path) -> None:
    """SystemExit: they differ by more than ``args.limit``."""
    runs = [train(args, folder / str(count), count, ["-m", "tilemoe"]) for count in (1, args.processes)]
    report(args, "losses", *runs, limit=args.limit)


def kill(args: argparse.Namespace, folder: Path) -> None:
    """SystemExit: the job did not go on, or not as the other."""
    program = [str(Path(__file__).resolve()), "process"]
    never, marker = folder / "never", folder / "killed"
    never.touch()
    options = ["--kill-in-step", str(args.kill_in_step)]
    whole = train(args, folder / "whole", args.processes, [*program, *options, "--marker", str(never)])
    begun = [*program, *options, "--marker", str(marker)]
    killed = train(args, folder / "killed-run", args.processes, begun, restarts=1)
    if not marker.exists():
        raise SystemExit("nobody was killed: --kill-in-step must lie within --steps")
    report(args, "kill", whole, killed, limit=0.0, kill_in_step=args.kill_in_step, save_every=args.save_every)


def report(args: argparse.Namespace, mode: str, one: Run, other: Run, *, limit: float, **more: Any) -> None:
    pairs = zip(one.losses, other.losses, strict=True)
    differences = [abs(a - b) for a, b in pairs]
    greatest = max(differences)
    row = {
        "mode": mode,
        "recipe": Path(args.recipe).stem,
        "precision": args.precision,
        "processes": args.processes,
        "expert": args.expert,
        "steps": len(differences),
        "greatest_difference": greatest,
        "in_step": differences.index(greatest) + 1,
        "last_losses": [one.losses[-1], other.losses[-1]],
        "seconds": [round(run.seconds, 1) for run in (one, other)],
        **more,
    }
    print(row, flush=True)
    record.append(NAME, [row])
    if not greatest <= limit:
        raise SystemExit(f"{mode}: the losses differ by {greatest} in step {row['in_step']}, allowed is {limit}")


class Run:
    """What a finished job has left."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.seconds = seconds
        records = read_metrics(folder / METRICS_FILE)
        self.losses: list[float] = [found["nats_per_token"] for found in records if found["kind"] == "train"]


def train(args: argparse.Namespace, folder: Path, processes: int, program: list[str], restarts: int = 0) -> Run:
    """The recipe by ``processes``, one alone without torchrun. SystemExit: it failed."""
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(to_dict(recipe_of(args, processes, folder))))
    launcher: list[str] = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    command = [sys.executable, *launcher, *program, "train", "--recipe", str(path), "--resume", "auto"]
    begun = time.perf_counter()
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"the job of {processes} processes failed, see above")
    return Run(folder, time.perf_counter() - begun)


def recipe_of(args: argparse.Namespace, processes: int, folder: Path) -> Recipe:
    """With the same sequences in every step, however many processes share them. SystemExit: they cannot."""
    recipe = load_recipe(args.recipe)
    batch, rest = divmod(recipe.data.batch_size, processes)
    if rest:
        raise SystemExit(f"{processes} processes cannot share {recipe.data.batch_size} sequences of {args.recipe}")
    changes = {"steps": args.steps, "precision": args.precision, "device": args.device, "log_every": 1}
    changes |= {"eval_every": 0, "save_every": args.save_every, "plot": False, "sample_tokens": 0, "tensorboard": False}
    settings = replace(recipe.train, out_dir=str(folder), **changes)
    parallel = ParallelConfig(expert=args.expert if processes > 1 else 1)
    data = replace(recipe.data, batch_size=batch, heldout_every=HELDOUT_EVERY)
    return replace(recipe, data=data, train=settings, parallel=parallel)


def process(args: argparse.Namespace, arguments: list[str]) -> int:
    """One process of a job for ``kill``; rank 1 dies once, with a step's gradients computed and not yet used."""
    import torch

    from tilemoe.cli.main import main as tilemoe_main
    from tilemoe.train.loop import Trainer

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)  # with warn_only, attention's backward would not be
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    real = Trainer._accumulate

    def hurt(trainer: Trainer) -> Any:
        found = real(trainer)
        if trainer.step + 1 == args.kill_in_step and trainer.job.rank == 1 and not args.marker.exists():
            args.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Trainer._accumulate = hurt  # type: ignore[method-assign]
    return tilemoe_main(arguments)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    for name, steps in (("losses", 200), ("kill", 30)):
        part = what.add_parser(name)
        part.add_argument("--recipe", default=str(RECIPE), help="name, or path of a .json")
        part.add_argument("--processes", type=int, default=2)
        part.add_argument("--expert", type=int, default=1, help="processes that divide the experts")
        part.add_argument("--steps", type=int, default=steps)
        part.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
        part.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
        part.add_argument("--save-every", type=int, default=0 if name == "losses" else 10)
    what.choices["losses"].add_argument("--limit", type=float, default=0.01, help="nats/token")
    what.choices["kill"].add_argument("--kill-in-step", type=int, default=25)
    one = what.add_parser("process", help="for kill itself; what follows is tilemoe's")
    one.add_argument("--kill-in-step", type=int, required=True)
    one.add_argument("--marker", type=Path, required=True)
    args, more = parser.parse_known_args(arguments)
    if args.what == "process":
        sys.exit(process(args, more))
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    with tempfile.TemporaryDirectory() as folder:
        {"losses": losses, "kill": kill}[args.what](args, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

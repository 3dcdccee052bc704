"""Jobs of `tilemoe train`: their phases, a disturbed one, two recipes; results/cold.jsonl, soak.jsonl and tiny.jsonl.

    python benchmarks/jobs.py startup --processes 1,4 -- --recipe 1b --train.steps 12 --train.save-every 4
    python benchmarks/jobs.py soak --processes 4 -- --recipe cpu-4 --train.steps 600 --train.save-every 50
    python benchmarks/jobs.py tiny --seeds 0,1,2

startup: a run with empty caches of compiled kernels, one with warm ones, and one that goes on with it for as many
steps; a row has the seconds to the end of the first step, those after the last one, and every phase of rank 0.
soak: a run of all steps, and one of which a rank is killed at a third (torchrun starts it again) and which goes on
with half the processes from two thirds on; a row has the losses of both.
tiny: the recipe against its dense twin: equal FLOPs per token, as many tokens; each with its own settings.
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
from pathlib import Path
from typing import Any

from tilemoe.bench import record
from tilemoe.train.checkpoints.names import list_checkpoints
from tilemoe.train.metrics import read_metrics

BEFORE = ("torchrun", "imports", "checks", "data", "processes", "weights", "folder", "reading the checkpoint")
KEPT = ("heldout_nats_per_byte", "heldout_tokens", "training_tokens", "parameters", "flops_per_token")
Row = dict[str, Any]


def command(processes: int, options: list[str], *more: object) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--max-restarts", "1"]
    return [sys.executable, *(torchrun if processes > 1 else []), "-m", "tilemoe", "train", *options, *map(str, more)]


def timed(processes: int, options: list[str], run_dir: Path, environment: dict[str, str], *more: object) -> Row:
    """Run it to its end. Seconds by the phases of rank 0, and of what follows them until the command is done."""
    begun = time.perf_counter()
    given = command(processes, options, "--train.out-dir", run_dir, *more)
    subprocess.run(given, check=True, cwd=record.ROOT, env=os.environ | environment)
    wall = time.perf_counter() - begun
    result = json.loads((run_dir / "result.json").read_bytes())
    phases = result["phases"][0]
    phases["exit"] = round(wall - sum(phases.values()), 3)
    first = sum(phases.get(name, 0.0) for name in (*BEFORE, "first step"))
    return {
        "mode": "startup",
        "processes": processes,
        "options": options,
        "seconds": round(wall, 3),
        "first_step_done": round(first, 3),
        "phases": phases,
        "seconds_of_saves": result["seconds_of_saves"],
    }


def startup(processes: int, options: list[str], folder: Path) -> list[Row]:
    steps = int(options[options.index("--train.steps") + 1])
    caches = {f"{name}_CACHE_DIR": str(folder / name) for name in ("TRITON", "TORCHINDUCTOR")}
    rows = []
    for what, name, more in (
        ("fresh", "first", ()),
        ("warm", "second", ()),
        ("resumed", "second", ("--resume", "auto", "--train.steps", 2 * steps)),
    ):
        row = timed(processes, options, folder / name, caches, *more)
        rows.append({**row, "caches": what})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def disturbed(processes: int, options: list[str], run_dir: Path, steps: int) -> None:
    """Kill a rank at a third of the steps, stop the job at two thirds, and go on with half of the processes."""
    words = ("--train.out-dir", run_dir, "--resume", "auto")
    job = subprocess.Popen(command(processes, options, *words), cwd=record.ROOT)
    wait_for_step(steps // 3, job, run_dir)
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    wait_for_step(2 * steps // 3, job, run_dir)
    job.send_signal(signal.SIGTERM)
    job.wait()
    state = json.loads((list_checkpoints(run_dir)[-1] / "state.json").read_bytes())
    batch = state["recipe"]["data"]["batch_size"] * processes // (processes // 2)
    given = command(processes // 2, options, *words, "--data.batch-size", batch)
    subprocess.run(given, check=True, cwd=record.ROOT)


def wait_for_step(step: int, job: subprocess.Popen[bytes], run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    while not path.exists() or max((row["step"] for row in read_metrics(path)), default=0) < step:
        if job.poll() is not None:
            raise SystemExit(f"the job has ended with {job.returncode}")
        time.sleep(0.2)


def soak(processes: int, options: list[str], folder: Path) -> list[Row]:
    begun, runs = time.perf_counter(), (folder / "undisturbed", folder / "disturbed")
    timed(processes, options, runs[0], {})
    steps = int(options[options.index("--train.steps") + 1])
    disturbed(processes, options, runs[1], steps)
    records = [list(read_metrics(run / "metrics.jsonl")) for run in runs]
    losses = [{row["step"]: row["nats_per_token"] for row in rows if row["kind"] == "train"} for rows in records]
    assert losses[0].keys() == losses[1].keys() >= {steps}, "both log the same steps, the last among them"
    apart = [abs(loss - losses[1][step]) / loss for step, loss in sorted(losses[0].items())]
    heldout = [json.loads((run / "result.json").read_bytes())["heldout_nats_per_token"] for run in runs]
    row = {
        "mode": "job",
        "processes": [processes, processes // 2],
        "options": options,
        "minutes": round((time.perf_counter() - begun) / 60, 1),
        "heldout_nats_per_token": heldout,
        "relative_difference_of_losses": {"most": max(apart), "last": apart[-1]},
    }
    print(json.dumps(row))
    return [row]


def twins(seed: int, folder: Path) -> list[Row]:
    rows = []
    for recipe in ("tiny", "tiny-dense"):
        seconds = timed(1, ["--recipe", recipe, "--train.seed", str(seed)], folder / recipe, {})["seconds"]
        result = json.loads((folder / recipe / "result.json").read_bytes())
        kept = {key: result[key] for key in KEPT}
        rows.append({"recipe": recipe, "seed": seed, **kept, "wall_seconds": round(seconds, 1)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    given, options = sys.argv[1:], []
    if "--" in given:
        given, options = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["startup", "soak", "tiny"])
    parser.add_argument("--processes", default="4", help="numbers, separated by commas")
    parser.add_argument("--seeds", default="0", help="of tiny, separated by commas")
    args = parser.parse_args(given)
    for number in map(int, (args.seeds if args.what == "tiny" else args.processes).split(",")):
        with tempfile.TemporaryDirectory() as folder:
            if args.what == "tiny":
                record.append("tiny", twins(number, Path(folder)))
            else:
                measure, file = (startup, "cold") if args.what == "startup" else (soak, "soak")
                record.append(file, measure(number, options, Path(folder)))


if __name__ == "__main__":
    main()

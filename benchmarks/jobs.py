"""Jobs of `tilemoe train`: phases, a disturbed one, two recipes, several ways; results/cold, soak, tiny, ways.jsonl.

    python benchmarks/jobs.py startup --processes 1,4 -- --recipe 1b --train.steps 12 --train.save-every 4
    python benchmarks/jobs.py soak --processes 4 -- --recipe cpu-4 --train.steps 600 --train.save-every 50
    python benchmarks/jobs.py tiny --seeds 0,1,2
    python benchmarks/jobs.py ways --runs top-K:0,top-K:1,nearest:0,fp8:0 -- --recipe 1b --data.corpus FOLDER

startup: a run with empty caches of compiled kernels, one with warm ones, and one that goes on with it for as many
steps; a row has the seconds to the end of the first step, those after the last one, and every phase of rank 0.
soak: a run of all steps, and one of which a rank is killed at a third (torchrun starts it again) and which goes on
with half the processes from two thirds on; a row has the losses of both.
tiny: the recipe against its dense twin: equal FLOPs per token, as many tokens; each with its own settings.
ways: one recipe with other routing, precision, optimiser or seed, on the text of ways_text.py; each run has a GPU, and
as many run at once as there are GPUs. A row has the held-out losses along the run, and the exported model's here and in
transformers.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tilemoe.bench import record
from tilemoe.data import TokenShards
from tilemoe.data.sampler import sequential_windows
from tilemoe.train.checkpoints.folder import resolve_checkpoint
from tilemoe.train.checkpoints.names import list_checkpoints
from tilemoe.train.checkpoints.restore import restore_model
from tilemoe.train.datasets import prepare_data
from tilemoe.train.metrics import read_metrics

BEFORE = ("torchrun", "imports", "checks", "data", "processes", "weights", "folder", "reading the checkpoint")
KEPT = ("heldout_nats_per_byte", "heldout_tokens", "training_tokens", "parameters", "flops_per_token")
WAYS = MappingProxyType(
    {
        "top-K": (),
        "nearest": ("--model.moe.rounding.mode", "nearest"),
        "fp8": ("--model.moe.precision", "fp8"),
        "muon": ("--optim.name", "muon"),
    }
)
PER_LAYER = ("expert_load", "dropped_pairs", "added_pairs", "tile_waste")
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
    return rows


def ways(runs: list[tuple[str, str]], options: list[str], folder: Path) -> None:
    """A run of each (way, seed); its row is appended as soon as it is done."""
    gpus: SimpleQueue[int] = SimpleQueue()
    for gpu in range(torch.cuda.device_count()) or (-1,):
        gpus.put(gpu)
    at_once = min(gpus.qsize(), len(runs))

    def measure(way: str, seed: str) -> None:
        gpu, run_dir = gpus.get(), folder / f"{way}-{seed}"
        try:
            given = [*options, *WAYS[way], "--train.seed", seed]
            timed(1, given, run_dir, {"CUDA_VISIBLE_DEVICES": str(gpu)} if gpu >= 0 else {})
            row = losses_of(run_dir)
            print(way, seed, json.dumps(row), flush=True)
            with torch.cuda.device(gpu):
                row["exported_nats_per_token"] = exported_losses(run_dir)
        finally:
            torch.cuda.empty_cache()
            gpus.put(gpu)
        named = [Path(value).name if Path(value).exists() else value for value in options]  # no machine's paths
        record.append("ways", [{"way": way, "seed": int(seed), "at_once": at_once, "options": named, **row}])

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(measure, way, seed) for way, seed in runs]:
            done.result()


def losses_of(run_dir: Path) -> Row:
    result, rows = json.loads((run_dir / "result.json").read_bytes()), list(read_metrics(run_dir / "metrics.jsonl"))
    steps, heldout = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
    return {
        **{key: result[key] for key in KEPT},
        "heldout_nats_per_token": [[row["step"], round(row["nats_per_token"], 5)] for row in heldout],
        "tokens_per_second": round(median(row["tokens_per_second"] for row in steps), 1),
        **{name: round(fmean(fmean(row[name]) for row in steps), 5) for name in PER_LAYER},
    }


@torch.no_grad()
def exported_losses(run_dir: Path) -> dict[str, float]:
    """The loss of the exported model over the first held-out windows, in fp32, here and in transformers."""
    exported, data = run_dir / "exported", resolve_checkpoint(run_dir).state.recipe.data
    given = [sys.executable, "-m", "tilemoe", "export", "--checkpoint", str(run_dir), "--out", str(exported)]
    subprocess.run(given, check=True, cwd=record.ROOT)
    heldout = prepare_data(data, data.tokenizer).heldout
    assert isinstance(heldout, TokenShards), "one corpus of text"
    inputs, targets = map(torch.from_numpy, next(sequential_windows(heldout, data.seq_len, 4)))
    device, losses = torch.device("cuda" if torch.cuda.is_available() else "cpu"), {}
    for name, load in (
        ("tilemoe", lambda: restore_model(exported, "auto")[0]),
        ("transformers", lambda: AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()),
    ):
        logits = load().to(device)(inputs.to(device)).logits.flatten(0, 1).float()
        losses[name] = float(functional.cross_entropy(logits, targets.flatten().to(device)))
    return losses


def main() -> None:
    given, options = sys.argv[1:], []
    if "--" in given:
        given, options = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["startup", "soak", "tiny", "ways"])
    parser.add_argument("--processes", default="4", help="numbers, separated by commas")
    parser.add_argument("--seeds", default="0", help="of tiny, separated by commas")
    parser.add_argument("--runs", default="top-K:0", help=f"WAY:SEED, separated by commas; WAY of {', '.join(WAYS)}")
    args = parser.parse_args(given)
    runs = [(way, seed or "0") for way, _, seed in (run.partition(":") for run in args.runs.split(","))]
    record.selected("way", ",".join(way for way, _ in runs), WAYS)
    numbers = {"tiny": args.seeds, "ways": "0"}.get(args.what, args.processes)
    for number in map(int, numbers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            match args.what:
                case "ways":
                    ways(runs, options, Path(folder))
                case "tiny":
                    record.append("tiny", twins(number, Path(folder)))
                case "startup":
                    record.append("cold", startup(number, options, Path(folder)))
                case "soak":
                    record.append("soak", soak(number, options, Path(folder)))


if __name__ == "__main__":
    main()

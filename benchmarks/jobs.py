"""Jobs of `tilemoe train` from the command to its exit; results/cold.jsonl and tiny.jsonl.

    python benchmarks/jobs.py startup --processes 1,4 -- --recipe 1b --train.steps 12 --train.save-every 4
    python benchmarks/jobs.py tiny --seeds 0,1,2

startup: a run with empty caches of compiled kernels, one with warm ones, and one that goes on with it for as many
steps; a row has the seconds to the end of the first step, those after the last one, and every phase of rank 0.
tiny: the recipe against its dense twin: equal FLOPs per token, as many tokens; each with its own settings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tilemoe.bench import record

BEFORE = ("torchrun", "imports", "checks", "data", "processes", "weights", "folder", "reading the checkpoint")
KEPT = ("heldout_nats_per_byte", "heldout_tokens", "training_tokens", "parameters", "flops_per_token")
Row = dict[str, Any]


def timed(processes: int, options: list[str], run_dir: Path, environment: dict[str, str], *more: object) -> Row:
    """Run it to its end. Seconds by the phases of rank 0, and of what follows them until the command is done."""
    begun = time.perf_counter()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    words = [*options, "--train.out-dir", str(run_dir), *map(str, more)]
    subprocess.run(
        [sys.executable, *torchrun, "-m", "tilemoe", "train", *words],
        check=True,
        cwd=record.ROOT,
        env=os.environ | environment,
    )
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
    parser.add_argument("what", choices=["startup", "tiny"])
    parser.add_argument("--processes", default="4", help="of startup, separated by commas")
    parser.add_argument("--seeds", default="0", help="of tiny, separated by commas")
    args = parser.parse_args(given)
    for number in map(int, (args.seeds if args.what == "tiny" else args.processes).split(",")):
        with tempfile.TemporaryDirectory() as folder:
            if args.what == "tiny":
                record.append("tiny", twins(number, Path(folder)))
            else:
                record.append("cold", startup(number, options, Path(folder)))


if __name__ == "__main__":
    main()

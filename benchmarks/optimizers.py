"""AdamW and Muon on one recipe: held-out loss at equal tokens, over learning rates and seeds, and tokens per second.

    python benchmarks/optimizers.py --corpus FOLDER --steps 120 --lrs 5e-4,1e-3,2e-3 --at-once 2     (which rate)
    python benchmarks/optimizers.py --corpus FOLDER --steps 770 --lrs 1e-3                           (the comparison)

Each combination is one `tilemoe train`; further options are handed to it, and options of an earlier run's row give the
same batches again. Appends a row for each to results/optimizers.jsonl as soon as it is done. Where several run at once,
their speed is not recorded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tilemoe.bench import record
from tilemoe.train.metrics import read_metrics

NAME = "optimizers"
KEPT = ("heldout_nats_per_byte", "heldout_nats_per_token", "training_tokens", "parameters")


def measure(args: argparse.Namespace, more: list[str], optimizer: str, lr: float, seed: int) -> dict[str, Any]:
    """One run, recorded."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "tilemoe", "train", "--recipe", args.recipe, "--data.corpus", args.corpus,
            "--train.steps", args.steps, "--train.seed", seed, "--optim.name", optimizer, "--optim.lr", lr,
            "--train.save-every", 0, "--train.sample-tokens", 0, "--train.out-dir", folder, *more,
        ]  # fmt: skip
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
        records = list(read_metrics(Path(folder) / "metrics.jsonl"))
    speeds = [each["tokens_per_second"] for each in records if each["kind"] == "train"]
    heldout = [[each["step"], each["nats_per_byte"]] for each in records if each["kind"] == "eval"]
    row = {
        "recipe": args.recipe,
        "optimizer": optimizer,
        "lr": lr,
        "seed": seed,
        "steps": args.steps,
        **{name: result[name] for name in KEPT},
        "heldout": heldout,
        "tokens_per_second": round(median(speeds), 1) if args.at_once == 1 else None,
        "arguments": more,
    }
    record.append(NAME, [row])
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="single-gpu")
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--lrs", default="1e-3", help="of each optimiser; commas between")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the machine")
    args, more = parser.parse_known_args()
    runs = product(args.optimizers.split(","), map(float, args.lrs.split(",")), map(int, args.seeds.split(",")))
    with ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(lambda run: measure(args, more, *run), runs))
    for optimizer in args.optimizers.split(","):
        of_it = [row for row in rows if row["optimizer"] == optimizer]
        best = min(of_it, key=lambda row: row["heldout_nats_per_byte"])
        print(f"{optimizer}: {best['heldout_nats_per_byte']:.4f} nats/byte at {best['lr']:g}")


if __name__ == "__main__":
    main()

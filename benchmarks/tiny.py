"""The `tiny` recipe against its dense twin: equal FLOPs per token, as many tokens; each with its own settings.

    python benchmarks/tiny.py [--seeds 0,1,2] [--recipes tiny,tiny-dense]

Each recipe is trained by the command line, as `make demo` does it, and its held-out loss goes to results/tiny.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tilemoe.bench import record

KEPT = (
    "heldout_nats_per_byte",
    "heldout_tokens",
    "training_tokens",
    "parameters",
    "flops_per_token",
)


def train(recipe: str, seed: int, out_dir: Path) -> dict[str, object]:
    """Train ``recipe`` in a process of its own; its result, and the seconds from start to exit, evaluation included."""
    start = time.perf_counter()
    options = ["--recipe", recipe, "--train.seed", str(seed), "--train.out-dir", str(out_dir)]
    subprocess.run([sys.executable, "-m", "tilemoe", "train", *options], check=True, cwd=record.ROOT)
    seconds = time.perf_counter() - start
    result = json.loads((out_dir / "result.json").read_text())
    return {"recipe": recipe, "seed": seed, **{key: result[key] for key in KEPT}, "wall_seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--recipes", default="tiny,tiny-dense")
    args = parser.parse_args()
    for seed in args.seeds:
        for recipe in args.recipes.split(","):
            with tempfile.TemporaryDirectory() as folder:
                row = train(recipe, seed, Path(folder) / recipe)
            print(json.dumps(row))
            record.append("tiny", [row])


if __name__ == "__main__":
    main()

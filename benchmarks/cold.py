"""A layer's cold start on one GPU; a row is appended to results/cold.jsonl.

    python benchmarks/cold.py --cases 7B-n256,OLMoE

Seconds from the first call to the last gradient in a fresh process with empty caches, then for each further size, then
for another number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilemoe.bench import cases, peers, record, timing
from tilemoe.bench.layer import layer_step

DEVICE = "cuda"
COLD_TOKENS = 1000  # of the last call: no multiple of a tile


def cold(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row: seconds of the first call of each case, in the order given, and of the last with other tokens."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "QUACK_CACHE_DIR": f"{folder}/quack",
        }
        command = [sys.executable, str(Path(__file__).resolve()), "cold-child", "--cases", args.cases]
        child = [*command, "--peers", args.peers]
        done = subprocess.run(child, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
    row = {"mode": "cold", "contestant": args.peers, **json.loads(done.stdout.splitlines()[-1])}
    print(row)
    return [row]


def cold_child(args: argparse.Namespace) -> None:
    """Inside the fresh process: prints the seconds as JSON on its last line."""
    torch.zeros(1, device=DEVICE).item()
    seconds = {}
    found = cases.find(args.cases)
    last = list(found)[-1]
    found = {**found, f"{last}, {COLD_TOKENS} tokens": replace(found[last], num_tokens=COLD_TOKENS)}
    for name, shape in found.items():
        weights = peers.make_weights(shape, torch.device(DEVICE), torch.bfloat16)
        contestant = peers.build(args.peers, shape, weights)
        if isinstance(contestant, str):
            raise SystemExit(f"{args.peers}: {contestant}")
        x = torch.randn(shape.num_tokens, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        seconds[name] = round(timing.wall_ms(layer_step(contestant, x, torch.ones_like(x))) / 1e3, 3)
    print(json.dumps({"seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cold", "cold-child"])
    parser.add_argument("--cases", default="main", help='"main", "all" or names of cases, separated by commas')
    parser.add_argument("--peers", default="tilemoe", help="one contestant")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a cold start needs a CUDA GPU")
    torch.manual_seed(0)
    if args.what == "cold-child":
        cold_child(args)
    else:
        record.append("cold", cold(args))


if __name__ == "__main__":
    main()

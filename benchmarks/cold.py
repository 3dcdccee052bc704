"""A layer's cold start on one GPU; a row is appended to results/cold.jsonl.

    python benchmarks/cold.py --cases 7B-n256,OLMoE

Seconds from the first call to the last gradient with empty caches of compiled kernels, then for each further size, then
for another number of tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tilemoe.bench import cases, peers, record, timing
from tilemoe.bench.layer import layer_step

DEVICE = "cuda"
COLD_TOKENS = 1000  # of the last call: no multiple of a tile


def cold(names: str, peer: str) -> dict[str, float]:
    """Seconds of the first call of each case, in the order given, and of the last with other tokens."""
    torch.zeros(1, device=DEVICE).item()
    seconds = {}
    found = cases.find(names)
    last = list(found)[-1]
    found = {**found, f"{last}, {COLD_TOKENS} tokens": replace(found[last], num_tokens=COLD_TOKENS)}
    for name, shape in found.items():
        weights = peers.make_weights(shape, torch.device(DEVICE), torch.bfloat16)
        contestant = peers.build(peer, shape, weights)
        if isinstance(contestant, str):
            raise SystemExit(f"{peer}: {contestant}")
        x = torch.randn(shape.num_tokens, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        seconds[name] = round(timing.wall_ms(layer_step(contestant, x, torch.ones_like(x))) / 1e3, 3)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="main", help='"main", "all" or names of cases, separated by commas')
    parser.add_argument("--peers", default="tilemoe", help="one contestant")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a cold start needs a CUDA GPU")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("TRITON", "TORCHINDUCTOR", "QUACK"):  # read at the first compilation
            os.environ[f"{name}_CACHE_DIR"] = str(Path(folder) / name)
        row = {"mode": "cold", "contestant": args.peers, "seconds": cold(args.cases, args.peers)}
    record.append("cold", [row])


if __name__ == "__main__":
    main()

"""Benchmarks on one GPU; each appends its rows to results/.

    python benchmarks/run.py layer --cases main --peers tilemoe,sonic-moe,scattermoe,grouped_mm
    python benchmarks/run.py kernels --cases main --kernels triton
    python benchmarks/run.py cold --cases 7B-n256,OLMoE

layer: forward and backward of the whole layer, router included, with saved and peak memory; a contestant whose output
or gradients are wrong is reported and not timed. kernels: each kernel against its roofline, beside a matrix product
and a copy measured in the same rounds. cold: seconds from the first call to the last gradient in a fresh process with
empty caches, then for a second size, then for another number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cases
import kernel_chain
import peers
import record
import timing
import torch
from torch import Tensor

from tilemoe.perf.costs import kernel_costs, layer_roofline_ms
from tilemoe.perf.hardware import Ceilings, find_gpu
from tilemoe.perf.shape import MoEShape

MATMUL = 8192
COPY_BYTES = 1 << 30
COLD_TOKENS = 1000  # of the third call: no multiple of a tile


def layer(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each contestant, case and mode."""
    rows = []
    ceilings = find_gpu(torch.cuda.get_device_name()).ceilings()
    for name, shape in cases.find(args.cases).items():
        weights = peers.make_weights(shape, torch.device("cuda"), torch.bfloat16)
        contestants = admitted(args.peers.split(","), shape, weights)
        x = torch.randn(shape.num_tokens, shape.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        do = torch.randn_like(x)
        memory = {contestant.name: layer_memory(contestant, x, do) for contestant in contestants}
        steps = {contestant.name: layer_step(contestant, x, do) for contestant in contestants}
        for mode in args.modes.split(",") if steps else ():
            found = timing.rounds(steps, mode, args.rounds)
            first = next(iter(found))
            for contestant, samples in found.items():
                row: dict[str, Any] = {"case": name, **asdict(shape), "mode": mode, "contestant": contestant}
                for part, label, roof in zip(
                    (0, 1), ("forward", "backward"), layer_roofline_ms(shape, ceilings), strict=True
                ):
                    values = [sample[part] for sample in samples]
                    row[f"{label}_ms"] = timing.summary(values)
                    row[f"{label}_of_roofline"] = round(roof / row[f"{label}_ms"]["median"], 4)
                    row[f"{label}_over_{first}"] = timing.ratio([sample[part] for sample in found[first]], values)
                rows.append({**row, "rounds": args.rounds, **memory[contestant]})
                print(describe(rows[-1]), flush=True)
        del weights, contestants, steps, x, do
        torch.cuda.empty_cache()
    return rows


def describe(row: dict[str, Any]) -> str:
    """One line: medians in milliseconds, memory in MiB."""
    times = " ".join(f"{row[part]['median']:8.3f}" for part in ("forward_ms", "backward_ms"))
    memory = " ".join(
        f"{row[key] / 2**20:7.0f}" for key in ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
    )
    return f"{row['case']:12} {row['mode']:9} {row['contestant']:16} {times} ms, {memory} MiB"


def admitted(names: list[str], shape: MoEShape, weights: peers.Weights) -> list[peers.Contestant]:
    """Those that can be imported and compute the right thing; says why the others cannot take part."""
    contestants = []
    for name in names:
        contestant = peers.build(name, shape, weights)
        problem = contestant if isinstance(contestant, str) else peers.gate(contestant, shape, weights)
        if problem is None and isinstance(contestant, peers.Contestant):
            contestants.append(contestant)
        else:
            print(f"{name} is left out: {problem}", flush=True)
    return contestants


def layer_step(contestant: peers.Contestant, x: Tensor, do: Tensor) -> timing.Step:
    """Forward and backward as two parts; every gradient is made anew."""

    def step() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        start = timing.event()
        out = contestant.run(x)
        middle = timing.event()
        torch.autograd.grad(out, [x, *contestant.leaves], do)
        return [(start, middle), (middle, timing.event())]

    return step


def layer_memory(contestant: peers.Contestant, x: Tensor, do: Tensor) -> dict[str, int]:
    """Bytes beyond x, the weights and the output's gradient: saved (without the output), and at the peaks."""
    layer_step(contestant, x, do)()
    out, left, forward_peak = timing.memory_of(lambda: contestant.run(x))
    grads, _, backward_peak = timing.memory_of(lambda: torch.autograd.grad(out, [x, *contestant.leaves], do))
    del grads
    saved = left - out.nbytes
    return {"saved_bytes": saved, "forward_peak_bytes": forward_peak, "backward_peak_bytes": saved + backward_peak}


def kernels(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each kernel, case and mode; fractions are of the ceilings measured in the same rounds."""
    rows = []
    square = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    yardsticks = {
        "matmul": kernel_chain.one_part(lambda: square @ square),
        "copy": kernel_chain.one_part(lambda: target.copy_(source)),
    }
    for name, shape in cases.find(args.cases).items():
        costs = kernel_costs(shape)
        steps = {**yardsticks, **kernel_chain.steps(shape, args.kernels)}
        for mode in args.modes.split(","):
            found = timing.rounds(steps, mode, args.rounds)
            summaries = {key: timing.summary([sample[0] for sample in samples]) for key, samples in found.items()}
            tflops = 2 * MATMUL**3 / summaries["matmul"]["median"] / 1e9
            tbps = 2 * COPY_BYTES / summaries["copy"]["median"] / 1e9
            ceilings = Ceilings(tflops, tbps, is_measured=True)
            print(f"{name} {mode}: matmul {tflops:.0f} TFLOP/s, copy {tbps:.3f} TB/s", flush=True)
            for kernel, cost in costs.items():
                ms = summaries[kernel]["median"]
                row = {
                    "case": name, **asdict(shape), "mode": mode, "kernels": args.kernels, "kernel": kernel,
                    "ms": summaries[kernel], "tflops": round(cost.flops / ms / 1e9, 1),
                    "gbps": round(cost.bytes / ms / 1e6, 1), "of_roofline": round(cost.roofline_ms(ceilings) / ms, 4),
                    "matmul_tflops": round(tflops, 1), "copy_tbps": round(tbps, 4), "rounds": args.rounds,
                }  # fmt: skip
                rows.append(row)
                print(f"  {kernel:22} {ms:8.3f} ms  {row['tflops']:7} TFLOP/s  {row['gbps']:7} GB/s  "
                      f"{100 * row['of_roofline']:5.1f}% of its roofline", flush=True)  # fmt: skip
    return rows


def cold(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row: seconds of the first call of each case, in the order given, and of the last with other tokens."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, str(Path(__file__).resolve()), "cold-child", "--cases", args.cases]
        child = [*command, "--peers", args.peers]
        done = subprocess.run(child, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
    row = {"contestant": args.peers, **json.loads(done.stdout.splitlines()[-1])}
    print(row)
    return [row]


def cold_child(args: argparse.Namespace) -> None:
    """Inside the fresh process: prints the seconds as JSON on its last line."""
    torch.zeros(1, device="cuda").item()
    seconds = {}
    found = cases.find(args.cases)
    last = list(found)[-1]
    found = {**found, f"{last}, {COLD_TOKENS} tokens": replace(found[last], num_tokens=COLD_TOKENS)}
    for name, shape in found.items():
        weights = peers.make_weights(shape, torch.device("cuda"), torch.bfloat16)
        contestant = peers.build(args.peers, shape, weights)
        if isinstance(contestant, str):
            raise SystemExit(f"{args.peers}: {contestant}")
        x = torch.randn(shape.num_tokens, shape.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        layer_step(contestant, x, torch.ones_like(x))()
        torch.cuda.synchronize()
        seconds[name] = round(time.perf_counter() - start, 3)
    print(json.dumps({"seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["layer", "kernels", "cold", "cold-child"])
    parser.add_argument("--cases", default="main", help='"main", "all" or names from cases.py, separated by commas')
    parser.add_argument("--peers", default="tilemoe", help="contestants; the first is what the others are compared to")
    parser.add_argument("--kernels", default="triton", help="the KernelSet whose kernels are timed")
    parser.add_argument("--modes", default="burst,sustained")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these benchmarks need a CUDA GPU; benchmarks/cpu_layer.py runs without one")
    torch.manual_seed(0)
    if args.what == "cold-child":
        cold_child(args)
        return
    rows = {"layer": layer, "kernels": kernels, "cold": cold}[args.what](args)
    if rows:
        print("appended to", record.append(args.what, rows).relative_to(record.ROOT))


if __name__ == "__main__":
    main()

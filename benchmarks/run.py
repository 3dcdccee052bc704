"""Benchmarks on one GPU; each appends its rows to results/, a case as soon as it is measured.

    python benchmarks/run.py layer --cases main --peers tilemoe,sonic-moe,scattermoe,grouped_mm --modes sustained,alone
    python benchmarks/run.py kernels --cases main
    python benchmarks/run.py cold --cases 7B-n256,OLMoE

layer: forward and backward of the whole layer, router included, with saved and peak memory; a contestant whose output
or gradients are wrong is reported and not timed. Mode "alone" is GPU time without the host's (`gpu_time`). kernels:
each kernel against its roofline, beside a matrix product and a copy measured in the same rounds, and its share of the
layer. cold: seconds from the first call to the last gradient in a fresh process with empty caches, then for each
further size, then for another number of tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cases
import gate
import gpu_time
import kernel_chain
import peers
import record
import timing
import torch
from torch import Tensor

import tilemoe
from tilemoe.perf.costs import kernel_costs, layer_roofline_ms
from tilemoe.perf.hardware import Ceilings, find_gpu
from tilemoe.shape import MoEShape

DEVICE = "cuda"
MATMUL = 8192
COPY_BYTES = 1 << 30
HOST_CALLS = 7
ALONE_MS = 40.0  # of a window without hosts
COLD_TOKENS = 1000  # of the last call: no multiple of a tile
PARTS = ("forward", "backward")
MEMORY = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")

Rows = list[dict[str, Any]]


def layer(args: argparse.Namespace, name: str, shape: MoEShape) -> Iterator[Rows]:
    """One row for each contestant, a list for each mode."""
    torch.compiler.reset()  # or the eighth size would run uncompiled
    ceilings = find_gpu(torch.cuda.get_device_name()).ceilings()
    weights = peers.make_weights(shape, torch.device(DEVICE), torch.bfloat16)
    contestants = admitted(args.peers.split(","), shape, weights)
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    do = torch.randn_like(x)
    once = {c.name: {**layer_memory(c, x, do), **layer_host(c, x, do)} for c in contestants}
    versions = {contestant.name: contestant.version for contestant in contestants}
    for mode in args.modes.split(",") if contestants else ():
        found = layer_rounds(contestants, x, do, mode, args.rounds)
        rows = layer_rows(found, once, layer_roofline_ms(shape, ceilings))
        where = {"case": name, **asdict(shape), "mode": mode, "rounds": args.rounds}
        rows = [{**where, "version": versions[row["contestant"]], **row} for row in rows]
        for row in rows:
            print(describe(row), flush=True)
        yield rows


def layer_rows(
    found: dict[str, list[list[float]]], once: dict[str, dict[str, Any]], roofs: tuple[float, float]
) -> Rows:
    """A row for each contestant; ``once`` is what was measured once, by contestant: memory, host.

    All but the first also say how they compare to it, ``baseline``: ``forward_ratio`` and ``backward_ratio`` are their
    time over its time, round by round; memory ratios are its bytes over theirs.
    """
    first = next(iter(found))
    rows: Rows = []
    for contestant, samples in found.items():
        row: dict[str, Any] = {"contestant": contestant, **once[contestant]}
        for part, (label, roof) in enumerate(zip(PARTS, roofs, strict=True)):
            values = [sample[part] for sample in samples]
            row[f"{label}_ms"] = timing.summary(values)
            row[f"{label}_of_roofline"] = round(roof / row[f"{label}_ms"]["median"], 4)
            if contestant != first:
                row[f"{label}_ratio"] = timing.ratio([sample[part] for sample in found[first]], values)
        if contestant != first:
            row["baseline"] = {key: rows[0][key] for key in ("contestant", "forward_ms", "backward_ms", *MEMORY)}
            row |= {key.replace("bytes", "ratio"): round(rows[0][key] / max(1, row[key]), 4) for key in MEMORY}
        rows.append(row)
    return rows


def describe(row: dict[str, Any]) -> str:
    """One line: medians in milliseconds, memory in MiB, and both against the first contestant."""
    times = " ".join(f"{row[f'{part}_ms']['median']:8.3f}" for part in PARTS)
    memory = " ".join(f"{row[key] / 2**20:7.0f}" for key in MEMORY)
    host = " ".join(f"{row[f'{part}_host_ms']:.2f}" for part in PARTS)
    line = f"{row['case']:12} {row['mode']:9} {row['contestant']:12} {times} ms (host {host}), {memory} MiB"
    if "baseline" not in row:
        return line
    ratios = " ".join(f"{row[key.replace('bytes', 'ratio')]:.2f}" for key in MEMORY)
    return f"{line}; {row['forward_ratio']:.3f}x {row['backward_ratio']:.3f}x, memory {ratios}"


def admitted(names: list[str], shape: MoEShape, weights: peers.Weights) -> list[peers.Contestant]:
    """Those that can be imported and compute the right thing; says why the others cannot take part."""
    contestants = []
    for name in names:
        start = time.perf_counter()
        contestant = peers.build(name, shape, weights)
        problem = contestant if isinstance(contestant, str) else gate.problem(contestant, shape, weights)
        if problem is None and isinstance(contestant, peers.Contestant):
            contestants.append(contestant)
            print(f"{name}: correct, {time.perf_counter() - start:.1f} s with compilation and tuning", flush=True)
        else:
            print(f"{name} is left out: {problem}", flush=True)
    return contestants


def layer_rounds(
    contestants: list[peers.Contestant], x: Tensor, do: Tensor, mode: str, count: int
) -> dict[str, list[list[float]]]:
    """Name to, for each round, the median milliseconds of forward and backward."""
    if mode == "alone":
        marked = {contestant.name: marked_step(contestant, x, do) for contestant in contestants}
        return gpu_time.rounds(marked, gpu_time.clock_of(x.device), count, timing.SUSTAINED_MS, ALONE_MS)
    steps = {contestant.name: layer_step(contestant, x, do) for contestant in contestants}
    return timing.rounds(steps, mode, count)


def layer_step(contestant: peers.Contestant, x: Tensor, do: Tensor) -> timing.Step:
    """Forward and backward as two parts; every gradient is made anew."""
    marked = marked_step(contestant, x, do)
    return lambda: list(itertools.pairwise(marked(timing.event)))


def marked_step(contestant: peers.Contestant, x: Tensor, do: Tensor) -> gpu_time.Step:
    """The same, with marks before, between and after the parts."""

    def step(mark: Callable[[], Any]) -> list[Any]:
        marks = [mark()]
        out = contestant.run(x)
        marks.append(mark())
        torch.autograd.grad(out, [x, *contestant.leaves], do)
        return [*marks, mark()]

    return step


def layer_memory(contestant: peers.Contestant, x: Tensor, do: Tensor) -> dict[str, int]:
    """Bytes beyond x, the weights and the output's gradient: saved (without the output), and at the peaks.

    The forward's peak holds the output, the backward's all four gradients and whatever is still saved.
    """
    layer_step(contestant, x, do)()
    out, left, forward_peak = timing.memory_of(lambda: contestant.run(x))
    saved = left - out.nbytes
    grads, _, backward_peak = timing.memory_of(lambda: torch.autograd.grad(out, [x, *contestant.leaves], do))
    del grads
    return dict(zip(MEMORY, (saved, forward_peak, saved + backward_peak), strict=True))


def layer_host(contestant: peers.Contestant, x: Tensor, do: Tensor) -> dict[str, float]:
    """Milliseconds until the host has launched everything: where it exceeds the GPU's time, the GPU waits."""
    launched: list[tuple[float, float]] = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = contestant.run(x)
        middle = time.perf_counter()
        torch.autograd.grad(out, [x, *contestant.leaves], do)
        launched.append((1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)))
    parts = zip(PARTS, zip(*launched, strict=True), strict=True)
    return {f"{part}_host_ms": round(statistics.median(values), 3) for part, values in parts}


def copier(count: int) -> Callable[[], object]:
    """Copies ``count`` bytes, which reads and writes as many."""
    source = torch.randn(count // 4, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def each_kernel(args: argparse.Namespace, name: str, shape: MoEShape) -> Iterator[Rows]:
    """One row for each kernel, a list for each mode; fractions are of the ceilings measured in the same rounds."""
    square = torch.randn(MATMUL, MATMUL, device=DEVICE, dtype=torch.bfloat16)
    copy = copier(COPY_BYTES)
    yardsticks = {
        "matmul": kernel_chain.one_part(lambda: square @ square),
        "copy": kernel_chain.one_part(copy),
        "copy_as_combine": kernel_chain.one_part(copier(kernel_costs(shape)["combine"].bytes // 2), ahead=copy),
    }
    weights = peers.make_weights(shape, torch.device(DEVICE), torch.bfloat16)
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    kernels = args.kernels or tilemoe.select_kernels(DEVICE, torch.bfloat16, peers.layer_config(shape)).name
    whole = layer_step(peers.tilemoe_layer(shape, weights, kernels), x, torch.randn_like(x))
    steps = {
        **yardsticks,
        "layer": whole,
        **kernel_chain.router_steps(shape, weights, x, ahead=lambda: square @ square),
        **kernel_chain.steps(shape, weights, x.detach(), kernels, ahead=copy),
    }
    for mode in args.modes.split(","):
        found = timing.rounds(steps, mode, args.rounds)
        tflops = 2 * MATMUL**3 / timing.summary([sample[0] for sample in found["matmul"]])["median"] / 1e9
        tbps = 2 * COPY_BYTES / timing.summary([sample[0] for sample in found["copy"]])["median"] / 1e9
        ceilings = Ceilings(tflops, tbps, is_measured=True)
        print(f"{name} {mode}: matmul {tflops:.0f} TFLOP/s, copy {tbps:.3f} TB/s", flush=True)
        where = {
            "case": name, **asdict(shape), "mode": mode, "kernels": kernels, "rounds": args.rounds,
            "matmul_tflops": round(tflops, 1), "copy_tbps": round(tbps, 4),
        }  # fmt: skip
        rows = [{**where, **row} for row in kernel_chain.rows(found, shape, ceilings)]
        for row in rows:
            print(kernel_chain.describe(row), flush=True)
        yield rows


def cold(args: argparse.Namespace) -> Rows:
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
        torch.cuda.synchronize()
        start = time.perf_counter()
        layer_step(contestant, x, torch.ones_like(x))()
        torch.cuda.synchronize()
        seconds[name] = round(time.perf_counter() - start, 3)
    print(json.dumps({"seconds": seconds}))


def each_case(args: argparse.Namespace) -> None:
    """Measure and record case by case; none is begun after ``args.seconds``."""
    measure = {"layer": layer, "kernels": each_kernel}[args.what]
    start = time.perf_counter()
    for name, shape in cases.find(args.cases).items():
        begun = time.perf_counter() - start
        if begun > args.seconds:
            print(f"{name} and the cases after it are left out: {begun:.0f} s have passed")
            break
        for rows in measure(args, name, shape):
            record.append(args.what, rows)
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start - begun:.0f} s", flush=True)
    print(f"{time.perf_counter() - start:.0f} s; rows are in results/{args.what}.jsonl", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["layer", "kernels", "cold", "cold-child"])
    parser.add_argument("--cases", default="main", help='"main", "all" or names from cases.py, separated by commas')
    parser.add_argument("--peers", default="tilemoe", help="contestants; the first is what the others are compared to")
    parser.add_argument("--kernels", help="the backend whose kernels are timed; default: the one that is chosen")
    parser.add_argument("--modes", default="burst,sustained", help="of burst, sustained, and for layer alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this many")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these benchmarks need a CUDA GPU; benchmarks/cpu_layer.py runs without one")
    torch.manual_seed(0)
    if args.what == "cold-child":
        cold_child(args)
    elif args.what == "cold":
        print("appended to", record.append("cold", cold(args)))
    else:
        each_case(args)


if __name__ == "__main__":
    main()

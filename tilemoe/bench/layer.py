"""Measures the whole layer, with its router: each contestant's forward and backward in the same rounds, and memory.

A contestant whose output or gradients are wrong is reported and not timed. On a CPU the host's clock is used, and
memory is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from tilemoe.bench import check, peers, timing
from tilemoe.bench.record import Row
from tilemoe.perf.costs import layer_roofline_ms
from tilemoe.perf.hardware import find_gpu
from tilemoe.shape import MoEShape

PARTS = ("forward", "backward")
MEMORY = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")


def layer(settings: timing.Settings, name: str, shape: MoEShape) -> Iterator[list[Row]]:
    """For each mode a list with one row per contestant."""
    torch.compiler.reset()  # otherwise the eighth size would run uncompiled
    weights = peers.make_weights(shape, settings.device, torch.bfloat16)
    contestants = admitted(settings.peers, shape, weights)
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=settings.device, dtype=torch.bfloat16).requires_grad_()
    do = torch.randn_like(x)
    once = {c.name: {"version": c.version, **layer_memory(c, x, do), **layer_host(c, x, do)} for c in contestants}
    steps = {contestant.name: layer_step(contestant, x, do) for contestant in contestants}
    for mode in settings.modes if contestants else ():
        found = timing.rounds(steps, mode, settings.rounds)
        where = {"case": name, **asdict(shape), "mode": mode, "rounds": settings.rounds}
        yield [{**where, **row} for row in layer_rows(found, once, _rooflines(shape, settings.device))]


def _rooflines(shape: MoEShape, device: torch.device) -> tuple[float | None, float | None]:
    """(forward, backward) roofline milliseconds; None if the table has no figures for the device."""
    if device.type != "cuda":
        return None, None
    try:
        return layer_roofline_ms(shape, find_gpu(torch.cuda.get_device_name(device)).ceilings())
    except ValueError:
        return None, None


def time_rows(found: dict[str, list[list[float]]], parts: Sequence[str]) -> list[Row]:
    """A row per contestant: each part's time and, for all but the first, its ratio to the first's, by round."""
    by_part = {name: list(zip(*samples, strict=True)) for name, samples in found.items()}
    first = next(iter(by_part.values()))
    rows: list[Row] = []
    for contestant, times in by_part.items():
        row: Row = {"contestant": contestant}
        for part, ours, theirs in zip(parts, first, times, strict=True):
            row[f"{part}_ms"] = timing.summary(theirs)
            row |= {f"{part}_ratio": timing.ratio(ours, theirs)} if rows else {}
        rows.append(row)
    return rows


def layer_rows(
    found: dict[str, list[list[float]]], once: dict[str, Row], roofs: tuple[float | None, float | None]
) -> list[Row]:
    """`time_rows`, plus what was measured ``once`` for each contestant: memory and host time.

    All but the first also have a ``baseline``, the first's figures; memory ratios are its bytes over theirs.
    """
    rows = [{**row, **once[row["contestant"]]} for row in time_rows(found, PARTS)]
    for row in rows:
        for part, roof in zip(PARTS, roofs, strict=True):
            row[f"{part}_of_roofline"] = None if roof is None else round(roof / row[f"{part}_ms"]["median"], 4)
    first, *others = rows
    for row in others:
        row["baseline"] = {key: first[key] for key in ("contestant", "forward_ms", "backward_ms", *MEMORY)}
        for key in MEMORY:
            is_known = None not in (first[key], row[key])
            row[key.replace("bytes", "ratio")] = round(first[key] / max(1, row[key]), 4) if is_known else None
    return rows


def describe(row: Row) -> str:
    """One line: medians in milliseconds, memory in MiB, and ratios to the first contestant."""
    times = " ".join(f"{row[f'{part}_ms']['median']:8.3f}" for part in PARTS)
    memory = " ".join("      -" if row[key] is None else f"{row[key] / 2**20:7.0f}" for key in MEMORY)
    host = " ".join(f"{row[f'{part}_host_ms']:.2f}" for part in PARTS)
    line = f"{row['case']:12} {row['mode']:9} {row['contestant']:12} {times} ms (host {host}), {memory} MiB"
    if "baseline" not in row:
        return line
    ratios = " ".join("-" if row[key] is None else f"{row[key.replace('bytes', 'ratio')]:.2f}" for key in MEMORY)
    return f"{line}; {row['forward_ratio']:.3f}x {row['backward_ratio']:.3f}x, memory {ratios}"


def admitted(names: Sequence[str], shape: MoEShape, weights: peers.Weights) -> list[peers.Contestant]:
    """The contestants that can be imported and are correct; prints why the others are left out."""
    contestants = []
    for name in names:
        start = time.perf_counter()
        contestant = peers.build(name, shape, weights)
        problem = contestant if isinstance(contestant, str) else check.problem(contestant, shape, weights)
        if problem is None and isinstance(contestant, peers.Contestant):
            contestants.append(contestant)
            print(f"{name}: correct, {time.perf_counter() - start:.1f} s with compilation and tuning", flush=True)
        else:
            print(f"{name} is left out: {problem}", flush=True)
    return contestants


def layer_step(
    contestant: peers.Contestant, x: Tensor, do: Tensor, mark: Callable[[], timing.Event] = timing.event
) -> timing.Step:
    """Forward and backward as two parts; every gradient is newly allocated."""
    return timing.forward_and_backward(lambda: contestant.run(x), [x, *contestant.leaves], do, mark=mark)


def layer_memory(contestant: peers.Contestant, x: Tensor, do: Tensor) -> dict[str, int | None]:
    """Bytes besides x, the weights and the output's gradient: saved (without the output), and at the peaks.

    The forward's peak includes the output; the backward's all four gradients and what is still saved.
    """
    if x.device.type != "cuda" or contestant.own_heap:
        return dict.fromkeys(MEMORY)
    layer_step(contestant, x, do)()
    out, left, forward_peak = timing.memory_of(lambda: contestant.run(x))
    saved = left - out.nbytes
    grads, _, backward_peak = timing.memory_of(lambda: torch.autograd.grad(out, [x, *contestant.leaves], do))
    del grads
    return dict(zip(MEMORY, (saved, forward_peak, saved + backward_peak), strict=True))


def layer_host(contestant: peers.Contestant, x: Tensor, do: Tensor) -> dict[str, float]:
    """Milliseconds until the host has launched everything: where it exceeds the GPU's time, the GPU waits."""
    launched = timing.host_ms(layer_step(contestant, x, do, timing.HostEvent))
    return {f"{part}_host_ms": round(milliseconds, 3) for part, milliseconds in zip(PARTS, launched, strict=True)}

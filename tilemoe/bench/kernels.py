"""Times each kernel of a backend by itself, on outputs of the kernels before it, and the router's parts.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.bench import peers, timing
from tilemoe.bench.layer import layer_step
from tilemoe.bench.record import Row
from tilemoe.kernels.choose import select_kernels
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.layers.moe import MoE
from tilemoe.perf.costs import Cost, kernel_costs, layer_roofline_ms, router_costs
from tilemoe.perf.hardware import Ceilings
from tilemoe.routing.build import plan_topk
from tilemoe.routing.topk import route
from tilemoe.shape import MoEShape

# Yardsticks: the side of a matrix product and the bytes of a copy. A CPU's are small, to be quick, and less accurate.
MATMUL = MappingProxyType({"cuda": 8192, "cpu": 512})
COPY_BYTES = MappingProxyType({"cuda": 1 << 30, "cpu": 1 << 27})

# Steps that are not part of the layer: they measure what the GPU can do, in the same rounds.
YARDSTICKS = ("matmul", "copy", "copy_as_combine")
# {step: names of its parts}; every other step has one part, named like the step.
PARTS = {
    "layer": ("layer forward", "layer backward"),
    "logits": ("logits", "logits_grad"),
    "route": ("route", "route_grad"),
}


def kernel_steps(
    shape: MoEShape, weights: peers.Weights, x: Tensor, kernels: str, ahead: Callable[[], Any]
) -> dict[str, timing.Step]:
    """The eight kernels by name: SwiGLU, bf16, random routing. ``ahead`` keeps the GPU busy before the two short ones,
    which only move rows.
    """
    ks = backend_named(kernels)
    w1, w2 = weights.w1.detach(), weights.w2.detach()
    do = torch.randn_like(x)
    logits = torch.rand(shape.num_tokens, shape.num_experts, device=x.device)
    scores, ids = logits.topk(shape.num_experts_per_tok, dim=-1)
    plan, s = plan_topk(ids, shape.num_experts), scores.softmax(dim=-1).flatten()
    spec = activation_spec("swiglu", "concatenated", None, None)
    a, h = ks.up_proj_act(x, w1, None, plan, spec)
    y = ks.down_proj(a, w2, None, plan)
    dh, _, a_scaled = ks.down_proj_dgrad_dact(do, w2, None, h, s, plan, spec)
    out = torch.empty_like(x)
    runs: dict[str, Callable[[], Any]] = {
        "up_proj_act": lambda: ks.up_proj_act(x, w1, None, plan, spec),
        "down_proj": lambda: ks.down_proj(a, w2, None, plan),
        "combine": lambda: ks.combine(y, s, plan, out),
        "down_proj_dgrad_dact": lambda: ks.down_proj_dgrad_dact(do, w2, None, h, s, plan, spec),
        "down_proj_wgrad": lambda: ks.down_proj_wgrad(do, a_scaled, plan),
        "up_proj_dgrad": lambda: ks.up_proj_dgrad(dh, w1, plan),
        "up_proj_wgrad": lambda: ks.up_proj_wgrad(x, dh, plan),
        "combine_grad": lambda: ks.combine_grad(y, plan, out),  # y in place of dx_rows, which has its shape
    }
    return {
        name: timing.one_part(run, ahead=ahead) if name.startswith("combine") else timing.one_part(run)
        for name, run in runs.items()
    }


def router_steps(
    shape: MoEShape, weights: peers.Weights, x: Tensor, ahead: Callable[[], Any]
) -> dict[str, timing.Step]:
    """``logits``: the router's GEMMs, one of which adds the experts' dx. ``route``: from logits to scores and plan, and
    the gradient back to the logits.
    """
    moe = MoE(peers.layer_config(shape), device="meta")
    moe.router.weight = weights.router
    logits = moe.router(x).logits.detach().requires_grad_()

    def scores() -> Tensor:
        return route(logits, moe.cfg).scores

    d_logits, d_scores = torch.randn_like(logits), torch.randn_like(scores())
    return {
        "logits": timing.forward_and_backward(
            lambda: moe.router(x), [x, weights.router], (d_logits, torch.randn_like(x)), ahead=ahead
        ),
        "route": timing.forward_and_backward(scores, [logits], d_scores, ahead=ahead),
    }


def kernel_rows(found: dict[str, list[list[float]]], shape: MoEShape, ceilings: Ceilings) -> list[Row]:
    """A row for each part of each step but the yardsticks: time, rates, fraction of its roofline (None if only launches
    bound it) and share of the layer's forward and backward; for the two kernels that only move rows also the time of a
    copy of as many bytes, divided by theirs.
    """
    medians = {
        part: timing.summary([sample[index] for sample in samples])
        for name, samples in found.items()
        for index, part in enumerate(PARTS.get(name, (name,)))
        if name not in YARDSTICKS
    }
    layer = PARTS["layer"]
    layer_ms = sum(medians[part]["median"] for part in layer)
    costs: dict[str, Cost] = {**kernel_costs(shape), **dict(zip(PARTS["logits"], router_costs(shape), strict=True))}
    roofs = {part: cost.roofline_ms(ceilings) for part, cost in costs.items()}
    roofs |= dict(zip(layer, layer_roofline_ms(shape, ceilings), strict=True))
    copied = timing.summary([sample[0] for sample in found["copy_as_combine"]])["median"]
    rows = []
    for part, summary in medians.items():
        ms, cost = summary["median"], costs.get(part)
        row = {
            "kernel": part,
            "ms": summary,
            "tflops": None if cost is None else round(cost.flops / ms / 1e9, 6),
            "gbps": None if cost is None else round(cost.bytes / ms / 1e6, 6),
            "of_roofline": round(roofs[part] / ms, 4) if part in roofs else None,
            "of_layer": round(ms / layer_ms, 4),
            "of_copy": round(copied / ms, 4) if part.startswith("combine") else None,
        }
        rows.append(row)
    return rows


def flop_rate(tflops: float) -> str:
    return f"{tflops:.4g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.4g} GFLOP/s"


def describe(row: Row) -> str:
    """The row as one line of the printed table."""
    flops = flop_rate(row["tflops"]) if row["tflops"] else ""  # 0 where rows are only moved
    rates = "" if row["gbps"] is None else f"{flops:>15}  {row['gbps']:7.4g} GB/s"
    roof = "" if row["of_roofline"] is None else f"{100 * row['of_roofline']:5.1f}% of its roofline"
    share = f"{100 * row['of_layer']:5.1f}% of the layer"
    copy = "" if row["of_copy"] is None else f"  {100 * row['of_copy']:5.1f}% of a copy of as many bytes"
    return f"  {row['kernel']:22} {row['ms']['median']:8.3f} ms  {share}  {rates}  {roof}{copy}"


def copier(count: int, device: torch.device) -> Callable[[], object]:
    """A function that copies ``count`` bytes: it reads and writes ``count`` bytes each."""
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def each_kernel(settings: timing.Settings, name: str, shape: MoEShape) -> Iterator[list[Row]]:
    """For each mode a list with one row per kernel; fractions are of the ceilings measured in the same rounds."""
    device = settings.device
    side, copied = MATMUL[device.type], COPY_BYTES[device.type]
    square = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    copy = copier(copied, device)
    yardsticks = {
        "matmul": timing.one_part(lambda: square @ square),
        "copy": timing.one_part(copy),
        "copy_as_combine": timing.one_part(copier(kernel_costs(shape)["combine"].bytes // 2, device), ahead=copy),
    }
    weights = peers.make_weights(shape, device, torch.bfloat16)
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    kernels = settings.kernels or select_kernels(device, torch.bfloat16, peers.layer_config(shape)).name
    whole = layer_step(peers.tilemoe_layer(shape, weights, kernels), x, torch.randn_like(x))
    steps = {
        **yardsticks,
        "layer": whole,
        **router_steps(shape, weights, x, ahead=lambda: square @ square),
        **kernel_steps(shape, weights, x.detach(), kernels, ahead=copy),
    }
    for mode in settings.modes:
        found = timing.rounds(steps, mode, settings.rounds)
        tflops = 2 * side**3 / timing.summary([sample[0] for sample in found["matmul"]])["median"] / 1e9
        tbps = 2 * copied / timing.summary([sample[0] for sample in found["copy"]])["median"] / 1e9
        ceilings = Ceilings(tflops, tbps, is_measured=True)
        print(f"{name} {mode}: matmul {flop_rate(tflops)}, copy {1e3 * tbps:.4g} GB/s", flush=True)
        where = {
            "case": name, **asdict(shape), "mode": mode, "kernels": kernels, "rounds": settings.rounds,
            "matmul_tflops": round(tflops, 6), "copy_tbps": round(tbps, 6),
        }  # fmt: skip
        yield [{**where, **row} for row in kernel_rows(found, shape, ceilings)]

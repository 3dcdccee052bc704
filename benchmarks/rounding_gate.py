"""The gate before the stopwatch of token rounding: a layer that routes or computes something else is not timed.

T tokens · E experts · f rows of an expert under top-K · r rows that it computes

Routing is compared with plain PyTorch on the CPU from the same logits, by pairs, scores and gradient, and the experts,
by output and gradients, with the torch backend on the same rows: on the very size that is timed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import tilemoe
from tilemoe.bench import gate, peers
from tilemoe.config import MoEConfig
from tilemoe.layers.moe import MoE
from tilemoe.plan import RoutingPlan

DRAWING = ("stochastic", "nearest_score")  # a GPU draws other numbers than a CPU
# Scores that differ in their last bit may change places: so many pairs may be others, or such a share of them.
MAX_OTHER_PAIRS, MAX_OTHER_SHARE = 16, 1e-4
GRAD_TOLERANCE = 1e-3


def problem_of_routing(logits: Tensor, cfg: MoEConfig) -> str | None:
    """None if ``cfg`` routes logits (T, E) as plain PyTorch does, else what is off."""
    leaves = [logits.detach().requires_grad_(), logits.detach().cpu().requires_grad_()]
    found = tilemoe.route(leaves[0], cfg)
    if cfg.rounding is not None:
        tile = cfg.rounding.tile
        r = found.tokens_per_expert.cpu()
        f = tilemoe.route(leaves[1].detach(), replace(cfg, rounding=None)).tokens_per_expert
        if bool((r % tile).any()):
            return "an expert's rows are no multiple of the tile"
        if bool(((r - f).abs() >= tile).any()):
            return "an expert's rows are a tile or more from top-K's"
        if cfg.rounding.mode in DRAWING:
            return None
    expected = tilemoe.route(leaves[1], cfg)
    dense, wanted = found.dense().cpu(), expected.dense()
    differs = (dense != 0) != (wanted != 0)
    if int(differs.sum()) > max(MAX_OTHER_PAIRS, MAX_OTHER_SHARE * found.plan.num_pairs):
        return f"{int(differs.sum())} pairs are not those of plain PyTorch"
    if not torch.allclose(dense[~differs], wanted[~differs], rtol=1e-4, atol=1e-7):
        return "the scores are not those of plain PyTorch"
    weight = torch.randn_like(wanted).masked_fill(differs, 0.0)
    (grad,) = torch.autograd.grad(found.dense(), leaves[0], weight.to(logits.device))
    (exact,) = torch.autograd.grad(wanted, leaves[1], weight)
    error = relative(grad.cpu(), exact)
    return None if error <= GRAD_TOLERANCE else f"the gradient of the logits is off by {error:.2e} RMS-relative"


def problem_of_experts(layer: MoE, x: Tensor, do: Tensor, plan: RoutingPlan, scores: Tensor) -> str | None:
    """None if output and gradients agree with the torch backend on the rows of ``plan``, else what does not."""
    w1, w2 = layer.experts.w1, layer.experts.w2
    inputs = {"dx": x.detach().requires_grad_(), "dw1": w1, "dw2": w2, "ds": scores.detach().requires_grad_()}
    of_set = []
    for kernels in (layer.experts.kernels, "torch"):
        gate.poison(x.device)
        out = tilemoe.moe(inputs["dx"], w1, w2, plan, inputs["ds"], kernels=kernels)
        of_set.append((out.detach(), *torch.autograd.grad(out, list(inputs.values()), do)))
    for what, found, expected in zip(("output", *inputs), *of_set, strict=True):
        error = relative(found, expected)
        if not error <= peers.TOLERANCES["bf16"]:
            return f"{what} is off by {error:.2e} RMS-relative"
    return None


def relative(found: Tensor, expected: Tensor) -> float:
    """RMS error over RMS value."""
    off = torch.linalg.vector_norm(found - expected, dtype=torch.float32)
    return float(off / torch.linalg.vector_norm(expected, dtype=torch.float32))

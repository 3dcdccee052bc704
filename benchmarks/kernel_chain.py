"""Each kernel of a KernelSet by itself, on the inputs that the one before it makes.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peers
import timing
import torch

import tilemoe
from tilemoe.activations import activation_spec
from tilemoe.kernels.select import kernel_set
from tilemoe.perf.shape import MoEShape


def one_part(run: Callable[[], Any]) -> timing.Step:
    """A step of `timing.rounds` that is timed as a whole."""

    def step() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        start = timing.event()
        run()
        return [(start, timing.event())]

    return step


def steps(shape: MoEShape, kernels: str) -> dict[str, timing.Step]:
    """The eight kernels by name, SwiGLU, bf16, random routing."""
    ks = kernel_set(kernels)
    weights = peers.make_weights(shape, torch.device("cuda"), torch.bfloat16)
    w1, w2 = weights.w1.detach(), weights.w2.detach()
    x = torch.randn(shape.num_tokens, shape.hidden_size, device="cuda", dtype=torch.bfloat16)
    do = torch.randn_like(x)
    logits = torch.rand(shape.num_tokens, shape.num_experts, device="cuda")
    scores, ids = logits.topk(shape.num_experts_per_tok, dim=-1)
    plan, s = tilemoe.plan_topk(ids, shape.num_experts), scores.softmax(dim=-1).flatten()
    spec = activation_spec("swiglu", "concatenated", None, None)
    a, h = ks.up_proj_act(x, w1, None, plan, spec)
    y = ks.down_proj(a, w2, None, plan)
    dh, _, a_scaled = ks.down_proj_act_grad(do, w2, None, h, s, plan, spec)
    runs: dict[str, Callable[[], Any]] = {
        "up_proj_act": lambda: ks.up_proj_act(x, w1, None, plan, spec),
        "down_proj": lambda: ks.down_proj(a, w2, None, plan),
        "combine": lambda: ks.combine(y, s, plan),
        "down_proj_act_grad": lambda: ks.down_proj_act_grad(do, w2, None, h, s, plan, spec),
        "down_proj_weight_grad": lambda: ks.down_proj_weight_grad(do, a_scaled, plan),
        "up_proj_act_grad": lambda: ks.up_proj_act_grad(dh, w1, plan),
        "up_proj_weight_grad": lambda: ks.up_proj_weight_grad(x, dh, plan),
        "combine_grad": lambda: ks.combine_grad(y, plan),  # it sums rows of that shape, whatever they are
    }
    return {name: one_part(run) for name, run in runs.items()}

"""B2 and B4 on one Hopper GPU with FP8 operands beside bf16, also where `quantizes_wgrad` keeps to bf16.

    python benchmarks/fp8_wgrads.py --rounds 3

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R_max row capacity · w = 2n

Times in FP8 include quantising and transposing the operands. Rows are appended to results/kernel_variants.jsonl as
"FP8 weight gradients"; those of d52e1a2 have the GEMM alone, too.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tilemoe import config
from tilemoe.bench import cases, record, timing
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.hopper_fp8.backend import HopperFp8Backend
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.shape import MoEShape

WHAT, DEVICE, DTYPE = "FP8 weight gradients", "cuda", torch.bfloat16
WIDE, NARROW = HopperBackend(), HopperFp8Backend()  # operands of 16 bits and of 8
MORE = {
    "Mixtral, 16384 tokens": MoEShape(16384, 4096, 14336, 8, 2),
    "DeepSeek-V3, 32 experts": MoEShape(16384, 7168, 2048, 32, 8),
    "d 4096, n 1024": MoEShape(32768, 4096, 1024, 64, 8),
    "d 3072, n 2048": MoEShape(32768, 3072, 2048, 32, 4),
}


def operands(shape: MoEShape) -> tuple[RoutingPlan, Tensor, Tensor, Tensor]:
    """(plan, x (T, d), dh (R_max, w), a_scaled (R_max, n)); x stands for do, too."""
    logits = torch.rand(shape.num_tokens, shape.num_experts, device=DEVICE)
    plan = plan_topk(logits.topk(shape.num_experts_per_tok, dim=1).indices, shape.num_experts)
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=DEVICE, dtype=DTYPE)
    widths = (shape.width, shape.intermediate_size)
    dh, a = (torch.randn(plan.capacity, width, device=DEVICE, dtype=DTYPE) for width in widths)
    return plan, x, dh, a


def relative_error(found: Tensor, exact: Tensor) -> float:
    """In fp32: in fp64, as `tilemoe.testing` has it, the largest gradients would not fit."""
    return round(float((found.float() - exact.float()).norm() / exact.float().norm()), 5)


def measure(name: str, shape: MoEShape, count: int) -> dict[str, Any]:
    plan, x, dh, a = operands(shape)
    errors = {
        "dw1": relative_error(NARROW.up_proj_wgrad(x, dh, plan), WIDE.up_proj_wgrad(x, dh, plan)),
        "dw2": relative_error(NARROW.down_proj_wgrad(x, a, plan), WIDE.down_proj_wgrad(x, a, plan)),
    }
    runs = {
        "B4 bf16": lambda: WIDE.up_proj_wgrad(x, dh, plan),
        "B2 bf16": lambda: WIDE.down_proj_wgrad(x, a, plan),
        "B4 fp8": lambda: NARROW.up_proj_wgrad(x, dh, plan),
        "B2 fp8": lambda: NARROW.down_proj_wgrad(x, a, plan),
    }
    found = timing.rounds({step: timing.one_part(run) for step, run in runs.items()}, "sustained", count)
    ms = {step: timing.summary([sample[0] for sample in samples])["median"] for step, samples in found.items()}
    print(name, errors, ms, flush=True)
    return {
        "what": WHAT,
        "case": name,
        **asdict(shape),
        "mode": "sustained",
        "relative_error_to_bf16": errors,
        "ms": ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    with mock.patch.multiple(config, FP8_WGRAD_WIDTH=1, FP8_WGRAD_ELEMENTS=1):
        for name, shape in {**cases.find("OLMoE,Qwen3-Next,Qwen3-235B,30B-n256"), **MORE}.items():
            record.append("kernel_variants", [measure(name, shape, args.rounds)])
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""B2 and B4 on one Hopper GPU with FP8 operands beside bf16, also where `quantizes_wgrad` keeps to bf16.

    python benchmarks/fp8_wgrads.py --rounds 3 [--rows-per-expert 256,512,1024]
    python benchmarks/fp8_wgrads.py --sums

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R_max row capacity · w = 2n

Times in FP8 include quantising and transposing the operands. Rows are appended to results/kernel_variants.jsonl;
those of d52e1a2 have the GEMM alone, too. With ``--rows-per-expert`` the host's time does not count. ``--sums`` times
nothing: it compares B4 of one expert to an fp64 product of the same rounded operands, for more and more rows and for
operands with a common mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tilemoe import config
from tilemoe.bench import cases, layer, record, timing
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.hopper_fp8.backend import HopperFp8Backend
from tilemoe.kernels.experts.hopper_fp8.host import CHUNK
from tilemoe.kernels.experts.quantize import BLOCK
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.shape import MoEShape

WHAT, FEW, SUMS = "FP8 weight gradients", "FP8 weight gradients, few rows", "FP8 sums over an expert's rows"
DEVICE, DTYPE = "cuda", torch.bfloat16
WIDE, NARROW = HopperBackend(), HopperFp8Backend()  # operands of 16 bits and of 8
WIDTH, ROWS, MEANS = 1024, [1 << power for power in range(9, 18)], (0.0, 0.25, 0.5, 1.0)  # of the sums
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


def measure(what: str, name: str, shape: MoEShape, count: int) -> dict[str, Any]:
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
    mode = "alone" if what == FEW else "sustained"  # a host that launches anew takes longer than kernels of few rows
    found = layer.rounds({step: timing.one_part(run) for step, run in runs.items()}, mode, count)
    ms = {step: timing.summary([sample[0] for sample in samples])["median"] for step, samples in found.items()}
    print(name, errors, ms, flush=True)
    return {
        "what": what,
        "case": name,
        **asdict(shape),
        "mode": mode,
        "relative_error_to_bf16": errors,
        "ms": ms,
    }


def cases_of(rows_per_expert: int) -> Iterator[tuple[str, MoEShape]]:
    """All cases, with as many tokens as give each expert ``rows_per_expert`` on average; 0: with their own."""
    for name, shape in {**cases.find("OLMoE,Qwen3-Next,Qwen3-235B,30B-n256"), **MORE}.items():
        if rows_per_expert == 0:
            yield name, shape
        else:
            tokens = rows_per_expert * shape.num_experts // shape.num_experts_per_tok
            yield f"{name}, {rows_per_expert} rows per expert", replace(shape, num_tokens=tokens)


def measure_sums(rows: int, mean: float) -> dict[str, Any]:
    """How far B4's sums over ``rows`` rows are off; a mean is in units of the operands' standard deviation.

    x and dh are e4m3 values of a narrow range, each row with 448 in it, so that quantising them again is exact, with
    scales of 1: all that differs is the sum.
    """
    plan = plan_topk(torch.zeros(rows, 1, device=DEVICE, dtype=torch.int64), 1)
    x, dh = ((torch.randn(rows, WIDTH, device=DEVICE) + mean) * 32 for _ in range(2))
    x, dh = (t.clamp(-448, 448).to(torch.float8_e4m3fn).to(DTYPE) for t in (x, dh))
    x[:, 0], dh[:, 0] = 448, 448
    exact = torch.zeros(WIDTH, WIDTH, device=DEVICE, dtype=torch.float64)
    for some in torch.arange(rows, device=DEVICE).split(8192):
        exact += dh[some].double().T @ x[some].double()
    found = torch.zeros(1, WIDTH, WIDTH, device=DEVICE)
    NARROW.up_proj_wgrad(x, dh, plan, out=found)
    found, exact = found[0, 1:, 1:].double(), exact[1:, 1:]
    return {
        "what": SUMS,
        "rows": rows,
        "width": WIDTH,
        "chunk_rows": CHUNK * BLOCK,
        "mean_of_operands": mean,
        "error_rms_percent": round(100 * float((found - exact).norm() / exact.norm()), 4),
        "smaller_by_percent": round(100 * (1 - float((found * exact).sum() / exact.square().sum())), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows-per-expert", default="0", help="commas between; 0: as many as the cases have")
    parser.add_argument("--sums", action="store_true", help="the errors of long sums instead of times")
    args = parser.parse_args()
    torch.manual_seed(0)
    with mock.patch.multiple(config, FP8_WGRAD_WIDTH=1, FP8_WGRAD_ELEMENTS=1):
        if args.sums:
            record.append("kernel_variants", [measure_sums(rows, mean) for mean in MEANS for rows in ROWS])
            return
        for rows_per_expert in map(int, args.rows_per_expert.split(",")):
            what = FEW if rows_per_expert else WHAT
            for name, shape in cases_of(rows_per_expert):
                record.append("kernel_variants", [measure(what, name, shape, args.rounds)])
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""FP8 GEMMs on one GPU: F1, F2, B1 and B3 beside their bf16 forms, cuBLAS's blockwise rate, and what quantising takes.

    python benchmarks/fp8_rates.py --cases OLMoE,Qwen3-Next

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R = T K rows

cuBLAS multiplies dense matrices of F1's size, (R, d) by (d, 2n), with block scales: 1 x 128 and 128 x 128. Rows are
appended to results/fp8_rates.jsonl, a list for each case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tilemoe.bench import cases, kernels, peers, record, timing
from tilemoe.kernels.experts.quantize import ROWS, WEIGHTS, quantize
from tilemoe.kernels.experts.triton_fp8.quantize import row_weight_launch, rows_launch
from tilemoe.shape import MoEShape

DEVICE, DTYPE = "cuda", torch.bfloat16
GEMMS = ("up_proj_act", "down_proj", "down_proj_dgrad_dact", "up_proj_dgrad")


def cublas(rows: int, width_in: int, width_out: int) -> Callable[[], Tensor]:
    """(rows, width_in) by (width_in, width_out), scales 1 x 128 of the left and 128 x 128 of the right."""
    left = quantize(torch.randn(rows, width_in, device=DEVICE), ROWS)
    right = quantize(torch.randn(width_out, width_in, device=DEVICE), WEIGHTS)
    left_scale = left.scale.t().contiguous().t()  # along the rows, as cuBLAS wants it
    return lambda: torch._scaled_mm(left.data, right.data.t(), left_scale, right.scale.t(), out_dtype=DTYPE)


def steps(shape: MoEShape) -> dict[str, timing.Step]:
    weights = peers.make_weights(shape, torch.device(DEVICE), DTYPE)
    w1 = weights.w1.detach()
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=DEVICE, dtype=DTYPE)
    dh = torch.randn(shape.num_rows, shape.width, device=DEVICE, dtype=DTYPE)
    wide = kernels.kernel_steps(shape, weights, x, "hopper", ahead=lambda: None)
    narrow = kernels.kernel_steps(shape, weights, x, "hopper_fp8", ahead=lambda: None)
    runs = {
        "cublas": cublas(shape.num_rows, shape.hidden_size, shape.width),
        "quantize x": lambda: rows_launch(x, x.shape[1])[0].run(),
        "quantize dh": lambda: rows_launch(dh, dh.shape[1])[0].run(),
        "quantize w1": lambda: [row_weight_launch(w)[0].run() for w in (w1, w1.transpose(1, 2))],
    }
    return {
        **{f"{name} bf16": wide[name] for name in GEMMS},
        **{f"{name} fp8": narrow[name] for name in GEMMS},
        **{name: timing.one_part(run) for name, run in runs.items()},
    }


def flops_of(step: str, shape: MoEShape) -> int | None:
    """None of what only moves values."""
    products = 2 * shape.num_rows * shape.hidden_size * shape.intermediate_size
    of_gate_and_up = ("up_proj_act", "up_proj_dgrad", "cublas")
    if step.startswith("quantize"):
        return None
    return products * shape.width // shape.intermediate_size if step.split()[0] in of_gate_and_up else products


def measure(name: str, shape: MoEShape, count: int) -> list[dict[str, Any]]:
    found = timing.rounds(steps(shape), "sustained", count)
    rows = []
    for step, samples in found.items():
        ms, flops = timing.summary([sample[0] for sample in samples]), flops_of(step, shape)
        rate = None if flops is None else round(flops / ms["median"] / 1e9, 1)
        rows.append({"case": name, **asdict(shape), "mode": "sustained", "step": step, "ms": ms, "tflops": rate})
        print(f"{name:12} {step:28} {ms['median']:8.3f} ms {rate or '':>7}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="OLMoE,Qwen3-Next,Qwen3-235B,30B-n256")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    for name, shape in cases.find(args.cases).items():
        record.append("fp8_rates", measure(name, shape, args.rounds))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""A program to be run under compute-sanitizer: every Triton kernel on small hostile routings, nothing is compared.

``python sanitizer_cases.py all``: the portable kernels and those that are chosen on this GPU, on every routing;
``portable``, ``chosen``: those alone, on a few; ``planted``: one write past the end, which must be found.
"""

import sys

import torch
import triton
import triton.language as tl
from gpu_layers import LAYERS, make_input, make_layer, step
from triton_checks import turn

from tilemoe.activations import activation_spec
from tilemoe.kernels.choose import choose_experts
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.testing import forward_and_grads, hostile_routings, make_inputs

# dtype, activation, layout, bias, other stride order, precision.
CASES = (
    (torch.bfloat16, "swiglu", "concatenated", False, False, "bf16"),
    (torch.float16, "swiglu_oai", "interleaved", True, True, "bf16"),
    (torch.float32, "relu2", "concatenated", True, False, "bf16"),
    (torch.bfloat16, "swiglu", "concatenated", False, False, "fp8"),
    (torch.float16, "relu2", "concatenated", True, True, "fp8"),
)
# d and n that fill no tile, so that every edge is masked; as few as FP8 takes.
WIDTHS = {"bf16": (136, 72), "fp8": (256, 128)}
TILE = 128
FEW = ("ragged tiles", "sentinels", "pairs, unordered")


@triton.jit
def write_past_the_end_kernel(out, size, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) <= size)


def backends(which: str, dtype: torch.dtype, precision: str) -> list[str]:
    """Names of the backends to run, without plain PyTorch's, and those that compute in another precision."""
    chosen = {choose_experts(torch.device("cuda"), dtype, WIDTHS[precision], precision).name}
    wanted = {"portable": {"triton"}, "chosen": chosen, "all": {"triton"} | chosen}[which]
    return sorted(name for name in wanted - {"torch"} if backend_named(name).precision == precision)


def multiply_in_4_bit(plan: RoutingPlan, dtype: torch.dtype, storage: str) -> None:
    """With a packed weight whose blocks run along the contraction, and along the output; neither width fills a tile."""
    kernels, spec = TritonBackend(), activation_spec("relu", "concatenated", None, None)
    dense = torch.randn(plan.num_experts, 192, 320, device=plan.device)
    weight = kernels.whole_scales(STORAGES[storage].quantize(dense))
    for each in (weight, weight.transpose(1, 2)):
        _, width_out, width_in = each.shape
        by_token, by_row = (
            torch.randn(rows, width_in, device=plan.device).to(dtype) for rows in (plan.num_tokens, plan.capacity)
        )
        bias = torch.randn(plan.num_experts, width_out, device=plan.device).to(dtype)
        kernels.up_proj(by_token, each, bias, plan, spec)
        kernels.down_proj(by_row, each, bias, plan)
        kernels.up_proj_dgrad(by_row, each.transpose(1, 2), plan)


def main(which: str) -> None:
    if which == "planted":
        write_past_the_end_kernel[(1,)](torch.zeros(1000, device="cuda"), 1000, BLOCK=1024)
        torch.cuda.synchronize()
        return
    runs = 0
    for routing in hostile_routings(TILE, "cuda"):
        if which != "all" and routing.name not in FEW:
            continue
        for dtype, activation, gate_up, bias, transposed, precision in CASES:
            inputs = make_inputs(routing.plan, *WIDTHS[precision], activation, dtype=dtype, bias=bias)
            if transposed:
                inputs |= {name: turn(inputs[name]) for name in ("w1", "w2")}
            if which != "chosen" and precision == "bf16":
                for storage in STORAGES:
                    multiply_in_4_bit(routing.plan, dtype, storage)
                runs += 1
            for kernels in backends(which, dtype, precision):
                options = {"activation": activation, "gate_up": gate_up, "kernels": kernels, "precision": precision}
                forward_and_grads(moe, inputs, routing.plan, **options)
                with torch.no_grad():
                    moe(plan=routing.plan, **options, **inputs)
                runs += 1
    for name, (_, _, kernels) in LAYERS.items():
        if which == "portable" and kernels is None:
            continue
        layer = make_layer(name)
        step(layer, *make_input(layer, TILE + 3))
        runs += 1
    torch.cuda.synchronize()
    print(f"ran {runs} cases")


if __name__ == "__main__":
    main(sys.argv[1])

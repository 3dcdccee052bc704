"""The expert-parallel layer against its parts: what its experts compute, and its bytes at the speed of the link.

    torchrun --nproc-per-node 4 benchmarks/expert_parallel.py --cases 7B-n256,Qwen3-Next

T tokens of a process · d hidden_size · E experts · K experts per token. Forward and backward of router, experts and
exchanges, bf16; every process has T tokens. Times are of the slowest process. ``bound_ms`` is the compute, measured
with the tokens already where they belong, plus the most bytes that a process sends, at --link-gb-per-s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tilemoe.bench import cases, check, record, timing
from tilemoe.config import EXCHANGES, MoEConfig
from tilemoe.dispatch.choose import Transports
from tilemoe.layers.moe import MoE
from tilemoe.ops.moe import moe
from tilemoe.parallel.expert import divide_experts
from tilemoe.routing.topk import route
from tilemoe.shape import MoEShape

_TOLERANCE = 0.02  # relative, of bf16 sums in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="7B-n256,Qwen3-Next")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5, help="calls of a round")
    parser.add_argument("--exchange", choices=EXCHANGES, default="auto")
    parser.add_argument("--link-gb-per-s", type=float, default=370.0)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    for name, shape in cases.find(options.cases).items():
        row = measure(shape, options.rounds, options.calls, options.link_gb_per_s, options.exchange)
        if dist.get_rank() == 0:
            print(name, row, flush=True)
            record.append("expert_parallel", [{"case": name, "mode": "sustained", **row}])
    dist.destroy_process_group()


def measure(shape: MoEShape, rounds: int, calls: int, link: float, exchange: str = "auto") -> dict[str, Any]:
    """One row of the results; all processes call it. AssertionError: the layer computes something else."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    cfg = MoEConfig(shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.num_experts_per_tok)
    layer = MoE(cfg, device=device, dtype=torch.bfloat16)
    torch.manual_seed(1 + dist.get_rank())
    x, do = torch.randn(2, shape.num_tokens, shape.hidden_size, device=device).bfloat16()
    x.requires_grad_()
    expected = _step(layer, x, do)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    transports = Transports(mesh.get_group(), exchange)
    divide_experts([layer.experts], mesh, transports)
    errors = dict(zip(("output", "dx"), map(check.relative, _step(layer, x, do), expected), strict=True))
    problem = check.first_off(errors, _TOLERANCE)
    assert problem is None, f"the layer's {problem}: not timed"
    del expected
    compute, sent_bytes = _compute_alone(layer, x, do)
    steps: dict[str, Callable[[], object]] = {"layer": lambda: _step(layer, x, do), "compute": compute}
    found = timing.in_turn({name: partial(_slowest, step, calls) for name, step in steps.items()}, rounds)
    layer_ms, compute_ms = (statistics.median(found[name]) for name in ("layer", "compute"))
    most = torch.tensor([sent_bytes], dtype=torch.int64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    link_ms = most.item() / link / 1e6
    return {
        "ranks": dist.get_world_size(),
        "transport": type(transports.of(device)).__name__,
        "layer_ms": timing.summary(found["layer"]),
        "compute_ms": timing.summary(found["compute"]),
        "bytes": int(most.item()),
        "link_ms": round(link_ms, 4),
        "bound_ms": round(compute_ms + link_ms, 4),
        "over_bound": round(layer_ms / (compute_ms + link_ms), 4),
        "communication_share": round(1 - compute_ms / layer_ms, 4),
    }


def _step(layer: MoE, x: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward: (output, gradient of x)."""
    layer.zero_grad()
    x.grad = None
    hidden = layer(x).hidden
    hidden.backward(do)
    assert x.grad is not None
    return hidden.detach(), x.grad


def _compute_alone(layer: MoE, x: Tensor, do: Tensor) -> tuple[Callable[[], object], int]:
    """(the layer's work with every token in place; the bytes of tokens that this process sends in a step)."""
    experts, cfg = layer.experts, layer.cfg
    with torch.no_grad():
        routing = route(layer.router(x).logits, cfg)
        here = experts.dispatcher.dispatch(x, routing.plan, routing.scores)
    assert here.sent is not None
    there, scores = here.x.requires_grad_(), here.scores.requires_grad_()
    d_there = torch.randn_like(there)
    d_scores = torch.randn_like(routing.scores)

    def run() -> None:
        layer.zero_grad()
        x.grad = there.grad = scores.grad = None
        own = route(layer.router(x).logits, cfg)
        own.scores.backward(d_scores)
        weights = (experts.dispatcher.local_weight(weight) for weight in (experts.w1, experts.w2))
        moe(there, *weights, here.plan, scores, cfg.activation, cfg.gate_up).backward(d_there)

    copies = 2 * (sum(here.sent.tokens.out) + sum(here.sent.tokens.into))  # x and do; o and dx
    return run, copies * x.shape[1] * x.element_size()


def _slowest(step: Callable[[], object], calls: int) -> float:
    """Milliseconds of a call, of the process that takes longest; a call to settle comes first."""
    step()
    timing.synchronize()
    dist.barrier()
    taken = torch.tensor([timing.wall_ms(step, calls)])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


if __name__ == "__main__":
    main()

"""The expert-parallel layer against its parts: what its experts compute, and its bytes at the speed of the link.

    torchrun --nproc-per-node 4 benchmarks/expert_parallel.py --cases 7B-n256,Qwen3-Next [--tokens 4096,8192]

T tokens of a process · d hidden_size · E experts · K experts per token · W processes. Forward and backward of router,
experts and exchanges, bf16; every process has T tokens. Times are of the slowest process, [forward, backward]: "eager",
and, where tokens are exchanged through windows, replayed as two CUDA graphs ("graph"). ``bound_ms`` is the compute,
measured with the tokens already where they belong, plus the most bytes that a process sends, at --link-gb-per-s.
``saved_bytes``: between forward and backward, beside what the caller has.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tilemoe.bench import cases, check, record, timing
from tilemoe.config import EXCHANGES, MoEConfig
from tilemoe.dispatch.base import Dispatched
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
    parser.add_argument("--tokens", type=_numbers, default=[], help="of a process, in place of the cases' own")
    parser.add_argument("--keep-received", action="store_true", help="see ParallelConfig")
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
        for tokens in options.tokens or [shape.num_tokens]:
            row = measure(replace(shape, num_tokens=tokens), options)
            if dist.get_rank() == 0:
                print(name, tokens, row, flush=True)
                record.append("expert_parallel", [{"case": name, "tokens": tokens, "mode": "sustained", **row}])
    dist.destroy_process_group()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def measure(shape: MoEShape, options: argparse.Namespace) -> dict[str, Any]:
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
    transports = Transports(mesh.get_group(), options.exchange, options.keep_received)
    divide_experts([layer.experts], mesh, transports)
    errors = dict(zip(("output", "dx"), map(check.relative, _step(layer, x, do), expected), strict=True))
    problem = check.first_off(errors, _TOLERANCE)
    assert problem is None, f"the layer's {problem}: not timed"
    del expected
    transport = type(transports.of(device)).__name__
    saved_bytes = _saved_bytes(layer, x)
    compute, sent_bytes = _compute_alone(layer, x, do)
    steps = {"eager": timing.in_parts(partial(_parts, layer, x, do)), "compute": timing.one_part(compute)}
    if transport == "Windows":
        steps["graph"] = timing.in_parts(_graphs(layer, x, do))
    turns = {name: partial(_slowest, step, options.calls) for name, step in steps.items()}
    found = timing.in_turn(turns, options.rounds)
    ms = {name: [round(statistics.median(part), 4) for part in zip(*found[name], strict=True)] for name in steps}
    layer_ms, bound_ms = min(sum(ms[name]) for name in ms if name != "compute"), ms["compute"][0]
    most = torch.tensor([sent_bytes], dtype=torch.int64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    link_ms = most.item() / options.link_gb_per_s / 1e6
    bound_ms += link_ms
    return {
        "ranks": dist.get_world_size(),
        "transport": transport,
        "keep_received": options.keep_received,
        "ms": ms,
        "saved_bytes": saved_bytes,
        "bytes": int(most.item()),
        "link_ms": round(link_ms, 4),
        "bound_ms": round(bound_ms, 4),
        "over_bound": round(layer_ms / bound_ms, 4),
    }


def _parts(layer: MoE, x: Tensor, do: Tensor) -> Iterator[Any]:
    """Forward, then backward."""
    layer.zero_grad()
    x.grad = None
    hidden = layer(x).hidden
    yield hidden
    hidden.backward(do)
    yield None


def _graphs(layer: MoE, x: Tensor, do: Tensor) -> Callable[[], Iterator[object]]:
    """The same parts, each replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what is recorded at the first calls is recorded now
            _step(layer, x, do)
    torch.cuda.current_stream().wait_stream(stream)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    layer.zero_grad()
    x.grad = None
    with torch.cuda.graph(forward):
        hidden = layer(x).hidden
    with torch.cuda.graph(backward, pool=forward.pool()):
        hidden.backward(do)

    def parts() -> Iterator[object]:
        forward.replay()
        yield hidden
        backward.replay()
        yield None

    return parts


def _saved_bytes(layer: MoE, x: Tensor) -> int:
    if not x.is_cuda:
        return 0
    hidden, left, _ = timing.memory_of(lambda: layer(x).hidden)
    return left - hidden.nbytes


def _step(layer: MoE, x: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward: (output, gradient of x)."""
    hidden, _ = _parts(layer, x, do)
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

    return run, 2 * _copies(here) * x.shape[1] * x.element_size()  # x and do; o and dx


def _copies(here: Dispatched) -> int:
    """Rows that this process sends in a forward: tokens to the others, and the results of their tokens."""
    sent: Any = here.sent
    ranks, rank = dist.get_world_size(), dist.get_rank()
    places = sent if hasattr(sent, "copy_of_token") else sent.places
    to_each = (places.copy_of_token.view(-1, ranks) >= 0).sum(0)
    between = [torch.empty_like(to_each) for _ in range(ranks)]
    dist.all_gather(between, to_each)
    sent_here = torch.stack(between).fill_diagonal_(0)
    return int(sent_here[rank].sum() + sent_here[:, rank].sum())


def _slowest(step: timing.Step, calls: int) -> list[float]:
    """Median milliseconds of each part, of the process that takes longest; a call to settle comes first."""
    step()
    timing.synchronize()
    dist.barrier()
    marks = [step() for _ in range(calls)]
    timing.synchronize()
    taken = torch.tensor(timing.medians(marks))
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.tolist()


if __name__ == "__main__":
    main()

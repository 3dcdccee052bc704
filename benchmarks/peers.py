"""The contestants: one way to build and to call each implementation of the layer, router included.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

All compute the same function of the same weights: softmax over the K kept logits, SwiGLU, no biases. Each adapter
imports its package when it is built, so that a missing one is skipped; each must pass `gate` before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilemoe
from tilemoe.perf.shape import MoEShape

GATE_TOKENS = 384
GATE_TOLERANCE = 2e-2  # RMS error over RMS value; bf16's own is 3e-3 to 1e-2


@dataclass(frozen=True, eq=False)
class Weights:
    """router (E, d), w1 (E, 2n, d) with rows [gate; up], w2 (E, d, n): parameters, shared by the contestants."""

    router: nn.Parameter
    w1: nn.Parameter
    w2: nn.Parameter


@dataclass(frozen=True, eq=False)
class Contestant:
    """``run(x)`` gives the output (T, d); ``leaves`` are router, w1, w2 as it keeps them; ``w1_rows`` puts the rows of
    its w1's gradient into the order [gate; up].
    """

    name: str
    run: Callable[[Tensor], Tensor]
    leaves: tuple[Tensor, Tensor, Tensor]
    w1_rows: Callable[[Tensor], Tensor]


def make_weights(shape: MoEShape, device: torch.device, dtype: torch.dtype) -> Weights:
    """Scaled so that activations and outputs stay O(1)."""
    d, n, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts

    def normal(*sizes: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(sizes, device=device, dtype=dtype) * sizes[-1] ** -0.5)

    return Weights(normal(experts, d), normal(experts, 2 * n, d), normal(experts, d, n))


def tilemoe_layer(shape: MoEShape, weights: Weights, kernels: str | None = None) -> Contestant:
    """Ours, as a user builds it; ``kernels`` names a KernelSet."""
    router = tilemoe.RouterConfig(score="softmax", softmax_after_topk=True)
    cfg = tilemoe.MoEConfig(
        shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.num_experts_per_tok, router=router
    )
    moe = tilemoe.MoE(cfg, device="meta", kernels=kernels)
    moe.router.weight, moe.experts.w1, moe.experts.w2 = weights.router, weights.w1, weights.w2
    name = "tilemoe" if kernels is None else f"tilemoe[{kernels}]"
    return Contestant(name, lambda x: moe(x).hidden, (weights.router, weights.w1, weights.w2), lambda grad: grad)


def sonic_moe(shape: MoEShape, weights: Weights) -> Contestant:
    """sonic-moe 0.1.2.post1: its router, top-K and experts without its auxiliary loss; gate and up rows alternate."""
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    n = shape.intermediate_size
    w1 = nn.Parameter(weights.w1.detach().unflatten(1, (2, n)).transpose(1, 2).flatten(1, 2).contiguous())
    w1_turned, w2_turned = w1.permute(1, 2, 0), weights.w2.permute(1, 2, 0)
    stream = torch.cuda.current_stream().cuda_stream

    def run(x: Tensor) -> Tensor:
        out = moe_TC_softmax_topk_layer(
            x, weights.router, w1_turned, None, w2_turned, None, shape.num_experts_per_tok, stream
        )
        return out[0]

    def gate_then_up(grad: Tensor) -> Tensor:
        return grad.unflatten(1, (n, 2)).transpose(1, 2).flatten(1, 2)

    return Contestant("sonic-moe", run, (weights.router, w1, weights.w2), gate_then_up)


def scattermoe(shape: MoEShape, weights: Weights) -> Contestant:
    """ScatterMoE 0.3.0's gated MLP behind a plain PyTorch router; its rows are [up; gate]."""
    from scattermoe.mlp import GLUMLP

    n, k = shape.intermediate_size, shape.num_experts_per_tok
    mlp = GLUMLP(shape.hidden_size, n, shape.num_experts, k).to(weights.w2)
    mlp.output_experts.weight = weights.w2
    with torch.no_grad():
        mlp.experts.weight.copy_(weights.w1.roll(n, dims=1))

    def run(x: Tensor) -> Tensor:
        scores, ids = plain_router(x, weights.router, k)
        return mlp(x, scores.to(x.dtype), ids)

    leaves = (weights.router, mlp.experts.weight, weights.w2)
    return Contestant("scattermoe", run, leaves, lambda grad: grad.roll(n, dims=1))


def grouped_mm(shape: MoEShape, weights: Weights) -> Contestant:
    """PyTorch alone: a sort, two calls of `F.grouped_mm`, and everything else left to torch.compile."""
    k, experts = shape.num_experts_per_tok, shape.num_experts

    def run(x: Tensor) -> Tensor:
        scores, ids = plain_router(x, weights.router, k)
        expert, order = ids.flatten().sort(stable=True)
        offsets = torch.searchsorted(expert, torch.arange(1, experts + 1, device=x.device), out_int32=True)
        token = order // k
        h = F.grouped_mm(x[token], weights.w1.transpose(1, 2), offs=offsets)
        gate, up = h.chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, weights.w2.transpose(1, 2), offs=offsets)
        weighted = y * scores.flatten()[order].unsqueeze(1)
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add(0, token, weighted).to(x.dtype)

    compiled = torch.compile(run, dynamic=False)
    return Contestant("grouped_mm", compiled, (weights.router, weights.w1, weights.w2), lambda grad: grad)


def plain_router(x: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(scores (T, K) fp32, ids (T, K)): softmax over the K largest logits."""
    logits, ids = F.linear(x, weight).float().topk(k, dim=-1)
    return logits.softmax(dim=-1), ids


PEERS: MappingProxyType[str, Callable[[MoEShape, Weights], Contestant]] = MappingProxyType(
    {"tilemoe": tilemoe_layer, "sonic-moe": sonic_moe, "scattermoe": scattermoe, "grouped_mm": grouped_mm}
)


def build(name: str, shape: MoEShape, weights: Weights) -> Contestant | str:
    """The contestant, or why it cannot take part. ``tilemoe[triton]`` names a KernelSet."""
    if name.startswith("tilemoe[") and name.endswith("]"):
        return tilemoe_layer(shape, weights, name[len("tilemoe[") : -1])
    if name not in PEERS:
        raise ValueError(f"no peer called {name!r}; known are {', '.join(PEERS)}")
    try:
        return PEERS[name](shape, weights)
    except ImportError as error:
        return f"not importable here: {error}"


def gate(contestant: Contestant, shape: MoEShape, weights: Weights) -> str | None:
    """None if the output and all four gradients agree with plain loops in fp32, else what does not.

    The router's weight is replaced while this runs by one that makes each logit an entry of x, and these entries
    differ by more than bf16 rounds: so all contestants choose the same experts, whatever they compute logits in.
    """
    x, router = _gate_inputs(shape, weights)
    do = torch.randn_like(x)
    kept = weights.router.detach().clone()
    with torch.no_grad():
        weights.router.copy_(router)
    try:
        found = _output_and_gradients(contestant.run, x, do, contestant.leaves)
        exact = _exact(shape, weights, x, do)
    finally:
        with torch.no_grad():
            weights.router.copy_(kept)
    found = (*found[:3], contestant.w1_rows(found[3]), found[4])
    for what, actual, expected in zip(("output", "dx", "drouter", "dw1", "dw2"), found, exact, strict=True):
        error = float((actual.float() - expected).norm() / expected.norm())
        if not error <= GATE_TOLERANCE:
            return f"{what} is off by {error:.2e} RMS-relative"
    return None


def _gate_inputs(shape: MoEShape, weights: Weights) -> tuple[Tensor, Tensor]:
    """x (T, d) and a router's weight (E, d), such that the logits are x's first E columns: a permutation each."""
    experts, d = shape.num_experts, shape.hidden_size
    assert experts <= min(512, d), "the logits must be different numbers in bf16"
    like = weights.w1
    x = torch.randn(GATE_TOKENS, d, device=like.device, dtype=like.dtype)
    ranks = torch.rand(GATE_TOKENS, experts, device=like.device).argsort(dim=1)
    x[:, :experts] = (ranks - experts // 2) / 64
    return x.requires_grad_(), torch.eye(experts, d, device=like.device, dtype=like.dtype)


def _output_and_gradients(
    run: Callable[[Tensor], Tensor], x: Tensor, do: Tensor, leaves: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    out = run(x)
    return (out.detach(), *torch.autograd.grad(out, [x, *leaves], do))


def _exact(shape: MoEShape, weights: Weights, x: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """The reference, one expert at a time in fp32, from the same 16-bit numbers."""
    x = x.detach().float().requires_grad_()
    router = weights.router.detach().float().requires_grad_()
    logits, ids = (x @ router.t()).topk(shape.num_experts_per_tok, dim=-1)
    scores = logits.softmax(dim=-1)
    out = torch.zeros_like(x)
    per_expert = []
    for expert in range(shape.num_experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        w1, w2 = (w[expert].detach().float().requires_grad_() for w in (weights.w1, weights.w2))
        gate_rows, up_rows = (x[token] @ w1.t()).chunk(2, dim=-1)
        y = (F.silu(gate_rows) * up_rows) @ w2.t()
        out = out.index_add(0, token, y * scores[token, place].unsqueeze(1))
        per_expert.append((w1, w2))
    grads = torch.autograd.grad(out, [x, router, *(w for pair in per_expert for w in pair)], do.float())
    return (out.detach(), grads[0], grads[1], torch.stack(grads[2::2]), torch.stack(grads[3::2]))

"""A decoder whose experts another package computes: router, parameters, their names and their values stay ours.

T tokens · d hidden_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilemoe
from tilemoe.bench import peers, record
from tilemoe.config import ModelConfig
from tilemoe.layers.experts import Experts
from tilemoe.layers.moe import MoE
from tilemoe.plan import RoutingPlan, experts_of_rows
from tilemoe.shape import MoEShape

# x (T, d), scores (T, K) fp32, ids (T, K), w1 (E, 2n, d) with rows [gate; up], w2 (E, d, n) -> (T, d)
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class SwappedExperts(Experts):
    """`Experts` by a ``compute`` of somebody else's."""

    compute: Compute

    def forward(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        w1, w2 = self.w1.to(dtype), self.w2.to(dtype)
        # What peers sort themselves is all that they take of our plan.
        ids = experts_of_rows(plan.row_start_of_expert, plan.row_of_pair).clamp(min=0)  # a skipped pair: any
        return self.compute(x.to(dtype), scores, ids.view(scores.shape), w1, w2)


def swap(module: nn.Module, name: str) -> str:
    """Let the package ``name`` compute the experts of every MoE layer in ``module``; returns its version.

    Before the parameters are sharded, drawn or brought to a device. ImportError: the package is not there.
    """
    version, compute = CONTESTANTS[name]()
    for layer in module.modules():
        if compute is not None and isinstance(layer, MoE):
            experts = SwappedExperts(layer.cfg, device="meta", dtype=layer.experts.w1.dtype)
            experts.compute = compute
            layer.experts = experts
    return version


def contestant(name: str, shape: MoEShape, weights: peers.Weights) -> peers.Contestant:
    """One layer so swapped, for the gate. ImportError: the package is not there."""
    moe = tilemoe.MoE(peers.layer_config(shape), device="meta")
    version = swap(moe, name)
    moe.router.weight, moe.experts.w1, moe.experts.w2 = weights.router, weights.w1, weights.w2
    leaves = (weights.router, weights.w1, weights.w2)
    return peers.Contestant(name, version, lambda x: moe(x).hidden, leaves, lambda grad: grad)


def obstacle(name: str, model: ModelConfig, expert_parallel: int) -> str | None:
    """Why ``name`` cannot compute the experts of ``model``; None if it can. ValueError lists the names."""
    if name not in CONTESTANTS:
        raise ValueError(f"no contestant called {name!r}; known are {', '.join(CONTESTANTS)}")
    if name == "tilemoe":
        return None
    moe = model.moe
    if moe is None:
        return "the model has no experts"
    if (moe.activation, moe.gate_up, moe.expert_bias, moe.rounding) != ("swiglu", "concatenated", False, None):
        return "the adapter knows swiglu, [gate; up] rows, no biases and no rounding alone"
    return None if expert_parallel == 1 else "it does not divide experts among processes"


def _ours() -> tuple[str, Compute | None]:
    return tilemoe.__version__, None


def _scattermoe() -> tuple[str, Compute | None]:
    from scattermoe import flatten_sort_count, parallel_linear

    def compute(x: Tensor, scores: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        order = flatten_sort_count(ids, num_experts=w1.shape[0])
        h = parallel_linear(x, w1.transpose(1, 2), ids.shape[1], *order, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        a, scores = F.silu(gate) * up, scores.to(x.dtype)
        return parallel_linear(a, w2.transpose(1, 2), 1, *order, gates=scores, grouped_in=True)

    return str(record.version("scattermoe")), compute


def _grouped_mm() -> tuple[str, Compute | None]:
    if not torch.cuda.is_available():  # torch.compile would need a C++ compiler
        return f"torch {torch.__version__}", peers.grouped_mm_experts
    return f"torch {torch.__version__}, compiled", torch.compile(peers.grouped_mm_experts, dynamic=False)


CONTESTANTS = MappingProxyType({"tilemoe": _ours, "scattermoe": _scattermoe, "grouped_mm": _grouped_mm})

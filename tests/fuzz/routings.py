"""Hostile routings by the thousand: how a layer is set up, as hypothesis draws it, routings of it, what they must give.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tilemoe import reference
from tilemoe.config import ACTIVATIONS, ROUNDING_MODES, MoEConfig, RouterConfig, TokenRounding
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.routing.topk import Routing, route

TILE = 16
INF = float("inf")


@dataclass(frozen=True)
class Layer:
    """How a layer is set up. ``kind``: what its plans are made of; ``seed``: of all that is drawn for it."""

    cfg: MoEConfig
    kind: str
    tokens: int
    gate_up: str
    recompute: str | None
    biases: tuple[bool, bool]
    seed: int

    def generators(self, count: int) -> Iterator[torch.Generator]:
        """One for each of ``count`` routings."""
        return (torch.Generator().manual_seed(self.seed * 1009 + number) for number in range(count))

    @property
    def options(self) -> dict[str, str]:
        """Of `tilemoe.moe`, its reference and PyTorch's ordinary way alike."""
        return {"activation": self.cfg.activation, "gate_up": self.gate_up}


@dataclass(frozen=True)
class Drawn:
    """One routing. ``found`` and ``expected`` are what the package and the oracle give, each as a function of a leaf of
    its own: scores of the plan's pairs, (T, E) scores, loss, rows of each expert.
    """

    plan: RoutingPlan
    scores: Tensor
    leaf: Tensor
    loss: Tensor
    dense: Tensor
    oracle_leaf: Tensor
    oracle_loss: Tensor
    rows: list[int]

    @property
    def found_dense(self) -> Tensor:
        """(T, E) scores by the package."""
        return Routing(self.plan, self.scores, self.plan.rows_per_expert, self.loss).dense()


@st.composite
def layers(draw: Any, widths: tuple[int, ...], most_tokens: int, number: int) -> Layer:
    """Of d and n among ``widths``, with at most ``most_tokens`` tokens, or where rows are rounded a tile more.

    number: of the part, from which seeds count: so its plainest layer, which each part draws, has routings of its own.
    """
    kind = draw(st.sampled_from(["routed"] * 5 + ["replayed"] * 2 + ["ids", "ids", "pairs", "pairs", "rounded"]))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    experts = groups * draw(st.integers(2, 4)) if groups > 1 else draw(st.integers(1, 9))
    top_groups = draw(st.integers(1, groups))
    late = draw(st.booleans())
    router = RouterConfig(
        score="softmax" if late else draw(st.sampled_from(["softmax", "sigmoid"])),
        softmax_after_topk=late,
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 1.0, 2.5, 0.3])),
        selection_bias=draw(st.booleans()),
        num_groups=groups,
        top_groups=top_groups,
        aux_loss_coef=draw(st.sampled_from([0.0, 0.5])),
        z_loss_coef=draw(st.sampled_from([0.0, 0.0, 0.25])),
    )
    cfg = MoEConfig(
        hidden_size=draw(st.sampled_from(widths)),
        intermediate_size=draw(st.sampled_from(widths)),
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts // groups * top_groups)),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        router=router,
        rounding=TokenRounding(draw(st.sampled_from(ROUNDING_MODES)), TILE) if kind == "rounded" else None,
    )
    return Layer(
        cfg,
        kind,
        tokens=draw(st.integers(0, most_tokens)) + (TILE if kind == "rounded" else 0),
        gate_up=draw(st.sampled_from(["concatenated", "interleaved"])),
        recompute=draw(st.sampled_from([None, "up_proj"])),
        biases=(draw(st.booleans()), draw(st.booleans())),
        seed=number % 2**32 + draw(st.integers(0, 2**31)),  # PyTorch's generator takes 32 bits of a seed
    )


def draw_routing(layer: Layer, generator: torch.Generator, dtype: torch.dtype, device: Any = "cpu") -> Drawn:
    """One of the layer, on ``device``, of logits or scores of ``dtype``; the oracle's is on the CPU."""
    if layer.kind in ("ids", "pairs"):
        return _of_pairs(layer, generator, dtype, device)
    return _of_logits(layer, generator, dtype, device)


def _of_pairs(layer: Layer, generator: torch.Generator, dtype: torch.dtype, device: Any) -> Drawn:
    """Experts repeated and skipped, tokens with any number of them."""
    tokens, experts, k = layer.tokens, layer.cfg.num_experts, layer.cfg.num_experts_per_tok
    kind = torch.int32 if _chance(generator, 0.5) else torch.int64
    chosen = torch.randint(0, experts + 1, (tokens, k), generator=generator)  # E is skipped
    chosen = torch.where(chosen == experts, _one_of(generator, experts, experts + 3, 2**31 - 1), chosen)
    if _chance(generator, 0.3):
        chosen = torch.full_like(chosen, _one_of(generator, 0, experts - 1, experts))
    if layer.kind == "ids":
        plan = plan_topk(chosen.to(device, kind), experts)
        token = torch.arange(tokens)[:, None].expand(tokens, k).flatten()
    else:
        token = torch.randint(0, max(tokens, 1), (tokens * k,), generator=generator)
        plan = plan_pairs(token.to(device, kind), chosen.flatten().to(device, kind), tokens, experts)
    scores = torch.randn(chosen.shape if layer.kind == "ids" else token.shape, generator=generator, dtype=dtype)
    used = chosen.flatten() < experts
    leaf = scores.masked_fill(~used.view(scores.shape), float("nan")).to(device).requires_grad_()
    oracle_leaf = scores.clone().requires_grad_()
    dense = torch.zeros(tokens, experts, dtype=dtype)
    for pair in used.nonzero().flatten().tolist():
        at = (token[pair], chosen.flatten()[pair])
        dense = dense.index_put(at, oracle_leaf.flatten()[pair], accumulate=True)
    none = torch.zeros((), dtype=dtype)
    rows = torch.bincount(chosen.flatten()[used], minlength=experts).tolist()
    return Drawn(plan, leaf, leaf, none.to(device), dense, oracle_leaf, none, rows)


def _of_logits(layer: Layer, generator: torch.Generator, dtype: torch.dtype, device: Any) -> Drawn:
    cfg, tokens = layer.cfg, layer.tokens
    logits = _hostile_logits(layer, generator).to(dtype)
    mask = (
        torch.rand(tokens, generator=generator) < _one_of(generator, 0.0, 0.7, 1.0) if _chance(generator, 0.6) else None
    )
    bias = None
    if cfg.router.selection_bias:
        bias = _one_of(generator, 0.0, 0.5, 64.0) * torch.randn(cfg.num_experts, generator=generator).round(decimals=1)
    replayed = None
    if layer.kind == "replayed":
        shuffled = torch.rand(tokens, cfg.num_experts, generator=generator).argsort(dim=1)
        replayed = shuffled[:, : cfg.num_experts_per_tok].contiguous()
    draws = int(torch.randint(0, 2**31, (), generator=generator))

    def there(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(device)

    # What a token left out holds may be anything.
    leaf = (logits if mask is None else logits.masked_fill(~mask[:, None], float("nan"))).to(device).requires_grad_()
    seeded = torch.Generator(device).manual_seed(draws)
    routing = route(
        leaf, cfg, generator=seeded, selection_bias=there(bias), token_mask=there(mask), expert_ids=there(replayed)
    )
    oracle_leaf = logits.clone().requires_grad_()
    expected = reference.route(
        oracle_leaf,
        cfg,
        generator=torch.Generator(device).manual_seed(draws),
        selection_bias=bias,
        token_mask=mask,
        replayed_ids=replayed,
    )
    rows = expected.tokens_per_expert.tolist()
    return Drawn(
        routing.plan, routing.scores, leaf, routing.aux_loss, expected.scores, oracle_leaf, expected.aux_loss, rows
    )


def _hostile_logits(layer: Layer, generator: torch.Generator) -> Tensor:
    """(T, E) fp64: ties, masked experts, scores that underflow, all tokens on the same experts.

    Where rows are rounded tokens compete, too: then two are equal in all logits, or differ by more than the last bit of
    a score. That bit of PyTorch's fp64 sigmoid depends on the place in memory, but not for whole numbers: so equal
    logits are such.
    """
    tokens, experts, k = layer.tokens, layer.cfg.num_experts, layer.cfg.num_experts_per_tok
    logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64) * 2
    compete = layer.kind == "rounded"
    what = _one_of(generator, "as they are", "tied", "equal", "crowded", "masked", "tied" if compete else "wide")
    if what == "tied":
        is_whole = not compete or layer.cfg.router.score == "sigmoid"
        logits = logits.round() if is_whole else logits
        logits = logits[torch.randint(0, 3, (tokens,), generator=generator)] if compete else logits
    elif what == "equal":
        logits = torch.zeros_like(logits)
    elif what == "crowded":
        logits[:, :k] += 8
    elif what == "masked":
        hidden = torch.rand(tokens, experts, generator=generator) < 0.4
        hidden[:, experts - 1] = False  # one is left
        logits = logits.masked_fill(hidden, -INF)
    elif what == "wide":
        logits = (logits * 16).round().clamp(-32, 32) * 8
    return logits


def _chance(generator: torch.Generator, share: float) -> bool:
    return float(torch.rand((), generator=generator)) < share


def _one_of(generator: torch.Generator, *values: Any) -> Any:
    return values[int(torch.randint(0, len(values), (), generator=generator))]

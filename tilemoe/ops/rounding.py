"""Token rounding as torch.library operators: opaque to torch.compile.

T tokens · E experts · K experts per token · R_max static row capacity

`round_rows` returns indices only, on any device. `rounded_scores`, in Triton, also returns the scores, and is
differentiable once in the logits; its other outputs are not differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.config import MoEConfig
from tilemoe.kernels.rounding import torch as torch_rounding
from tilemoe.ops.router import ROUTE_ONCE
from tilemoe.ops.router import spec_args as router_spec_args
from tilemoe.runtime.operator import Operator

_ROUNDING_SCHEMA = "str mode, int tile, str score, bool normalize, float scale, SymInt capacity"
Spec = tuple[str, int, str, bool, float, int]


def spec_args(cfg: MoEConfig, capacity: int) -> Spec:
    """``cfg`` as the last arguments of the Triton operators, in the order of `_ROUNDING_SCHEMA`."""
    assert cfg.rounding is not None, "the caller looks"
    _, score, normalize, scale, *_ = router_spec_args(cfg)
    return (cfg.rounding.mode, cfg.rounding.tile, score, normalize, scale, capacity)


def _indices_fake(like: Tensor, capacity: int) -> tuple[Tensor, ...]:
    """token_of_row, pair_of_row, row_of_pair, pair_start_of_token, row_start_of_expert, pairs_of_expert."""
    num_tokens, num_experts = like.shape
    lengths = (capacity, capacity, capacity, num_tokens + 1, num_experts + 1, num_experts)
    return tuple(like.new_empty(length, dtype=torch.int32) for length in lengths)


def _rounded_scores(*args: Any) -> tuple[Tensor, ...]:
    from tilemoe.kernels.rounding import triton as rounding  # not every machine has Triton

    return tuple(rounding.round_rows(*args[:5], rounding.RoundingSpec(*args[5:])))


def _rounded_scores_fake(logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, score, _, _, capacity = rest
    norm = logits.new_empty(0 if score == "sigmoid" else logits.shape[0], 2)
    code_of_pair = logits.new_empty(capacity, dtype=torch.int16)
    return (logits.new_empty(capacity), *_indices_fake(logits, capacity), norm, code_of_pair)


def _rounded_scores_grad(*args: Any) -> Tensor:
    from tilemoe.kernels.rounding import triton as rounding

    return rounding.score_grad(*args[:8], rounding.RoundingSpec(*args[8:]))


_SELECTION_SCHEMA = "Tensor expert_ids, Tensor kept_scores, Tensor? uniform, Tensor? token_mask"
round_rows = Operator(
    "round_rows",
    torch_rounding.round_rows,
    f"(Tensor all_scores, {_SELECTION_SCHEMA}, str mode, int tile, float scale, SymInt capacity) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda all_scores, *rest: _indices_fake(all_scores, rest[-1]),
    repeats=False,
)
rounded_scores = Operator(
    "rounded_scores",
    _rounded_scores,
    f"(Tensor logits, {_SELECTION_SCHEMA}, {_ROUNDING_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rounded_scores_fake,
)
rounded_scores_grad = Operator(
    "rounded_scores_grad",
    _rounded_scores_grad,
    "(Tensor d_scores, Tensor logits, Tensor expert_ids, Tensor? token_mask, Tensor norm, Tensor row_of_pair, "
    f"Tensor code_of_pair, Tensor pair_start_of_token, {_ROUNDING_SCHEMA}) -> Tensor",
    lambda d_scores, logits, *rest: logits.new_empty(logits.shape),
)


def _save(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, expert_ids, _, _, token_mask, *ctx.spec = args
    _, _, _, row_of_pair, pair_start_of_token, _, _, norm, code_of_pair = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, expert_ids, token_mask, norm, row_of_pair, code_of_pair, pair_start_of_token)


def _backward(ctx: Any, d_scores: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_scores is None:
        return (None,)
    return (rounded_scores_grad(d_scores, *ctx.saved_tensors, *ctx.spec),)


rounded_scores.register_autograd(_backward, _save)
rounded_scores_grad.refuse_autograd(ROUTE_ONCE)

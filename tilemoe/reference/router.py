"""Every router option, one token after another.

T tokens · E experts · K experts per token
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.reference.rounding import draw_uniform, round_rows


class ReferenceRouting(NamedTuple):
    """scores (T, E), 0 where not routed · tokens_per_expert (E,) int64 · aux_loss scalar, coefficients applied.

    Examples:
        >>> cfg = tilemoe.MoEConfig(16, 8, num_experts=3, num_experts_per_tok=2)
        >>> tilemoe.reference.route(torch.tensor([[2.0, 0.0, 1.0]]), cfg).tokens_per_expert.tolist()
        [1, 0, 1]
    """

    scores: Tensor
    tokens_per_expert: Tensor
    aux_loss: Tensor


def route(
    logits: Tensor,
    cfg: MoEConfig,
    *,
    training: bool = True,
    generator: torch.Generator | None = None,
    selection_bias: Tensor | None = None,
    token_mask: Tensor | None = None,
    replayed_ids: Tensor | None = None,
) -> ReferenceRouting:
    """Route T tokens by ``logits`` (T, E), in fp32, or fp64 for fp64 logits.

    selection_bias (E,): added to the scores only to choose experts. token_mask (T,) bool: False excludes a token from
    everything. Ties go to the lower expert id. The losses (arXiv 2101.03961, arXiv 2202.08906) are one process',
    and count the experts' tokens before ``cfg.rounding``, which applies in training with at least a tile of tokens.
    replayed_ids (T, K): the experts to use; then nothing is rounded. Arguments are not checked: where `tilemoe.route`
    raises ValueError, this function may raise another error or none.

    Examples:
        >>> cfg = tilemoe.MoEConfig(16, 8, num_experts=3, num_experts_per_tok=2)
        >>> logits = torch.tensor([[2.0, 0.0, 1.0]])
        >>> theirs, ours = tilemoe.reference.route(logits, cfg).scores, tilemoe.route(logits, cfg).dense()
        >>> torch.allclose(theirs, ours)
        True
    """
    router, num_experts = cfg.router, cfg.num_experts
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = torch.zeros_like(logits)
    expert_ids = torch.full((logits.shape[0], cfg.num_experts_per_tok), num_experts)
    counts = [0] * num_experts
    real_tokens = []
    for t in range(logits.shape[0]):
        if token_mask is not None and not bool(token_mask[t]):
            continue
        real_tokens.append(t)
        chosen = _choose(logits[t], cfg, selection_bias) if replayed_ids is None else replayed_ids[t].tolist()
        expert_ids[t] = torch.tensor(chosen)
        for expert, score in zip(chosen, _scores_of_chosen(logits[t], chosen, router), strict=True):
            at = (torch.tensor(t), torch.tensor(expert))
            scores = scores.index_put(at, score)
            counts[expert] += 1
    aux_loss = _aux_loss(logits[real_tokens], torch.tensor(counts), router)
    if training and replayed_ids is None and cfg.rounding is not None and logits.shape[0] >= cfg.rounding.tile:
        scores, counts = _rounded(logits, expert_ids, scores, cfg, generator, token_mask)
    return ReferenceRouting(scores, torch.tensor(counts), aux_loss)


def _rounded(
    logits: Tensor,
    expert_ids: Tensor,
    kept: Tensor,
    cfg: MoEConfig,
    generator: torch.Generator | None,
    token_mask: Tensor | None,
) -> tuple[Tensor, list[int]]:
    """Scores (T, E) and each expert's number of rows after rounding a top-K selection with scores ``kept`` (T, E)."""
    assert cfg.rounding is not None, "the caller looks"
    everyone = torch.zeros_like(logits)
    for t in range(logits.shape[0]):
        if token_mask is None or bool(token_mask[t]):
            everyone = everyone.index_put((torch.tensor(t),), _score_function(logits[t], cfg.router))
    uniform = draw_uniform(cfg.num_experts, cfg.rounding, generator)
    kept_of_pair = torch.nn.functional.pad(kept, (0, 1)).gather(1, expert_ids)
    rows = round_rows(
        everyone.detach(),
        expert_ids,
        kept_of_pair.detach(),
        cfg.rounding,
        scale=cfg.router.scale,
        uniform=uniform,
        token_mask=token_mask,
    )
    scores = torch.zeros_like(kept)
    for expert, tokens in enumerate(rows):
        for t in tokens:
            is_chosen = expert in expert_ids[t].tolist()
            score = kept[t, expert] if is_chosen else everyone[t, expert] * cfg.router.scale
            scores = scores.index_put((torch.tensor(t), torch.tensor(expert)), score)
    return scores, [len(tokens) for tokens in rows]


def _score_function(token_logits: Tensor, router: RouterConfig) -> Tensor:
    """(E,) scores of one token with all experts, by ``router.score``."""
    if router.score == "softmax":
        return torch.softmax(token_logits, dim=0)
    return torch.sigmoid(token_logits)


def _choose(token_logits: Tensor, cfg: MoEConfig, selection_bias: Tensor | None) -> list[int]:
    """The K experts of one token, best first."""
    router = cfg.router
    value = token_logits if router.softmax_after_topk else _score_function(token_logits, router)
    if selection_bias is not None:
        value = value + selection_bias
    # An expert masked by a logit of -inf gets the lowest finite value: it comes last, but within its group.
    lowest = torch.finfo(value.dtype).min
    masked = token_logits == float("-inf")
    values = torch.where(masked, torch.full_like(value, lowest), value).detach().clamp(min=lowest)
    size = cfg.num_experts // router.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(router.num_groups)]
    if router.num_groups > 1:
        worth = {g: float(values[groups[g]].sort(descending=True).values[:2].sum()) for g in range(router.num_groups)}
        best_groups = sorted(worth, key=lambda g: (-worth[g], g))[: router.top_groups]
        eligible = [expert for g in best_groups for expert in groups[g]]
    else:
        eligible = groups[0]
    return sorted(eligible, key=lambda e: (-float(values[e]), e))[: cfg.num_experts_per_tok]


def _scores_of_chosen(token_logits: Tensor, chosen: list[int], router: RouterConfig) -> list[Tensor]:
    if bool((token_logits[chosen] == float("-inf")).all()):  # only replayed ids can all be masked
        kept = torch.zeros_like(token_logits[chosen])
    elif router.softmax_after_topk:
        kept = torch.softmax(token_logits[chosen], dim=0)
    else:
        kept = _score_function(token_logits, router)[chosen]
    if router.normalize:
        kept = kept / (kept.sum() + 1e-20)
    return list(kept * router.scale)


def _aux_loss(logits: Tensor, tokens_per_expert: Tensor, router: RouterConfig) -> Tensor:
    """Switch balancing loss (arXiv 2101.03961, equation 4) and router z-loss (arXiv 2202.08906, equation 5)."""
    num_tokens, num_experts = logits.shape
    loss = logits.new_zeros(())
    if num_tokens == 0:
        return loss
    if router.aux_loss_coef:
        for expert in range(num_experts):
            fraction = int(tokens_per_expert[expert]) / num_tokens
            mean_probability = torch.stack([_probabilities(row, router)[expert] for row in logits]).mean()
            loss = loss + router.aux_loss_coef * num_experts * fraction * mean_probability
    if router.z_loss_coef:
        for row in logits:
            loss = loss + router.z_loss_coef * torch.logsumexp(row, dim=0) ** 2 / num_tokens
    return loss


def _probabilities(token_logits: Tensor, router: RouterConfig) -> Tensor:
    scores = _score_function(token_logits, router)
    return scores if router.score == "softmax" else scores / (scores.sum() + 1e-20)

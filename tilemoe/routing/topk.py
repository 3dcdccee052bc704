"""Top-K routing: chooses experts and computes scores and auxiliary losses from logits.

T tokens · E experts · K experts per token · P pairs
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilemoe.checks import require_bool, require_type
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.kernels.choose import choose_router
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.ops import router as router_ops
from tilemoe.ops.plan import topk_plan
from tilemoe.plan import RoutingPlan, experts_of_rows
from tilemoe.routing.balance import check_group, num_ranks, sum_over_ranks
from tilemoe.routing.replay import check_replayed_ids
from tilemoe.routing.rounding import round_tokens, rounds
from tilemoe.runtime.operator import refuse_transforms
from tilemoe.runtime.tensors import as_mask, require_generator, require_tensors
from tilemoe.runtime.tracing import can_be_read, specialised

_INTEGERS = (torch.int32, torch.int64)


class NonFiniteLogitsError(ValueError):
    """A token cannot be routed: one of its logits is NaN or +inf, or none is finite."""


@dataclass(frozen=True, eq=False)
class Routing:
    """The result of a router: a plan, the scores of its pairs, counts and losses.

    Attributes:
        plan: which rows each expert computes
        scores: (T, K) fp32 (fp64 for fp64 logits), differentiable, in the order of the plan's pairs; (R_max,), 0 past
            R, if rows are rounded
        tokens_per_expert: (E,) int32 number of rows of this rank's tokens that each expert computes
        aux_loss: () fp32, balancing loss and z-loss, coefficients applied; 0 when the config has neither
        pairs_per_expert: (E,) int32 number of pairs before rounding; None: the same as ``tokens_per_expert``
        expert_ids: (T, K) int32 top-K selection before rounding, or the replayed one; E for a token that the mask
            excludes. None if a custom router has no such ids
        statistics: (2E + 1,) for `aux_loss_of_layers`: each expert's pairs per token and probability, z-loss; or None
        unchecked: True for attributes made by `route`, which are not checked again

    ValueError: the type, dtype or shape of an attribute is wrong.

    Examples:
        >>> cfg = tilemoe.MoEConfig(16, 8, num_experts=3, num_experts_per_tok=2)
        >>> routing = tilemoe.route(torch.tensor([[2.0, 0.0, 1.0]]), cfg)
        >>> routing.expert_ids.tolist(), routing.dense().shape
        ([[0, 2]], torch.Size([1, 3]))
    """

    plan: RoutingPlan
    scores: Tensor
    tokens_per_expert: Tensor
    aux_loss: Tensor
    pairs_per_expert: Tensor | None = None
    expert_ids: Tensor | None = None
    statistics: Tensor | None = None
    unchecked: InitVar[bool] = field(default=False, kw_only=True)

    def __post_init__(self, unchecked: bool) -> None:
        if unchecked:
            return
        require_type("plan", self.plan, RoutingPlan)
        needed = {"scores": self.scores, "tokens_per_expert": self.tokens_per_expert, "aux_loss": self.aux_loss}
        optional = {name: getattr(self, name) for name in ("pairs_per_expert", "expert_ids", "statistics")}
        require_tensors(needed, optional)
        plan, ids = self.plan, self.expert_ids
        leading = (plan.num_tokens,) if plan.pair_start_of_token is None else ()  # every token has as many pairs
        fits = self.scores.ndim == 1 + len(leading) and self.scores.shape[: len(leading)] == leading
        fits = fits and self.scores.numel() == plan.num_pairs
        _require("scores", self.scores, FLOAT_DTYPES, fits, "(T, K) or (P,) with the pairs of plan")
        _require("aux_loss", self.aux_loss, FLOAT_DTYPES, self.aux_loss.ndim == 0, "()")
        counts = {"tokens_per_expert": self.tokens_per_expert, "pairs_per_expert": self.pairs_per_expert}
        for name, count in counts.items():
            if count is not None:
                _require(name, count, _INTEGERS, count.shape == (plan.num_experts,), "(E,) with the experts of plan")
        if ids is not None:
            fits = ids.ndim == 2 and ids.shape[0] == plan.num_tokens
            _require("expert_ids", ids, _INTEGERS, fits, "(T, K) with the tokens of plan")
        if self.statistics is not None:
            fits = self.statistics.shape == (2 * plan.num_experts + 1,)
            _require("statistics", self.statistics, FLOAT_DTYPES, fits, "(2E + 1,) with the experts of plan")

    def dense(self) -> Tensor:
        """The scores as a matrix (T, E), 0 where a token is not routed to an expert; differentiable."""
        plan = self.plan
        rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
        # Rows past R go to an extra column, which is cut off.
        expert_of_row = experts_of_rows(plan.row_start_of_expert, rows)
        score_of_row = self.scores.reshape(-1)[plan.pair_of_row.long()]
        dense = self.scores.new_zeros(plan.num_tokens, plan.num_experts + 1)
        at = (plan.token_of_row.long(), expert_of_row)
        return dense.index_put(at, score_of_row, accumulate=True)[:, :-1]


def _require(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], fits: bool, shape: str) -> None:
    if not fits or tensor.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {shape}, {known}; got {tuple(tensor.shape)} {tensor.dtype}")


def route(
    logits: Tensor,
    cfg: MoEConfig,
    *,
    training: bool = True,
    generator: torch.Generator | None = None,
    selection_bias: Tensor | None = None,
    token_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    expert_ids: Tensor | None = None,
) -> Routing:
    """Choose K of E experts for each token, as ``cfg.router`` says, in fp32, or fp64 for fp64 logits.

    logits (T, E), any float dtype; ties go to the expert with the lower id. A logit of -inf masks an expert: its score
    is 0, and it is chosen only when fewer than K others are eligible. selection_bias (E,) fp32 is required if
    ``cfg.router.selection_bias`` is set, else refused; it gets no gradient. token_mask (T,) bool or integers: a token
    with False or 0 is excluded from routing (sentinel ids, scores 0), counts and losses, whatever its logits. Training
    then rounds the rows as ``cfg.rounding`` says: see `tilemoe.routing.rounding.round_tokens`; the random modes draw
    from ``generator`` (None: the default one of the logits' device). The losses count the pairs before rounding.

    expert_ids (T, K) int32 or int64 replays a selection. ``cfg.router`` computes the scores of these experts from the
    present logits, with gradients; selection bias and groups have no effect, nothing is rounded, and counts and losses
    are those of these experts. Ids of tokens that ``token_mask`` excludes are ignored. On a GPU, plain PyTorch computes
    a replay. There, and under torch.compile, the ids are not checked: an id >= E is skipped, ``plan.check()`` reports a
    negative one, and an expert named twice counts twice.

    Losses, over a rank's N unmasked tokens: ``aux_loss_coef * E * sum_e f_e P_e`` with f_e = pairs of e / N (they sum
    to K) and P_e the mean probability of e (arXiv 2101.03961, equation 4); ``z_loss_coef`` * mean of
    ``logsumexp(logits)^2`` (arXiv 2202.08906, equation 5). In training, when torch.distributed is initialised and there
    is a loss, one all_reduce sums pairs and N over ``group`` (None: all ranks), whose ranks must all make the same
    calls in the same order. f_e then counts the whole batch, and the mean of the ranks' losses is the loss of the whole
    batch, even if the ranks have different numbers of tokens. A rank outside the group passes
    ``torch.distributed.new_group``'s result there, ``GroupMember.NON_GROUP_MEMBER``: then, as in evaluation, its losses
    are those of its own tokens, and it calls no collective.

    ValueError: an argument is invalid; the message names it. On CPU, outside torch.compile, values are also checked: a
    logit that is NaN or +inf, a token whose logits are all -inf, an expert id out of range or repeated for a token.

    Examples:
        >>> cfg = tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2)
        >>> logits = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log()
        >>> routing = tilemoe.route(logits, cfg)
        >>> routing.expert_ids.tolist(), [round(s, 4) for s in routing.scores[0].tolist()]
        ([[0, 1]], [0.75, 0.25])
    """
    require_tensors({"logits": logits}, {"selection_bias": selection_bias, "token_mask": token_mask})
    refuse_transforms("tilemoe.route", logits)
    _check(logits, cfg, selection_bias, training, generator, group)
    if token_mask is not None:
        token_mask = checked_mask(token_mask, logits.shape[:1], logits.device)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if expert_ids is not None:
        shape = (logits.shape[0], cfg.num_experts_per_tok)
        check_replayed_ids(expert_ids, shape, cfg.num_experts, logits.device, token_mask)
        chosen = _select(logits, cfg, selection_bias, token_mask, expert_ids)
    else:
        choice = choose_router(logits.device, logits.dtype, *specialised(cfg.num_experts, cfg.num_experts_per_tok))
        select = _select_fused if choice.name == "triton" else _select
        chosen = select(logits, cfg, selection_bias, token_mask)
    if expert_ids is None and cfg.rounding is not None and rounds(cfg, logits.shape[0], training):
        plan, scores, pairs_of_expert = round_tokens(
            logits, chosen.expert_ids, chosen.scores, cfg, generator=generator, token_mask=token_mask
        )
        tokens_per_expert = plan.rows_per_expert
    else:
        plan, scores = topk_plan(chosen.expert_ids, cfg.num_experts), chosen.scores
        tokens_per_expert = pairs_of_expert = plan.rows_per_expert
    aux_loss, statistics = _aux_loss(chosen, pairs_of_expert, token_mask, cfg.router, training, group)
    ids = chosen.expert_ids.int()
    return Routing(plan, scores, tokens_per_expert, aux_loss, pairs_of_expert, ids, statistics, unchecked=True)


@torch.no_grad()
def router_entropy(logits: Tensor, router: RouterConfig, token_mask: Tensor | None = None) -> Tensor:
    """The entropy of the router's probabilities for ``logits`` (T, E), divided by log E: fp32 scalar, mean over tokens.

    It is 1 if all experts are equally likely, and 0 if one is certain or E = 1. token_mask (T,) bool: as in `route`.
    """
    logits = logits.detach().float()
    scores = torch.sigmoid(logits) if router.score == "sigmoid" else torch.softmax(logits, dim=-1)
    probabilities = scores if router.score == "softmax" else _probabilities(logits, scores, router)
    entropies = torch.special.entr(probabilities).sum(dim=-1)
    if token_mask is not None:
        entropies = entropies.where(token_mask, 0.0) * (token_mask.numel() / token_mask.sum().clamp(min=1))
    return entropies.mean() / math.log(max(logits.shape[1], 2))


class _Chosen(NamedTuple):
    """A selection, and the sums for its losses. All but the ids are differentiable and have the logits' dtype.

    expert_ids (T, K) integers, E for a masked token · scores (T, K) · probability_sums (E,): each expert's probability
    summed over the tokens, None without a balancing loss · z_sum (): the sum of ``logsumexp(logits)^2``, None without
    a z-loss
    """

    expert_ids: Tensor
    scores: Tensor
    probability_sums: Tensor | None
    z_sum: Tensor | None


def _select_fused(logits: Tensor, cfg: MoEConfig, selection_bias: Tensor | None, token_mask: Tensor | None) -> _Chosen:
    """`_select` without a replay, as one kernel."""
    scores, ids, probability_sums, z_sum = router_ops.select(
        logits, selection_bias, token_mask, *router_ops.spec_args(cfg)
    )
    router = cfg.router
    losses = (probability_sums if router.aux_loss_coef else None, z_sum if router.z_loss_coef else None)
    return _Chosen(ids, scores, *losses)


def _select(
    logits: Tensor,
    cfg: MoEConfig,
    selection_bias: Tensor | None,
    token_mask: Tensor | None,
    replayed: Tensor | None = None,
) -> _Chosen:
    """The top-K selection, or the ``replayed`` one (T, K), in plain PyTorch."""
    router = cfg.router
    padding = None if token_mask is None else ~token_mask[:, None]
    if padding is not None:
        logits = logits.masked_fill(padding, 0.0)
    _check_values(logits)
    all_scores = logits
    if not router.softmax_after_topk:
        all_scores = torch.softmax(logits, dim=-1) if router.score == "softmax" else torch.sigmoid(logits)
    if replayed is None:
        expert_ids = _choose(logits.detach(), all_scores.detach(), cfg, selection_bias)
        scores = _kept_scores(all_scores, expert_ids, router)
    else:
        expert_ids, scores = replayed, _replayed_scores(all_scores, replayed, router)
    if padding is not None:
        expert_ids = expert_ids.masked_fill(padding, cfg.num_experts)
        scores = scores.masked_fill(padding, 0.0)
    # Products and sums in place of a matrix product, which autocast would compute in its own dtype.
    weight = torch.ones_like(logits[:, 0]) if token_mask is None else token_mask.to(logits.dtype)
    probability_sums = z_sum = None
    if router.aux_loss_coef:
        probability_sums = (weight[:, None] * _probabilities(logits, all_scores, router)).sum(dim=0)
    if router.z_loss_coef:
        z_sum = (weight * torch.logsumexp(logits, dim=-1).square()).sum()
    return _Chosen(expert_ids, scores, probability_sums, z_sum)


@torch.no_grad()
def _choose(logits: Tensor, all_scores: Tensor, cfg: MoEConfig, selection_bias: Tensor | None) -> Tensor:
    """(T, K) int64 expert ids, best first, by all_scores (T, E), which are the logits with ``softmax_after_topk``."""
    router = cfg.router
    # -inf is reserved for experts that cannot be chosen: those of other groups and those chosen already. A masked
    # expert has the lowest finite value, whatever its bias.
    lowest = torch.finfo(logits.dtype).min
    values = all_scores
    if selection_bias is not None:
        values = values + selection_bias.to(logits.dtype).clamp(min=lowest)
    values = values.masked_fill(logits == float("-inf"), lowest)
    if router.num_groups > 1:
        by_group = values.unflatten(1, (router.num_groups, -1))
        worth = (by_group.topk(2, dim=-1).values * 0.5).sum(dim=-1)  # halved: two masked experts must not sum to -inf
        best_groups = _best(worth, router.top_groups)
        left_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, best_groups, False)
        values = by_group.masked_fill(left_out[:, :, None], float("-inf")).flatten(1)
    return _best(values, cfg.num_experts_per_tok)


def _best(values: Tensor, count: int) -> Tensor:
    """(T, count) columns of the largest values, best first; ties go to the lower column.

    torch.topk does not define the order of ties, and on a GPU it differs. argmax promises the first maximum, and
    repeating it costs no more than topk or a stable sort for the usual counts (docs/lab/routing.md).
    """
    values = values.clone()
    columns = []
    for _ in range(count):
        column = values.argmax(dim=-1, keepdim=True)
        values.scatter_(1, column, float("-inf"))
        columns.append(column)
    return torch.cat(columns, dim=1)


def _kept_scores(all_scores: Tensor, expert_ids: Tensor, router: RouterConfig) -> Tensor:
    """(T, K) scores of the chosen experts, from all_scores (T, E), which are the logits with ``softmax_after_topk``."""
    kept = all_scores.gather(1, expert_ids)
    if router.softmax_after_topk:
        kept = torch.softmax(kept, dim=-1)  # sums to one, so there is nothing left to normalise
    elif router.normalize:
        kept = _Normalized.apply(kept)
    (scale,) = specialised(router.scale)
    return kept if scale == 1.0 else kept * scale


def _replayed_scores(all_scores: Tensor, expert_ids: Tensor, router: RouterConfig) -> Tensor:
    """`_kept_scores` of replayed ids: 0 for a token whose experts are all masked by logits of -inf."""
    # Clamped: ids are not checked on a GPU, and gather must not read out of bounds.
    expert_ids = expert_ids.long().clamp(0, all_scores.shape[1] - 1)
    if not router.softmax_after_topk:
        return _kept_scores(all_scores, expert_ids, router)
    nothing = (all_scores.gather(1, expert_ids) == float("-inf")).all(dim=1, keepdim=True)  # its softmax is NaN
    return _kept_scores(all_scores.masked_fill(nothing, 0.0), expert_ids, router).masked_fill(nothing, 0.0)


def _aux_loss(
    chosen: _Chosen,
    pairs_of_expert: Tensor,
    token_mask: Tensor | None,
    router: RouterConfig,
    training: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor | None]:
    """(balancing loss (arXiv 2101.03961, eq. 4) + z-loss (arXiv 2202.08906, eq. 5), fp32 scalar; statistics)."""
    scores, num_experts = chosen.scores, pairs_of_expert.shape[0]
    if chosen.probability_sums is None and chosen.z_sum is None:
        return torch.zeros((), dtype=torch.float32, device=scores.device), None
    counts = pairs_of_expert
    # Without a mask the host knows the number of tokens, and the device need not compute it.
    tokens: Tensor | int = scores.shape[0] if token_mask is None else token_mask.sum()
    ranks = num_ranks(group) if training and dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        here = tokens if isinstance(tokens, Tensor) else counts.new_full((), tokens)
        everywhere = sum_over_ranks(torch.cat([counts.long(), here.long()[None]]), group)
        counts, tokens = everywhere[:-1], everywhere[-1]
    tokens = tokens.clamp(min=1).to(scores.dtype) if isinstance(tokens, Tensor) else max(tokens, 1)
    share = ranks / tokens  # each unmasked token's weight: the mean over ranks makes it 1 / tokens
    aux_loss_coef, z_loss_coef = specialised(router.aux_loss_coef, router.z_loss_coef)
    z_loss = None if chosen.z_sum is None else z_loss_coef * share * chosen.z_sum
    if chosen.probability_sums is not None and router.aux_loss_over == "model":
        last = scores.new_zeros(()) if z_loss is None else z_loss
        statistics = torch.cat([counts.to(scores.dtype) / tokens, chosen.probability_sums * share, last[None]])
        return aux_loss_of_layers(statistics[None], router), statistics
    parts = []
    if chosen.probability_sums is not None:
        pairs = (counts * chosen.probability_sums).sum()
        parts.append(aux_loss_coef * num_experts * share / tokens * pairs)
    if z_loss is not None:
        parts.append(z_loss)
    return sum(parts[1:], start=parts[0]).float(), None


def aux_loss_of_layers(statistics: Tensor, router: RouterConfig) -> Tensor:
    """One balancing loss of L layers plus the sum of their z-losses: fp32 scalar ``aux_loss_coef * E * sum_e f_e P_e +
    z``, where f_e and P_e are means over the layers. statistics (L, 2E + 1): each layer's `Routing.statistics`.
    """
    num_experts = statistics.shape[1] // 2
    pairs_per_token, probability = statistics[:, :-1].mean(dim=0).split(num_experts)
    balancing = specialised(router.aux_loss_coef)[0] * num_experts * (pairs_per_token * probability).sum()
    return (balancing + statistics[:, -1].sum()).float()


def _probabilities(logits: Tensor, all_scores: Tensor, router: RouterConfig) -> Tensor:
    """(T, E) probabilities, which sum to one for each token; sigmoid scores are divided by their sum."""
    if router.softmax_after_topk:
        return torch.softmax(logits, dim=-1)
    if router.score == "softmax":
        return all_scores
    return _Normalized.apply(all_scores)


class _Normalized(torch.autograd.Function):
    """Scores over their sum: ``p = u / (sum u + eps)`` and ``du = (dp - <dp, p>) / (sum u + eps)`` for u (T, N).

    Autograd would divide each term before it subtracts them. With one kept score (K = 1), where p is 1 and du is 0,
    that leaves both rounding errors: up to 2e-5 of the router's gradient, which then comes from its losses alone.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        return scores / _total(scores)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        total = _total(scores)  # recomputed, so that the second derivative includes it
        return (d_out - (d_out * (scores / total)).sum(dim=-1, keepdim=True)) / total


def _total(scores: Tensor) -> Tensor:
    """(T, 1) ``sum u + eps``; eps avoids 0 / 0 when all scores underflow."""
    # A literal: torch.compile(dynamic=True) makes a module's float symbolic, with a new symbol for each use.
    return scores.sum(dim=-1, keepdim=True) + 1e-20


def checked_mask(token_mask: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """``token_mask`` as bool. ValueError: it is neither bool nor integers, or has another shape or device."""
    token_mask = as_mask(token_mask)
    _check_fits("token_mask", token_mask, shape, torch.bool, device)
    return token_mask


def _check(logits: Tensor, cfg: Any, selection_bias: Tensor | None, training: Any, generator: Any, group: Any) -> None:
    if not isinstance(cfg, MoEConfig):
        require_type("cfg", cfg, MoEConfig)
    if not isinstance(training, bool):
        require_bool("training", training)
    if generator is not None:
        require_generator(generator)
    if group is not None:
        check_group(group)
    if logits.ndim != 2 or logits.shape[1] != cfg.num_experts:
        raise ValueError(
            f"logits must be (T, E) with E = num_experts = {cfg.num_experts}, got shape {tuple(logits.shape)}"
        )
    if logits.dtype not in FLOAT_DTYPES:
        raise ValueError(f"logits must be bfloat16, float16, float32 or float64, got {logits.dtype}")
    if cfg.router.selection_bias and selection_bias is None:
        raise ValueError("selection_bias is missing: cfg.router.selection_bias asks for an fp32 (E,) tensor")
    if selection_bias is not None:
        if not cfg.router.selection_bias:
            raise ValueError(
                "selection_bias was given, but cfg.router.selection_bias is False; set it or drop the bias"
            )
        _check_fits("selection_bias", selection_bias, logits.shape[1:], torch.float32, logits.device)


def _check_fits(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(f"{name} must be {tuple(shape)} {dtype}, got {tuple(value.shape)} {value.dtype}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device} but x or logits are on {device}; move them to one device")


def _check_values(logits: Tensor) -> None:
    """Raises `NonFiniteLogitsError` if a token cannot be routed; checked only on CPU, outside torch.compile."""
    if not can_be_read(logits) or logits.shape[0] == 0:
        return
    # A token's maximum is NaN, +inf or -inf exactly when it has a NaN, a +inf, or no finite logit.
    best = logits.detach().amax(dim=-1)
    bad = (~best.isfinite()).nonzero()
    if bad.numel():
        token = int(bad[0])
        what = "NaN" if best[token].isnan() else "+inf" if best[token] > 0 else "no finite value"
        raise NonFiniteLogitsError(
            f"logits[{token}] has {what}; check the inputs and the router's weights (-inf masks an expert)"
        )

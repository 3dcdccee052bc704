"""Host side of the router: top-K with scores and loss sums in one kernel, and the gradient of all these in another.

T tokens · E experts · K experts per token

Memory-bound: every logit is read at most once, and the chosen experts' logits once more. A tile is a block of tokens
times all experts, padded to powers of two. Top-K is K successive arg-maxima over integer keys with the order of the
scores. Loss sums are partial sums for each CTA, which PyTorch adds in a fixed order, without atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.kernels.router.triton_kernels import select_grad_kernel, select_kernel
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import Launch, ceil_div, contiguous, launch_of, power_of_two

MAX_EXPERTS = 4096
MAX_EXPERTS_PER_TOKEN = 32
_WARP = 512  # logits per warp: 16 per thread leave registers for the values computed from each
_ZEROS, _MOST_TOKENS = 4096, 128  # elements and tokens per CTA if the gradient is zero except for chosen experts
_PARTIAL_SUMS = 2048  # most CTAs, and so partial sums, if the losses' sums are computed


class RouterSpec(NamedTuple):
    """The part of a router's configuration that the kernels depend on, besides E.

    mode: "softmax", "sigmoid", or "late softmax", which is over the K chosen logits only. balance, z: whether the sums
    that the load-balancing loss and the z loss need are computed.
    """

    experts_per_token: int
    mode: str
    normalize: bool
    scale: float
    num_groups: int
    top_groups: int
    balance: bool
    z: bool


def why_unsupported(num_experts: int, experts_per_token: int) -> str | None:
    """Why these kernels cannot select ``experts_per_token`` of ``num_experts``; None if they can."""
    if experts_per_token > MAX_EXPERTS_PER_TOKEN:
        return f"more than {MAX_EXPERTS_PER_TOKEN} experts per token"
    if num_experts > MAX_EXPERTS:
        return f"more than {MAX_EXPERTS} experts"
    return None


def select(
    logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, spec: RouterSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From logits (T, E) fp32, selection_bias (E,) fp32, token_mask (T,) bool:

    scores (T, K) fp32 · expert_ids (T, K) int32, best first, ties to the lower id, E where the mask is False ·
    probability_sums (E,): each expert's probability summed over the tokens, (0,) unless ``spec.balance`` · z_sum ():
    the sum of ``logsumexp(logits)^2``, (0,) unless ``spec.z``. The order of summation is fixed.
    """
    device_of(logits)
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        empty = logits.new_empty(0, spec.experts_per_token)
        sums = (logits.new_zeros(num_experts if spec.balance else 0), logits.new_zeros(() if spec.z else 0))
        return empty, empty.to(torch.int32), *sums
    launch = select_launch(logits, selection_bias, token_mask, spec)
    launch.run()
    outputs = launch.args
    probability_sums = outputs["probability_parts"].sum(0) if spec.balance else logits.new_empty(0)
    z_sum = outputs["z_parts"].sum() if spec.z else logits.new_empty(0)
    return outputs["scores"], outputs["expert_ids"], probability_sums, z_sum


def select_grad(logits: Tensor, *rest: Any) -> Tensor:
    """d_logits (T, E) fp32; arguments as for `select_grad_launch`."""
    device_of(logits)
    if logits.shape[0] == 0:
        return torch.empty_like(logits)
    launch = select_grad_launch(logits, *rest)
    launch.run()
    return launch.args["d_logits"]


def select_launch(logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, spec: RouterSpec) -> Launch:
    """The launch of `select`, for at least one token; its arguments include the outputs."""
    num_tokens, num_experts = logits.shape
    k, groups = spec.experts_per_token, power_of_two(spec.num_groups)
    group = power_of_two(num_experts // spec.num_groups)
    columns = groups * group  # at most 8192
    block = _tokens_of_block(columns)
    num_programs = ceil_div(num_tokens, block)
    if spec.balance or spec.z:
        num_programs = min(num_programs, _PARTIAL_SUMS)
    expert_ids = torch.empty((num_tokens, k), dtype=torch.int32, device=logits.device)
    scores = logits.new_empty(num_tokens, k)
    probability_parts = logits.new_empty(num_programs, num_experts) if spec.balance else None
    z_parts = logits.new_empty(num_programs) if spec.z else None
    given = (logits.contiguous(), contiguous(selection_bias), contiguous(token_mask))
    args = (*given, expert_ids, scores, probability_parts, z_parts, num_tokens)
    constants = {
        **_constants(num_experts, spec),
        "NUM_GROUPS": spec.num_groups,
        "TOP_GROUPS": spec.top_groups,
        "BLOCK_T": block,
        "GROUPS": groups,
        "GROUP": group,
        # Sorted lists pay off from 4 choices on. `chosen` has one column per list, so K must be <= columns / 4.
        "LISTS": 4 <= k <= columns // 4,
    }
    return launch_of(select_kernel, (num_programs,), args, constants, _num_warps(columns))


def select_grad_launch(
    logits: Tensor,
    expert_ids: Tensor,
    token_mask: Tensor | None,
    d_scores: Tensor | None,
    d_probability_sums: Tensor | None,
    d_z_sum: Tensor | None,
    spec: RouterSpec,
) -> Launch:
    """The launch of `select_grad`, for at least one token: d_logits (T, E) fp32 from the gradients of `select`'s scores
    and sums, each None for zeros.

    expert_ids: from `select`, K different experts in [0, E) for each unmasked token, which is not checked. If nothing
    is normalised over all experts, a logit that was not chosen gets zero, even if others are NaN.
    """
    num_tokens, num_experts = logits.shape
    columns = power_of_two(num_experts)  # groups are not padded: eligibility has no gradient
    dense = spec.mode == "softmax" or d_probability_sums is not None or d_z_sum is not None
    if dense:
        block, num_warps = _tokens_of_block(columns), _num_warps(columns)
    else:
        block, num_warps = max(1, min(_MOST_TOKENS, _ZEROS // columns)), 4  # only chosen experts' logits are read
    logits = logits.contiguous()
    sums = (contiguous(d_probability_sums), d_z_sum)
    given = (logits, expert_ids, contiguous(token_mask), contiguous(d_scores), *sums)
    constants = {
        **_constants(num_experts, spec),
        "BLOCK_T": block,
        "COLUMNS": columns,
        "CHOICES": power_of_two(spec.experts_per_token),
        "DENSE": dense,
    }
    args = (*given, torch.empty_like(logits), num_tokens)
    return launch_of(select_grad_kernel, (ceil_div(num_tokens, block),), args, constants, num_warps)


def _constants(num_experts: int, spec: RouterSpec) -> dict[str, Any]:
    """Compile-time constants of both kernels."""
    return {
        "NUM_EXPERTS": num_experts,
        "K": spec.experts_per_token,
        "MODE": spec.mode,
        "NORMALIZE": spec.normalize,
        "SCALE": spec.scale,
    }


def _tokens_of_block(columns: int) -> int:
    return max(1, _WARP // columns)


def _num_warps(columns: int) -> int:
    """One warp if its registers hold all experts, so that the K maxima need no shared memory and no barrier."""
    return 1 if columns <= 2 * _WARP else min(16, columns // _WARP)

"""torch.library registration of plan building: opaque to torch.compile, so that CPU ids are checked under it too."""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.kernels.select_plan import select_plan_topk
from tilemoe.kernels.torch import plan as torch_plan


@torch.library.custom_op("tilemoe::plan_topk", mutates_args=())
def plan_topk(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `tilemoe.kernels.torch.plan.plan_topk`; the builder is chosen by device and size."""
    builder = select_plan_topk(expert_ids.device.type, expert_ids.numel(), num_experts)
    return builder.build(expert_ids, num_experts)


@plan_topk.register_fake
def _(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def index(*shape: int) -> Tensor:
        return expert_ids.new_empty(shape, dtype=torch.int32)

    pairs = expert_ids.shape[0] * expert_ids.shape[1]
    return index(pairs), index(pairs), index(pairs), index(num_experts + 1), index()


@torch.library.custom_op("tilemoe::plan_pairs", mutates_args=())
def plan_pairs(
    token: Tensor, expert: Tensor, num_tokens: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `tilemoe.kernels.torch.plan.plan_pairs`."""
    return torch_plan.plan_pairs(token, expert, num_tokens, num_experts)


@plan_pairs.register_fake
def _(
    token: Tensor, expert: Tensor, num_tokens: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def index(*shape: int) -> Tensor:
        return token.new_empty(shape, dtype=torch.int32)

    pairs = token.shape[0]
    return index(pairs), index(pairs), index(pairs), index(num_tokens + 1), index(num_experts + 1), index()

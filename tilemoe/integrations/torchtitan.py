"""The routed experts of torchtitan's mixture-of-experts layer, computed by tilemoe: an override for its configuration.

    --override.imports tilemoe.integrations.torchtitan.tilemoe_experts

E experts of this rank · F expert width · D model width · K experts per token · T tokens · R rows, sorted by expert

Gate and up are one parameter (E, F, 2, D), torchtitan's own fused layout with its sharding and checkpoint hooks, so
checkpoints stay those of the stock layer. tilemoe reads it in place, as interleaved gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import spmd_types
    from torchtitan.config import derive, override
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
    from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts
except ImportError as error:
    raise ImportError(
        f"tilemoe's override is for torchtitan 0.3, parts of which it replaces: {error}; "
        "pip install 'torchtitan>=0.3,<0.4'"
    ) from error

from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_rows, plan_topk
from tilemoe.runtime.random import local_of


class TileMoEGroupedExperts(FusedGroupedExperts):
    """Grouped experts on rows sorted by expert, computed in bf16 as torchtitan does."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        pass

    def weights(self) -> tuple[Tensor, Tensor]:
        """This rank's w1 (E, 2F, D), gate and up interleaved, and w2 (E, D, F) in bf16; views of bf16 parameters."""
        w13, w2 = (local_of(w).bfloat16() for w in (self.w13, self.w2_EDF))
        return w13.flatten(1, 2), w2

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """x_RD (R, D), num_tokens_per_expert_E (E) -> (R, D); rows past the counts' sum are padding and give 0."""
        _refuse_type_checking()
        w1, w2 = self.weights()
        plan = plan_rows(num_tokens_per_expert_E, x_RD.shape[0])
        ones = torch.ones(x_RD.shape[0], 1, dtype=torch.float32, device=x_RD.device)
        return moe(x_RD.bfloat16(), w1, w2, plan, ones, gate_up="interleaved").type_as(x_RD)


class TileMoERoutedExperts(RoutedExperts):
    """The score-weighted sum of the experts' outputs; one operator if no tokens are dispatched to other ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """As torchtitan's: (B, L, D), (B, L, K), (B, L, K) and (E) -> (B, L, D)."""
        if not _is_local(self.token_dispatcher):
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        _refuse_type_checking()
        w1, w2 = self.inner_experts.weights()
        x = x_BLD.flatten(0, 1).bfloat16()
        plan = plan_topk(topk_expert_ids_BLK.flatten(0, 1), w2.shape[0])
        o = moe(x, w1, w2, plan, topk_scores_BLK.flatten(0, 1), gate_up="interleaved")
        return o.type_as(x_BLD).view(x_BLD.shape)


@override(target=RoutedExperts.Config, exact=True, description="tilemoe's kernels for the routed experts.")
def tilemoe_experts(cfg: Any) -> Any:
    """The configuration of tilemoe's routed experts that replaces a `RoutedExperts.Config`.

    Raises:
        ValueError: the experts are not torchtitan's stock ones (but gpt-oss's, or quantised ones).

    Examples:
        >>> from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
        >>> from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
        >>> from tilemoe.integrations.torchtitan import tilemoe_experts
        >>> experts = GroupedExperts.Config(dim=32, hidden_dim=16, num_experts=4)
        >>> dispatcher = LocalTokenDispatcher.Config(num_experts=4, top_k=2)
        >>> cfg = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)
        >>> type(tilemoe_experts(cfg)).__qualname__
        'TileMoERoutedExperts.Config'
    """
    if type(cfg.inner_experts) is not GroupedExperts.Config:
        raise ValueError(
            f"tilemoe_experts cannot replace {type(cfg.inner_experts).__qualname__}: only torchtitan's stock "
            "GroupedExperts are computed; name the layers it is for in the override's fqns, or leave it out"
        )
    inner = derive(fused_grouped_experts(cfg.inner_experts), TileMoEGroupedExperts.Config)
    return derive(cfg, TileMoERoutedExperts.Config, inner_experts=inner)


def _is_local(dispatcher: LocalTokenDispatcher) -> bool:
    """Whether no tokens are sent; torchtitan also uses the all-to-all dispatcher without expert parallelism."""
    if type(dispatcher) is AllToAllTokenDispatcher:
        return dispatcher.ep_mesh is None
    return type(dispatcher) is LocalTokenDispatcher


def _refuse_type_checking() -> None:
    if get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking():
        raise ValueError("tilemoe's operators are not known to torchtitan's SPMD type checking; turn it off for them")

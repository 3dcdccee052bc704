"""The routed experts' weights, stacked, and their computation.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · w = 2n gated, n ungated
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilemoe.checks import require_type
from tilemoe.config import MoEConfig
from tilemoe.dispatch.base import Dispatcher, LocalDispatcher
from tilemoe.kernels.experts.base import FLOAT_DTYPES, Backend
from tilemoe.kernels.experts.registry import check_kernels
from tilemoe.ops.moe import check_options, moe
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.tensors import require_factory


class Experts(nn.Module):
    """w1 (E, w, d) · w2 (E, d, n) · b1 (E, w) and b2 (E, d), or None without ``cfg.expert_bias``.

    ``dispatcher`` brings tokens to the experts: all are here, unless expert parallelism sets another one.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: str | None = None,
        kernels: str | Backend | None = None,
    ) -> None:
        super().__init__()
        require_type("cfg", cfg, MoEConfig)
        require_factory(device, dtype, FLOAT_DTYPES)
        check_options(cfg.gate_up, recompute)
        if kernels is not None:
            check_kernels(kernels)
        self.cfg, self.recompute, self.kernels = cfg, recompute, kernels
        self.dispatcher: Dispatcher = LocalDispatcher()
        num, d, n, width = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size, cfg.up_rows
        self.w1 = nn.Parameter(torch.empty(num, width, d, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num, d, n, device=device, dtype=dtype))
        self.b1: nn.Parameter | None = None
        self.b2: nn.Parameter | None = None
        if cfg.expert_bias:
            self.b1 = nn.Parameter(torch.empty(num, width, device=device, dtype=dtype))
            self.b2 = nn.Parameter(torch.empty(num, d, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for weight in (self.w1, self.w2):
            nn.init.normal_(weight, 0.0, self.cfg.initializer_range, generator=generator)
        for bias in (self.b1, self.b2):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Tensor:
        """x (T, d), scores (T, K) or (P,) as the plan asks -> (T, d) in x's dtype, under autocast in autocast's."""
        # Before the tokens leave: so the backward sends their gradients before it hands over those of the weights.
        local = self.dispatcher.local_weight
        w1, w2 = local(self.w1), local(self.w2)
        b1, b2 = (None if bias is None else local(bias) for bias in (self.b1, self.b2))
        here = self.dispatcher.dispatch(x, plan, scores)
        o = moe(
            here.x,
            w1,
            w2,
            here.plan,
            here.scores,
            activation=self.cfg.activation,
            activation_limit=self.cfg.activation_limit,
            activation_alpha=self.cfg.activation_alpha,
            gate_up=self.cfg.gate_up,
            b1=b1,
            b2=b2,
            recompute=self.recompute,
            kernels=self.kernels,
            precision=self.cfg.precision,
        )
        return self.dispatcher.combine(o, here)

    def extra_repr(self) -> str:
        cfg = self.cfg
        return f"{cfg.num_experts} x ({cfg.hidden_size} -> {cfg.intermediate_size}), {cfg.activation}, {cfg.gate_up}"

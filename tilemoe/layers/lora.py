"""Low-rank adapters on the routed experts of a model (LoRA, arXiv 2106.09685): put on, trained, merged, taken off.

T tokens · d hidden_size · n intermediate_size · E experts · r rank · w = 2n gated, n ungated
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilemoe.checks import require_int
from tilemoe.dispatch.base import LocalDispatcher
from tilemoe.layers.experts import Experts
from tilemoe.layers.moe import MoE
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.plan import RoutingPlan


class LoRAExperts(nn.Module):
    """Frozen `Experts`, kept as ``.base``, with a pair of adapters for each expert and matrix.

    up_a (E, r, d), up_b (E, w, r) · down_a (E, r, n), down_b (E, d, r). Expert e's matrices become
    ``w1_e + alpha/r up_b_e up_a_e`` and ``w2_e + alpha/r down_b_e down_a_e``. The b's start at zero, so at first
    nothing changes. ``dtype`` is the adapters' own, the base's if None; they are computed in that of the input.

    Raises:
        ValueError: the rank or alpha is off, or the experts are spread over ranks or recompute their up projection.
    """

    def __init__(self, base: Experts, rank: int, alpha: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        require_int("rank", rank, 1)
        if not alpha > 0:
            raise ValueError(f"alpha must be > 0, got {alpha!r}")
        if not isinstance(base.dispatcher, LocalDispatcher):
            raise ValueError("experts under expert parallelism cannot have adapters; add them on one rank")
        if base.recompute is not None:
            raise ValueError("experts with recompute cannot have adapters; build the model with recompute=None")
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.is_merged = False
        cfg = base.cfg
        num, d, n, width = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size, cfg.up_rows

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=base.w1.device, dtype=dtype or base.w1.dtype))

        self.up_a, self.up_b = empty(num, rank, d), empty(num, width, rank)
        self.down_a, self.down_b = empty(num, rank, n), empty(num, d, rank)
        self.reset_adapters()

    def reset_adapters(self, generator: torch.Generator | None = None) -> None:
        """The a's uniform with variance 1 / (3 inputs), as PyTorch's linear maps start; the b's zero."""
        for a in (self.up_a, self.down_a):
            bound = a.shape[2] ** -0.5
            nn.init.uniform_(a, -bound, bound, generator=generator)
        for b in (self.up_b, self.down_b):
            nn.init.zeros_(b)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.base.reset_parameters(generator)
        self.reset_adapters(generator)

    def forward(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Tensor:
        """As `Experts`: x (T, d), scores (T, K) or (P,) as the plan asks -> (T, d)."""
        if self.is_merged:
            return self.base(x, plan, scores)
        base = self.base
        return moe_lora(
            x,
            base.w1,
            base.w2,
            plan,
            scores,
            Adapters(self.up_a, self.up_b, self.down_a, self.down_b, self.scale),
            activation=base.cfg.activation,
            activation_limit=base.cfg.activation_limit,
            activation_alpha=base.cfg.activation_alpha,
            gate_up=base.cfg.gate_up,
            b1=base.b1,
            b2=base.b2,
            kernels=base.kernels,
        )

    def merge(self) -> None:
        """Add the adapters to the base's weights, in place, one expert at a time; then the forward is the base's.

        The sum is computed in fp32 or better and rounded to the weights' dtype. Nothing happens if it is merged.
        """
        if not self.is_merged:
            self._add(self.scale)
            self.is_merged = True

    def unmerge(self) -> None:
        """Undo `merge`. The weights are the former ones to within their dtype's rounding, which merging has lost."""
        if self.is_merged:
            self._add(-self.scale)
            self.is_merged = False

    @torch.no_grad()
    def _add(self, scale: float) -> None:
        for weight, b, a in ((self.base.w1, self.up_b, self.up_a), (self.base.w2, self.down_b, self.down_a)):
            dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
            for expert in range(weight.shape[0]):
                change = scale * (b[expert].to(dtype) @ a[expert].to(dtype))
                weight[expert].copy_(weight[expert].to(dtype) + change)

    def extra_repr(self) -> str:
        return f"rank {self.up_a.shape[1]}, scale {self.scale:g}"


def add_lora(model: nn.Module, rank: int, alpha: float, *, dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    """Freeze ``model`` and put adapters on the experts of every `MoE` in it; returns the adapters, which train.

    Raises:
        ValueError: there is no MoE, there are adapters already, or as `LoRAExperts`.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no tilemoe.MoE to put adapters on")
    if any(isinstance(layer.experts, LoRAExperts) for layer in layers):
        raise ValueError("the model has adapters already; call merge_lora first")
    adapted = [LoRAExperts(layer.experts, rank, alpha, dtype=dtype) for layer in layers]
    model.requires_grad_(False)
    for layer, experts in zip(layers, adapted, strict=True):
        layer.experts = experts  # type: ignore[assignment]  # it computes the same function of the same arguments
    return [getattr(each, name) for each in adapted for name in ("up_a", "up_b", "down_a", "down_b")]


def merge_lora(model: nn.Module) -> None:
    """Merge every adapter into its experts and take it off: the model's parameters are named as before `add_lora`.

    They stay frozen: ``model.requires_grad_(True)`` to train them.
    """
    for layer in model.modules():
        if isinstance(layer, MoE) and isinstance(layer.experts, LoRAExperts):
            layer.experts.merge()
            layer.experts = layer.experts.base

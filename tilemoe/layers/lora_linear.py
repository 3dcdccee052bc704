"""A linear map with a low-rank adapter (LoRA, arXiv 2106.09685).

i inputs · o outputs · r rank
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilemoe.runtime.random import uniform_


class LoRALinear(nn.Linear):
    """The frozen linear map ``base`` with an adapter: its weight (o, i) becomes ``weight + alpha/r lora_b lora_a``.

    lora_a (r, i) · lora_b (o, r), in ``dtype`` (None: the weight's); computed in the input's dtype. lora_b starts at
    zero, so that the initial output is the base's. ``base`` has no bias.
    """

    adapters = ("lora_a", "lora_b")

    def __init__(self, base: nn.Linear, rank: int, alpha: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight.requires_grad_(False)
        self.rank, self.alpha = rank, alpha

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=base.weight.device, dtype=dtype or base.weight.dtype))

        self.lora_a, self.lora_b = empty(rank, base.in_features), empty(base.out_features, rank)
        self.reset_adapters()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def reset_adapters(self, generator: torch.Generator | None = None) -> None:
        reset_pair(self.lora_a, self.lora_b, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., i) -> (..., o)."""
        low = F.linear(x, self.lora_a.to(x.dtype))
        return F.linear(x, self.weight) + self.scale * F.linear(low, self.lora_b.to(x.dtype))

    def merged(self) -> nn.Linear:
        """A plain linear map with the adapter merged into the weight, which is changed in place and stays frozen."""
        add_product(self.weight, self.lora_b, self.lora_a, self.scale)
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = self.weight
        return plain

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.rank}, scale {self.scale:g}"


def reset_pair(a: Tensor, b: Tensor, generator: torch.Generator | None) -> None:
    """Initialise a (..., r, i) uniformly with variance 1 / (3 i), like torch.nn.Linear, and b (..., o, r) to zero."""
    uniform_(a, a.shape[-1] ** -0.5, generator)
    nn.init.zeros_(b)


@torch.no_grad()
def add_product(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> None:
    """``weight (o, i) += scale b a``, summed in fp32 or better and rounded once to the weight's dtype."""
    dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    weight.copy_(weight.to(dtype) + scale * (b.to(dtype) @ a.to(dtype)))

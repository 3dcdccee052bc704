"""Whether what a token gets depends on the other tokens of its batch.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.testing import make_inputs


class Sizes(NamedTuple):
    tokens: int
    hidden_size: int
    intermediate_size: int
    experts: int
    experts_per_token: int


class Batch(NamedTuple):
    """x, do (T, d) · ids, scores (T, K) · weights (w1, w2, b1, b2)"""

    x: Tensor
    do: Tensor
    ids: Tensor
    scores: Tensor
    weights: tuple[Tensor, ...]

    def of(self, tokens: Tensor) -> "Batch":
        """Of these tokens alone, in this order."""
        return Batch(*(tensor[tokens] for tensor in self[:4]), self.weights)


def make_batch(sizes: Sizes, dtype: torch.dtype, device: torch.device | str = "cpu") -> Batch:
    """Two of three tokens have expert 0 among theirs, so that it fills several tiles."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(sizes.tokens, sizes.experts, generator=generator)
    chance[torch.arange(sizes.tokens) % 3 > 0, 0] = 2.0
    ids = chance.argsort(dim=1, descending=True)[:, : sizes.experts_per_token].to(device)
    made = make_inputs(
        plan_topk(ids, sizes.experts), sizes.hidden_size, sizes.intermediate_size, dtype=dtype, bias=True
    )
    do = torch.randn(sizes.tokens, sizes.hidden_size, generator=generator).to(device, dtype)
    return Batch(made["x"], do, ids, made["scores"], tuple(made[name] for name in ("w1", "w2", "b1", "b2")))


def results(batch: Batch, kernels: str) -> dict[str, Tensor]:
    """Of each token: what the experts give in training and in inference, and its gradients."""
    w1, w2, b1, b2 = batch.weights
    plan = plan_topk(batch.ids, w1.shape[0])
    options: dict[str, Any] = {"b1": b1, "b2": b2, "kernels": kernels, "precision": backend_named(kernels).precision}
    x, scores = (tensor.detach().requires_grad_() for tensor in (batch.x, batch.scores))
    o = moe(x, w1, w2, plan, scores, **options)
    dx, ds = torch.autograd.grad(o, (x, scores), batch.do)
    with torch.no_grad():
        inferred = moe(batch.x, w1, w2, plan, batch.scores, **options)
    return {"o": o.detach(), "dx": dx, "ds": ds, "o in inference": inferred}


def results_in_4_bit(batch: Batch, kernels: str, storage: str) -> dict[str, Tensor]:
    """Of each token: what experts in 4 bits under adapters give, and dx; ds is a sum of PyTorch's."""
    w1, w2, b1, b2 = batch.weights
    (experts, width, d), n, generator = w1.shape, w2.shape[2], torch.Generator().manual_seed(3)
    shapes = ((experts, 8, d), (experts, width, 8), (experts, 8, n), (experts, d, 8))
    adapters = (0.1 * torch.randn(shape, generator=generator) for shape in shapes)
    x, plan = batch.x.detach().requires_grad_(), plan_topk(batch.ids, experts)
    low_rank = Adapters(*(each.to(x.device, x.dtype) for each in adapters), 0.5)
    w1, w2 = (STORAGES[storage].quantize(weight) for weight in (w1, w2))
    o = moe_lora(x, w1, w2, plan, batch.scores, low_rank, b1=b1, b2=b2, kernels=kernels)
    (dx,) = torch.autograd.grad(o, x, batch.do)
    return {"o": o.detach(), "dx": dx}


def assert_tokens_keep_their_bits(batch: Batch, run: Callable[[Batch], dict[str, Tensor]]) -> None:
    """Alone, among few, among half in another order, and beside tokens that hold NaN."""
    count, device = batch.x.shape[0], batch.x.device
    whole = run(batch)
    assert all(bool(tensor.isfinite().all()) and bool(tensor.any()) for tensor in whole.values())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    for part in (order[:1], torch.arange(count // 4, count // 4 + 9), order[: count // 2]):
        tokens = part.to(device)
        for what, got in run(batch.of(tokens)).items():
            assert torch.equal(got, whole[what][tokens]), f"{what} of {len(part)} tokens"
    kept = (torch.arange(count, device=device) % 4 == 0)[:, None]
    x, do = (tensor.masked_fill(~kept, float("nan")) for tensor in (batch.x, batch.do))
    for what, got in run(batch._replace(x=x, do=do)).items():
        assert torch.equal(got[kept[:, 0]], whole[what][kept[:, 0]]), f"{what} beside NaN"

"""What the tests of plain and of rounded routing share: the router held against the reference.

T tokens · E experts
"""

import torch
from torch import Tensor

from tilemoe import reference
from tilemoe.config import MoEConfig
from tilemoe.routing.topk import Routing, route


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def selection_bias_for(cfg: MoEConfig) -> Tensor | None:
    return 0.3 * random(cfg.num_experts, seed=9, dtype=torch.float32) if cfg.router.selection_bias else None


def assert_routes_as_the_reference(
    logits: Tensor, cfg: MoEConfig, token_mask: Tensor | None = None, replayed_ids: Tensor | None = None
) -> Routing:
    bias = selection_bias_for(cfg)
    logits = logits.clone().requires_grad_()
    options = {"selection_bias": bias, "token_mask": token_mask}
    routing = route(logits, cfg, generator=seeded(), expert_ids=replayed_ids, **options)
    expected = reference.route(logits, cfg, generator=seeded(), replayed_ids=replayed_ids, **options)
    dense = routing.dense()

    assert torch.equal(dense != 0, expected.scores != 0)
    torch.testing.assert_close(dense, expected.scores)
    assert routing.tokens_per_expert.dtype == torch.int32
    assert routing.tokens_per_expert.tolist() == expected.tokens_per_expert.tolist()
    assert routing.aux_loss.dtype == torch.float32
    torch.testing.assert_close(routing.aux_loss, expected.aux_loss.float())

    # One gradient through scores and losses. The sums keep a graph where a loss is a constant or no token is routed.
    weight = random(*dense.shape, seed=3).to(dense.dtype)
    objectives = [
        (s * weight).sum() + a + 0 * logits.nan_to_num(neginf=0).sum()
        for s, a in ((dense, routing.aux_loss), (expected.scores, expected.aux_loss))
    ]
    got, want = (torch.autograd.grad(objective, logits)[0] for objective in objectives)
    assert got.isfinite().all()
    torch.testing.assert_close(got, want)
    return routing

"""Hostile routings through the Triton kernels, in Triton's interpreter and on a GPU.

The plan, the router and the rounding are the kernels', too; scores and rows are those of the oracle's loops, and the
experts are compared as every backend is, the routings of a layer together (`tilemoe.testing`).

T tokens · E experts
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from fuzzing import Cases, judge_cases, seed_of
from helpers import assert_all_close_to_reference
from routings import Drawn, Layer, draw_routing, layers
from triton_checks import DEVICE, INTERPRETED

from tilemoe.kernels import choose
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.testing import against_reference, make_inputs

pytestmark = [
    pytest.mark.process("interpreter"),
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of padding that is computed and not used
]

Found = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]
FEW_PAIRS, MOST_INPUTS = 64, 8
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
BACKEND = "interpreter" if INTERPRETED else "GPU"
# Of each dtype; each: routings of a layer, which hypothesis draws.
CASES_OF = {
    "interpreter": Cases(10_000, parts=125, short=1, each=8),
    "GPU": Cases(3_334, parts=16, short=3, each=20),
}
CASES = CASES_OF[BACKEND]


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, CPU tensors are served as a GPU's are."""
    if INTERPRETED:
        monkeypatch.setattr(choose, "why_no_triton", lambda device: None)


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("part", CASES.numbers)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_backends(dtype: torch.dtype, part: int, record_property: Callable[..., None]) -> None:
    def judge(layer: Layer) -> None:
        drawn = [judge_routing(layer, generator) for generator in layer.generators(CASES.each)]
        # On few numbers plain PyTorch's error, which is the yardstick, is now and then none at all.
        pairs = sum(sum(each.rows) for each in drawn)
        inputs_of_each = min(MOST_INPUTS, math.ceil(FEW_PAIRS / max(1, pairs)))
        found = [
            run_experts(layer, each.plan, layer.seed + number + CASES.each * again, dtype)
            for number, each in enumerate(drawn)
            for again in range(inputs_of_each)
        ]
        assert_all_close_to_reference(found, dtype)

    number = seed_of(BACKEND, dtype, part)
    judge_cases(judge, layers((8, 16, 24), 9, number), record_property, CASES, number)


def judge_routing(layer: Layer, generator: torch.Generator) -> Drawn:
    """A routing whose plan, scores and losses are the oracle's."""
    drawn = draw_routing(layer, generator, torch.float32, DEVICE)
    assert drawn.plan.rows_per_expert.tolist() == drawn.rows
    found = drawn.found_dense
    torch.testing.assert_close(found.cpu(), drawn.dense)
    torch.testing.assert_close(drawn.loss.cpu(), drawn.oracle_loss.float())
    cotangent = torch.randn(drawn.dense.shape, generator=generator)
    gradients = [
        torch.autograd.grad(
            (scores * cotangent.to(scores.device)).sum() + loss + 0 * leaf.nan_to_num(0, 0, 0).sum(), leaf
        )[0]
        for scores, loss, leaf in ((found, drawn.loss, drawn.leaf), (drawn.dense, drawn.oracle_loss, drawn.oracle_leaf))
    ]
    # As where the router's kernels are tested alone: of logits in the hundreds the last bit of logsumexp is 3e-5.
    torch.testing.assert_close(gradients[0].cpu(), gradients[1], rtol=2e-5, atol=2e-6)
    return drawn


def run_experts(layer: Layer, plan: RoutingPlan, seed: int, dtype: torch.dtype) -> Found:
    """What the experts give of a plan, to be judged together with others."""
    cfg, sizes = layer.cfg, (layer.cfg.hidden_size, layer.cfg.intermediate_size)
    inputs = make_inputs(plan, *sizes, cfg.activation, dtype=dtype, bias=True, seed=seed)
    for name, wanted in zip(("b1", "b2"), layer.biases, strict=True):
        if not wanted:
            del inputs[name]
    # In fp32 the choice would be PyTorch's own products.
    ours = partial(moe, recompute=layer.recompute, kernels="triton" if dtype == torch.float32 else None)
    return against_reference(inputs, plan, ours, **layer.options)

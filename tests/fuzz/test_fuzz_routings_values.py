"""Hostile routings through the Triton kernels, in Triton's interpreter and on a GPU.

The plan, the router and the rounding are the kernels', too; scores and rows are those of the oracle's loops, and the
experts are compared as every backend is, the routings of a layer together (`tilemoe.testing`).

T tokens · E experts
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from fuzzing import judge_cases
from helpers import assert_all_close_to_reference
from routings import Layer, draw_routing, layers
from triton_checks import DEVICE, INTERPRETED

from tilemoe.kernels import choose
from tilemoe.ops.moe import moe
from tilemoe.testing import against_reference, make_inputs

pytestmark = [
    pytest.mark.process("interpreter"),
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of padding that is computed and not used
]

Found = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]
AT_ONCE = 4 if INTERPRETED else 20  # routings of a layer: hypothesis draws the layer
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, CPU tensors are served as a GPU's are."""
    if INTERPRETED:
        monkeypatch.setattr(choose, "why_no_triton", lambda device: None)


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_backends(dtype: torch.dtype, record_property: Callable[..., None]) -> None:
    def judge(layer: Layer) -> None:
        found = [
            judge_routing(layer, number, generator, dtype) for number, generator in enumerate(layer.generators(AT_ONCE))
        ]
        assert_all_close_to_reference(found, dtype)

    strategy = layers((8, 16, 24), most_tokens=9)
    full = 10_000 // AT_ONCE // len(DTYPES)
    judge_cases(judge, strategy, record_property, short=3, full=full, each=AT_ONCE)


def judge_routing(layer: Layer, number: int, generator: torch.Generator, dtype: torch.dtype) -> Found:
    """Judges plan, router and rounding; returns what the experts give, to be judged together with other routings'."""
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
    cfg, (b1, b2) = layer.cfg, layer.biases
    inputs = make_inputs(
        drawn.plan,
        cfg.hidden_size,
        cfg.intermediate_size,
        cfg.activation,
        dtype=dtype,
        bias=True,
        seed=layer.seed + number,
    )
    for name, wanted in (("b1", b1), ("b2", b2)):
        if not wanted:
            del inputs[name]
    # In fp32 the choice would be PyTorch's own products.
    ours = partial(moe, recompute=layer.recompute, kernels="triton" if dtype == torch.float32 else None)
    return against_reference(inputs, drawn.plan, ours, **layer.options)

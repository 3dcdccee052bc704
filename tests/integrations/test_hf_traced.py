"""transformers' models with tilemoe's experts: traced for any size, or run on tensors without values."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, tokens
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

from tilemoe.integrations.transformers import use

pytestmark = pytest.mark.usefixtures("registered")


def test_dynamic_shapes_take_one_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    options = {"attn_implementation": "eager", "experts_implementation": "tilemoe", "num_hidden_layers": 1}
    eager, model = (FAMILIES["gpt_oss"].make(**options).train() for _ in range(2))
    use(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 9), (3, 17), (4, 6)):
        found, expected = (step(each, tokens(batch, length)) for each in (compiled, eager))
        torch.testing.assert_close(found, expected)
        assert counters["stats"]["unique_graphs"] == 1, f"compiled again for {batch} x {length} tokens"


def step(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits, loss and gradients."""
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False)
    return [out.logits, out.loss, *torch.autograd.grad(out.loss, list(model.parameters()))]


@pytest.mark.parametrize("kind", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_without_values(family: str, kind: str) -> None:
    """The gate is tried with real values all the same."""

    def described(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        with torch.device(device):
            model = type(made)(made.config)
            return [(t.shape, t.dtype) for t in step(model, torch.zeros(2, 9, dtype=torch.int64))]

    made = FAMILIES[family].make(attn_implementation="eager", experts_implementation="tilemoe")
    expected = described("cpu")
    with nullcontext() if kind == "meta" else FakeTensorMode(allow_non_fake_inputs=True):
        assert described(kind) == expected

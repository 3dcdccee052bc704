"""Liger beside tilemoe: its patch may leave the experts to transformers, and is named where it does not."""

from types import MethodType
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from hf_models import FAMILIES, tokens
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tilemoe.integrations.transformers import use
from tilemoe.testing import assert_equal

pytestmark = pytest.mark.usefixtures("unregistered_after")
REFUSED = r"Qwen3MoeForCausalLM has Liger's experts in model.layers.0.mlp.experts, .* with swiglu=False"
ALONE = {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}  # which need a GPU


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Any:
    # It replaces the class even where it is given a model: this puts that back.
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", modeling_qwen3_moe.Qwen3MoeExperts)
    return pytest.importorskip("liger_kernel.transformers").apply_liger_kernel_to_qwen3_moe


def test_a_forward_of_ligers_is_named_without_liger() -> None:
    model = FAMILIES["qwen3_moe"].make()

    def forward(self: torch.nn.Module, *args: Any) -> None: ...

    forward.__module__ = "liger_kernel.transformers.swiglu"
    for layer in model.model.layers:
        layer.mlp.experts.forward = MethodType(forward, layer.mlp.experts)
    with raises_one_line(REFUSED):
        use(model)


def test_experts_that_liger_replaced_in_a_model_are_refused_and_others_are_ours(patch: Any) -> None:
    model = FAMILIES["qwen3_moe"].make()
    use(model)
    want = model(input_ids=tokens()).logits
    patch(model=model, swiglu=False, **ALONE)
    assert use(model) == len(model.model.layers)
    assert_equal([model(input_ids=tokens()).logits], [want])
    patch(model=model, **ALONE)
    with raises_one_line(REFUSED):
        use(model)


def test_experts_that_liger_replaced_before_the_model_was_made(patch: Any) -> None:
    patch(**ALONE)
    with raises_one_line(REFUSED):
        use(FAMILIES["qwen3_moe"].make())

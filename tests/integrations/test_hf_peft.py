"""PEFT's adapters on the experts' parameters of transformers' models, with tilemoe computing the experts."""

import pytest
import torch
from helpers import assert_near
from hf_models import FAMILIES, logits_and_gradients, tokens
from peft import LoraConfig, PeftModel, get_peft_model

from tilemoe.integrations import transformers as integration
from tilemoe.testing import relative_error

pytestmark = pytest.mark.usefixtures("registered")


def adapted(family: str) -> PeftModel:
    torch.manual_seed(3)
    base = FAMILIES[family].make()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=["gate_up_proj", "down_proj"])
    model = get_peft_model(base, config)
    with torch.no_grad():  # one of each pair starts at zero
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model.train()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_target_parameters(family: str) -> None:
    model = adapted(family)
    logits, gradients = logits_and_gradients(model, "eager", model.base_model.model)
    ours, our_gradients = logits_and_gradients(model, "tilemoe", model.base_model.model)
    assert len(gradients) == 4 * FAMILIES[family].moe_layers  # A and B, of both matrices
    assert all("lora_" in name for name in gradients)
    assert relative_error(ours, logits) < 1e-5
    assert our_gradients.keys() == gradients.keys()
    assert_near(our_gradients.values(), gradients.values(), 1e-5)
    plain = FAMILIES[family].make()
    assert relative_error(plain(input_ids=tokens()).logits.detach(), logits) > 0.01


def test_merged() -> None:
    model = adapted("qwen3_moe").eval()
    assert integration.use(model.base_model.model) == 2
    with torch.no_grad():
        logits = model(input_ids=tokens()).logits
        merged = model.merge_and_unload()
        assert merged.config._experts_implementation == "tilemoe"
        assert relative_error(merged(input_ids=tokens()).logits, logits) < 1e-5

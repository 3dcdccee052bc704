"""transformers' own models with tilemoe's experts against the same models with their eager ones."""

from typing import Any

import pytest
import torch
from hf_models import FAMILIES, LIMIT, step, tokens
from torch import Tensor, nn

from tilemoe.integrations import transformers as integration
from tilemoe.testing import relative_error

pytestmark = pytest.mark.usefixtures("registered")
CLOSE = 1e-5  # relative, in the root of the mean of squares; fp32, sums of up to a few hundred terms
Calls = list[dict[str, Any]]


def logits_and_gradients(model: nn.Module, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.set_experts_implementation(implementation)
    return step(model)[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient(family: str, calls: Calls) -> None:
    model = FAMILIES[family].make().train()
    logits, gradients = logits_and_gradients(model, "eager")
    assert not calls
    logits_ours, gradients_ours = logits_and_gradients(model, "tilemoe")
    assert len(calls) == FAMILIES[family].moe_layers
    assert relative_error(logits_ours, logits) < CLOSE
    assert gradients_ours.keys() == gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, expected in gradients.items():
        assert expected.abs().max() > 1e-6, f"{name}: nothing would be tested"
        assert relative_error(gradients_ours[name], expected) < CLOSE, name


@torch.no_grad()
def test_the_clamp_of_gpt_oss_is_met_and_computed(calls: Calls) -> None:
    model = FAMILIES["gpt_oss"].make()
    integration.use(model)
    logits = {}
    for limit in (LIMIT, 1e3):
        for layer in model.model.layers:
            layer.mlp.experts.limit = limit
        logits[limit] = model(input_ids=tokens()).logits
        assert {(call["activation"], call["gate_up"]) for call in calls} == {("swiglu_oai", "interleaved")}
        assert calls[-1]["activation_limit"] == limit
        assert calls[-1]["activation_alpha"] == model.model.layers[0].mlp.experts.alpha
    clamped, free = logits.values()
    assert relative_error(clamped, free) > 0.05


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_generate(family: str, calls: Calls) -> None:
    model = FAMILIES[family].make(experts_implementation="eager")
    ids = tokens(batch=2)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    eager = model.generate(ids, **options)
    model.set_experts_implementation("tilemoe")
    ours = model.generate(ids, **options)
    assert eager.shape[1] == ids.shape[1] + 12
    assert len(calls) == 12 * FAMILIES[family].moe_layers
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bf16_errs_no_more_than_eager(family: str) -> None:
    model = FAMILIES[family].make().train()
    exact, exact_gradients = logits_and_gradients(model, "eager")
    model.to(torch.bfloat16)
    theirs, their_gradients = logits_and_gradients(model, "eager")
    ours, our_gradients = logits_and_gradients(model, "tilemoe")
    assert ours.dtype == torch.bfloat16
    assert relative_error(ours, exact) < 1.5 * relative_error(theirs, exact)
    for name in exact_gradients:
        if "experts" in name:
            bound = 1.5 * relative_error(their_gradients[name], exact_gradients[name])
            assert relative_error(our_gradients[name], exact_gradients[name]) < bound, name


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_weights_are_read_where_they_lie(family: str, calls: Calls) -> None:
    model = FAMILIES[family].make()
    assert integration.use(model) == FAMILIES[family].moe_layers
    model(input_ids=tokens())
    for layer, call in enumerate(calls):
        experts = model.model.layers[layer].mlp.experts
        for ours, theirs in (("w1", "gate_up_proj"), ("w2", "down_proj")):
            parameter = getattr(experts, theirs)
            assert call[ours].data_ptr() == parameter.data_ptr()
            transposed = family == "gpt_oss"
            assert call[ours].shape == (parameter.transpose(1, 2) if transposed else parameter).shape
            assert call[ours].is_contiguous() != transposed

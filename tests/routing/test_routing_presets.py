"""Router presets, and the reference's layer, against the code of the architectures in transformers.

T tokens · D hidden_size · E experts · K experts per token
"""

from typing import Any

import pytest
import torch
import transformers
from hf_models import FAMILIES, GRANITE, LIMIT, Family
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tilemoe import reference
from tilemoe.config import ROUTER_PRESETS, MoEConfig, RouterConfig
from tilemoe.routing.topk import route

T, D = 40, 32
# Preset -> (family of transformers, what of its configuration makes it this model).
ARCHITECTURES: dict[str, tuple[Family, dict[str, Any]]] = {
    **{name: (FAMILIES[name], {}) for name in ("mixtral", "olmoe", "qwen3_moe", "gpt_oss")},
    "deepseek_v3": (FAMILIES["deepseek_v3"], {"n_routed_experts": 16, "n_group": 8, "topk_group": 4}),
    "qwen3_next": (FAMILIES["qwen3_next"], {"norm_topk_prob": True}),
    "kimi_k2": (FAMILIES["deepseek_v3"], {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}),
    "glm4_moe": (FAMILIES["glm4_moe"], {"routed_scaling_factor": 2.5}),
    "glm4_moe_air": (FAMILIES["glm4_moe"], {}),
    "granite_moe": (GRANITE, {}),
}
SOFTMAX = sorted(name for name in ARCHITECTURES if ROUTER_PRESETS[name].score == "softmax")


def block_of(name: str) -> tuple[nn.Module, nn.Module]:
    """The architecture's first MoE block, with random buffers, and its router."""
    family, more = ARCHITECTURES[name]
    model = family.make(experts_implementation="eager", **more)
    block = next(module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module))
    generator = torch.Generator().manual_seed(0)
    for buffer in block.buffers():
        buffer.normal_(std=0.5, generator=generator)
    return block, getattr(block, "gate", None) or block.router


def config_class(name: str) -> Any:
    return getattr(transformers, ARCHITECTURES[name][0].prefix + "Config")


def moe_config(name: str, experts: int, k: int) -> MoEConfig:
    return MoEConfig(D, 24, experts, k, router=RouterConfig.preset(name))


def hidden_states() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1))


def our_logits(x: Tensor, gate: nn.Module) -> Tensor:
    return nn.functional.linear(x, gate.weight, getattr(gate, "bias", None))


def selection_bias(gate: nn.Module) -> Tensor | None:
    return getattr(gate, "e_score_correction_bias", None)


def test_every_preset_is_tested() -> None:
    assert set(ARCHITECTURES) == set(ROUTER_PRESETS)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_same_experts_scores_and_gradients(name: str) -> None:
    _, gate = block_of(name)
    x = hidden_states().requires_grad_()
    theirs_logits, theirs, ids = gate(x)
    (_, experts), k = theirs_logits.shape, ids.shape[1]
    theirs_dense = torch.zeros(T, experts).scatter(1, ids, theirs)

    ours = route(our_logits(x, gate), moe_config(name, experts, k), selection_bias=selection_bias(gate))
    dense = ours.dense()

    assert torch.equal(dense != 0, theirs_dense != 0)
    assert int((dense != 0).sum()) == T * k
    torch.testing.assert_close(dense, theirs_dense, rtol=1e-5, atol=1e-7)
    assert ours.tokens_per_expert.tolist() == torch.bincount(ids.flatten(), minlength=experts).tolist()

    weight = torch.randn(T, experts, generator=torch.Generator().manual_seed(2))
    trainable = [x, *gate.parameters()]
    got = torch.autograd.grad((dense * weight).sum(), trainable)
    want = torch.autograd.grad((theirs_dense * weight).sum(), trainable)
    for one, other in zip(got, want, strict=True):
        assert float(other.abs().max()) > 1e-2
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("padded", [False, True])
def test_balancing_loss_is_transformers(name: str, padded: bool) -> None:
    logits = torch.randn(T, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    mask = torch.arange(T) % 5 != 0 if padded else None
    router = RouterConfig.preset(name)
    theirs = load_balancing_loss_func((logits,), 16, 4, None if mask is None else mask.view(2, -1).long())
    ours = route(logits, moe_config(name, 16, 4), token_mask=mask).aux_loss
    if router.z_loss_coef:
        squares = torch.logsumexp(logits, dim=-1).square()
        ours = ours - router.z_loss_coef * (squares if mask is None else squares[mask]).mean()
    torch.testing.assert_close(ours, router.aux_loss_coef * theirs, rtol=1e-5, atol=1e-6)
    got, want = torch.autograd.grad(ours, logits)[0], torch.autograd.grad(router.aux_loss_coef * theirs, logits)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-8)


def expert_weights(name: str, block: nn.Module) -> dict[str, Any]:
    """The block's experts as arguments of the layer; gpt-oss keeps (E, in, out), interleaved and with biases."""
    experts = block.experts
    if name != "gpt_oss":
        return {"w1": experts.gate_up_proj, "w2": experts.down_proj}
    return {
        "w1": experts.gate_up_proj.transpose(1, 2),
        "w2": experts.down_proj.transpose(1, 2),
        "b1": experts.gate_up_proj_bias,
        "b2": experts.down_proj_bias,
        "activation": "swiglu_oai",
        "gate_up": "interleaved",
        "activation_limit": LIMIT,
    }


def shared_output(x: Tensor, block: nn.Module) -> Tensor:
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if shared is None:
        return torch.zeros_like(x)
    gate = getattr(block, "shared_expert_gate", None)
    w1 = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
    gate_weight = None if gate is None else gate.weight
    return reference.shared_expert(x, w1, shared.down_proj.weight, gate_weight=gate_weight)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_reference_layer_is_the_architectures_block(name: str) -> None:
    block, gate = block_of(name)
    x = hidden_states()
    with torch.no_grad():
        theirs = block(x[None])
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).view(T, D)
        logits = our_logits(x, gate)
        cfg = moe_config(name, logits.shape[1], gate(x)[2].shape[1])
        routing = route(logits, cfg, selection_bias=selection_bias(gate))
        ours = reference.moe(x, plan=routing.plan, scores=routing.scores, **expert_weights(name, block))
        ours = ours + shared_output(x, block)
    assert float(theirs.abs().mean()) > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SOFTMAX)
def test_loss_coefficients_are_the_configuration_classs(name: str) -> None:
    assert RouterConfig.preset(name).aux_loss_coef == config_class(name)().router_aux_loss_coef


@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_groups_scale_and_normalisation_are_the_configuration_classs(name: str) -> None:
    theirs, ours = config_class(name)(), RouterConfig.preset(name)
    assert (ours.num_groups, ours.top_groups) == (theirs.n_group, theirs.topk_group)
    assert ours.scale == theirs.routed_scaling_factor
    assert ours.normalize == theirs.norm_topk_prob

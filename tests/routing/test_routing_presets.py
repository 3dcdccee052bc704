"""Router presets, and the reference's layer, against the code of the architectures in transformers.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tilemoe import reference
from tilemoe.config import ROUTER_PRESETS, MoEConfig, RouterConfig
from tilemoe.routing.topk import route

T, D, N, E, K = 40, 12, 10, 16, 4


@dataclass(frozen=True)
class Family:
    """Where transformers keeps an architecture, and what its configuration calls the sizes."""

    module: str
    prefix: str
    block: str
    router: str = "gate"
    sizes: dict[str, Any] = field(default_factory=dict)

    def config_class(self) -> Any:
        return getattr(import_module(f"transformers.models.{self.module}"), f"{self.prefix}Config")

    def build_block(self) -> nn.Module:
        """The architecture's MoE block with random fp32 weights and buffers."""
        modeling = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        config = self.config_class()(
            hidden_size=D, intermediate_size=N, num_experts_per_tok=K, num_local_experts=E, **self.sizes
        )
        config._experts_implementation = "eager"
        block: nn.Module = getattr(modeling, self.prefix + self.block)(config).float()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in (*block.parameters(), *block.buffers()):
                tensor.normal_(std=0.5, generator=generator)
        return block


def sizes(**more: Any) -> dict[str, Any]:
    return {"num_experts": E, "moe_intermediate_size": N, **more}


DEEPSEEK = {"n_routed_experts": E, "moe_intermediate_size": N, "n_shared_experts": 1}
FAMILIES = {
    "mixtral": Family("mixtral", "Mixtral", "SparseMoeBlock"),
    "olmoe": Family("olmoe", "Olmoe", "SparseMoeBlock", sizes={"num_experts": E}),
    "qwen3_moe": Family("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", sizes=sizes(norm_topk_prob=True)),
    "qwen3_next": Family("qwen3_next", "Qwen3Next", "SparseMoeBlock", sizes=sizes(shared_expert_intermediate_size=N)),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3", "MoE", sizes=DEEPSEEK),
    "kimi_k2": Family(
        "deepseek_v3",
        "DeepseekV3",
        "MoE",
        sizes={**DEEPSEEK, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    ),
    "glm4_moe": Family("glm4_moe", "Glm4Moe", "MoE", sizes={**DEEPSEEK, "routed_scaling_factor": 2.5}),
    "glm4_moe_air": Family("glm4_moe", "Glm4Moe", "MoE", sizes=DEEPSEEK),
    "gpt_oss": Family("gpt_oss", "GptOss", "MLP", router="router"),
    "granite_moe": Family("granitemoe", "GraniteMoe", "MoE", router="router"),
}
SOFTMAX_FAMILIES = sorted(name for name in FAMILIES if ROUTER_PRESETS[name].score == "softmax")


def moe_config(name: str, **options: Any) -> MoEConfig:
    return MoEConfig(D, N, E, K, router=RouterConfig.preset(name), **options)


def hidden_states() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1))


def our_logits(x: Tensor, gate: nn.Module) -> Tensor:
    return nn.functional.linear(x, gate.weight, getattr(gate, "bias", None))


def selection_bias(gate: nn.Module) -> Tensor | None:
    return getattr(gate, "e_score_correction_bias", None)


def test_every_preset_is_tested() -> None:
    assert set(FAMILIES) == set(ROUTER_PRESETS)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_same_experts_scores_and_gradients(name: str) -> None:
    block = FAMILIES[name].build_block()
    gate = getattr(block, FAMILIES[name].router)
    x = hidden_states().requires_grad_()
    theirs_logits, theirs, ids = gate(x)
    theirs_dense = torch.zeros(T, E).scatter(1, ids, theirs)

    ours = route(our_logits(x, gate), moe_config(name), selection_bias=selection_bias(gate))
    dense = ours.dense()

    assert torch.equal(dense != 0, theirs_dense != 0)
    assert int((dense != 0).sum()) == T * K
    torch.testing.assert_close(dense, theirs_dense, rtol=1e-5, atol=1e-7)
    assert ours.tokens_per_expert.tolist() == torch.bincount(ids.flatten(), minlength=E).tolist()
    assert theirs_logits.shape == (T, E)

    weight = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    trainable = [x, *gate.parameters()]
    got = torch.autograd.grad((dense * weight).sum(), trainable)
    want = torch.autograd.grad((theirs_dense * weight).sum(), trainable)
    for one, other in zip(got, want, strict=True):
        assert float(other.abs().max()) > 1e-2
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOFTMAX_FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_balancing_loss_is_transformers(name: str, padded: bool) -> None:
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(3)).requires_grad_()
    mask = torch.arange(T) % 5 != 0 if padded else None
    router = RouterConfig.preset(name)
    theirs = load_balancing_loss_func((logits,), E, K, None if mask is None else mask.view(2, -1).long())
    cfg = MoEConfig(D, N, E, K, router=router)
    ours = route(logits, cfg, token_mask=mask).aux_loss
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
    }


def shared_output(x: Tensor, block: nn.Module) -> Tensor:
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if shared is None:
        return torch.zeros_like(x)
    gate = getattr(block, "shared_expert_gate", None)
    w1 = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
    gate_weight = None if gate is None else gate.weight
    return reference.shared_expert(x, w1, shared.down_proj.weight, gate_weight=gate_weight)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_reference_layer_is_the_architectures_block(name: str) -> None:
    block = FAMILIES[name].build_block()
    gate = getattr(block, FAMILIES[name].router)
    x = hidden_states()
    with torch.no_grad():
        theirs = block(x[None])
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).view(T, D)
        routing = route(our_logits(x, gate), moe_config(name), selection_bias=selection_bias(gate))
        ours = reference.moe(x, plan=routing.plan, scores=routing.scores, **expert_weights(name, block))
        ours = ours + shared_output(x, block)
    assert float(theirs.abs().mean()) > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SOFTMAX_FAMILIES)
def test_loss_coefficients_are_the_configuration_classs(name: str) -> None:
    assert RouterConfig.preset(name).aux_loss_coef == FAMILIES[name].config_class()().router_aux_loss_coef


@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_groups_scale_and_normalisation_are_the_configuration_classs(name: str) -> None:
    theirs, ours = FAMILIES[name].config_class()(), RouterConfig.preset(name)
    assert (ours.num_groups, ours.top_groups) == (theirs.n_group, theirs.topk_group)
    assert ours.scale == theirs.routed_scaling_factor
    assert ours.normalize == theirs.norm_topk_prob

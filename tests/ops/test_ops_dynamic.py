"""torch.compile(dynamic=True), where every size and every number that is no module's is a symbol: one graph for all.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import tilemoe
from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.layers.moe import MoE
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.testing import make_inputs

D, N, E, K = 16, 8, 4, 2
TOKENS = (32, 51, 27)
LOSSES = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}
LAYERS: dict[str, tuple[MoEConfig, str | None]] = {
    "softmax": (MoEConfig(D, N, E, K, router=RouterConfig(**LOSSES)), None),
    "recompute": (MoEConfig(D, N, E, K, activation="gelu", router=RouterConfig(**LOSSES)), "up_proj"),
    "clamped": (
        MoEConfig(
            D, N, E, K, activation="swiglu_oai", activation_limit=0.5, activation_alpha=1.5, gate_up="interleaved",
            expert_bias=True, router=RouterConfig(softmax_after_topk=True, bias=True, scale=1.5),
        ),
        None,
    ),
    "shared": (
        MoEConfig(
            D, N, E, K, shared_intermediate_size=12, shared_gate=True,
            router=RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, num_groups=2, top_groups=1, **LOSSES),
        ),
        None,
    ),
}  # fmt: skip
ROUNDED = {
    mode: MoEConfig(D, N, E, K, rounding=TokenRounding(mode, 16), router=RouterConfig(scale=2.5, **LOSSES))
    for mode in ("nearest", "stochastic", "nearest_score", "balance")
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def check(
    function: Callable[..., tuple[Tensor, ...]],
    make: Callable[[int], dict[str, Any]],
    weights: tuple[Tensor, ...] = (),
    backend: str = "aot_eager",
) -> None:
    """Every number of tokens runs the first one's graph, to eager's results and gradients.

    ``make`` gives the keyword arguments for T tokens; of what requires a gradient, and of ``weights``, it is compared.
    """
    fast = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for tokens in TOKENS:
        torch.manual_seed(tokens)
        given = make(tokens)
        leaves = [given for given in (*given.values(), *weights) if isinstance(given, Tensor) and given.requires_grad]
        found, expected = (results(each, given, leaves) for each in (fast, function))
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)
        assert counters["stats"]["unique_graphs"] == 1, f"compiled again for {tokens} tokens"


def results(
    function: Callable[..., tuple[Tensor, ...]], given: dict[str, Any], leaves: list[Tensor]
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)  # the same draws
    outputs = function(**given)
    loss = sum(out.float().square().sum() for out in outputs if out.requires_grad)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return *outputs, *(grad for grad in grads if grad is not None)


def layer_inputs(tokens: int) -> dict[str, Any]:
    return {"x": torch.randn(tokens, D, requires_grad=True)}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    cfg, recompute = LAYERS[name]
    layer = MoE(cfg, recompute=recompute)
    check(lambda x: tuple(layer(x)), layer_inputs, tuple(layer.parameters()))


def test_layer_itself_by_inductor() -> None:
    layer = MoE(LAYERS["softmax"][0])
    check(layer, layer_inputs, tuple(layer.parameters()), backend="inductor")


@pytest.mark.parametrize("mode", ["nearest_score", "balance"])
def test_layer_with_rounded_rows(mode: str) -> None:
    layer = MoE(ROUNDED[mode])
    check(layer, layer_inputs, tuple(layer.parameters()))


def test_layer_of_sequences_with_padding() -> None:
    layer = MoE(LAYERS["softmax"][0], dtype=torch.bfloat16)

    def masked(tokens: int) -> dict[str, Any]:
        x = torch.randn(3, tokens, D, dtype=torch.bfloat16, requires_grad=True)
        return {"x": x, "token_mask": torch.rand(3, tokens) > 0.2}

    check(layer, masked, tuple(layer.parameters()))


@pytest.mark.parametrize("cfg", [*(cfg for cfg, _ in LAYERS.values()), *ROUNDED.values()], ids=[*LAYERS, *ROUNDED])
def test_route(cfg: MoEConfig) -> None:
    """Of a configuration that is no module's, all numbers are symbols."""

    def routed(logits: Tensor, token_mask: Tensor, selection_bias: Tensor | None) -> tuple[Tensor, ...]:
        routing = tilemoe.route(logits, cfg, token_mask=token_mask, selection_bias=selection_bias)
        plan = routing.plan
        return routing.scores, routing.aux_loss, routing.tokens_per_expert, plan.row_of_pair, routing.dense()

    def make(tokens: int) -> dict[str, Any]:
        logits, bias = torch.randn(tokens, E, requires_grad=True), torch.randn(E)
        return {
            "logits": logits,
            "token_mask": torch.rand(tokens) > 0.2,
            "selection_bias": bias if cfg.router.selection_bias else None,
        }

    check(routed, make)


def experts_inputs(tokens: int, activation: str = "swiglu", **options: Any) -> dict[str, Any]:
    ids = torch.rand(tokens, E).argsort(1)[:, :K].contiguous()
    plan = tilemoe.plan_topk(ids, E)
    tensors = make_inputs(plan, D, N, activation, **options)
    return {"plan": plan} | {key: tensor.requires_grad_() for key, tensor in tensors.items()}


def experts(**given: Any) -> tuple[Tensor, ...]:
    return (tilemoe.moe(**given),)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_experts(backend: str) -> None:
    check(experts, lambda tokens: experts_inputs(tokens, bias=True), backend=backend)


@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_experts_of_a_clamped_gate(recompute: str | None) -> None:
    """Its limit and alpha, which come as arguments, are symbols; the operators hold their values."""
    numbers = {"activation": "swiglu_oai", "activation_limit": 0.5, "activation_alpha": 1.5, "recompute": recompute}
    check(experts, lambda tokens: experts_inputs(tokens, "swiglu_oai", bias=True) | numbers)


def test_a_changed_limit_is_seen() -> None:
    fast = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    given = experts_inputs(32, "swiglu_oai") | {"activation": "swiglu_oai"}
    for limit in (0.5, 0.1, 0.5):
        torch.testing.assert_close(fast(activation_limit=limit, **given), experts(activation_limit=limit, **given))


def test_plans_within_and_autocast() -> None:
    def within(ids: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        tokens, num_experts = given["x"].shape[0], given["w1"].shape[0]
        plan = tilemoe.plan_topk(ids, num_experts)
        token = torch.arange(tokens).repeat_interleave(K)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = tilemoe.moe(plan=plan, **given)
        plan = tilemoe.plan_pairs(token, ids.reshape(-1), tokens, num_experts)
        given["scores"] = given["scores"].reshape(-1)
        return first, tilemoe.moe(plan=plan, **given)

    def make(tokens: int) -> dict[str, Any]:
        given = experts_inputs(tokens)
        ids = torch.rand(tokens, E).argsort(1)[:, :K].contiguous()
        return {"ids": ids} | {key: value for key, value in given.items() if key != "plan"}

    check(within, make)


def test_experts_with_adapters() -> None:
    def adapted(up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor, **given: Any) -> tuple[Tensor, ...]:
        return (moe_lora(adapters=Adapters(up_a, up_b, down_a, down_b, 0.5), **given),)

    def make(tokens: int) -> dict[str, Any]:
        given = experts_inputs(tokens)
        for name in ("w1", "w2"):
            given[name].requires_grad_(False)
        shapes = {"up_a": (E, 3, D), "up_b": (E, 2 * N, 3), "down_a": (E, 3, N), "down_b": (E, D, 3)}
        return given | {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}

    check(adapted, make)

"""torch.library and torch.compile: opcheck, one graph, no recompilation when T changes; sizes that are symbols.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import tilemoe
from tilemoe.activations import activation_spec
from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.kernels.experts.formats.dense import is_column_major
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.layers.moe import MoE
from tilemoe.ops import experts as library
from tilemoe.ops import lora as lora_ops
from tilemoe.ops import plan as plan_ops
from tilemoe.ops import rounding as rounding_ops
from tilemoe.ops import router as router_ops
from tilemoe.ops import window as window_ops
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.operator import Operator
from tilemoe.testing import assert_equal, forward_and_grads, hostile_routings, make_inputs

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
# Rows past R are unspecified, so operators that return rows repeat themselves only where every row is in use.
FULL_PLANS = ["random", "pairs, repeated", "no tokens"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def sample_arguments(plan: RoutingPlan, d: int, n: int, dtype: torch.dtype, bias: bool) -> dict[str, tuple[Any, ...]]:
    """What each registered operator is called with, those before it already run; inputs require grad.

    Weights with biases are column-major, as gpt-oss has them.
    """
    act = "swiglu" if bias else "relu2"
    spec = activation_spec(act, "concatenated", None, None)
    given = make_inputs(plan, d, n, act, dtype=dtype, bias=bias)
    if bias:
        given |= {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("w1", "w2")}
    given = {name: t.requires_grad_() for name, t in given.items()}
    x, w1, w2, scores = (given[name] for name in ("x", "w1", "w2", "scores"))
    b1, b2, s = given.get("b1"), given.get("b2"), scores.detach().reshape(-1).requires_grad_()
    ks = backend_named("torch")
    tail = library.ROUTED.flatten((plan, spec, ks))
    with torch.no_grad():
        _, h = ks.up_proj_act(x, w1, b1, plan, spec)
        do = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        dh, _, a_scaled = ks.down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
        kept = ks.quantize_h(h)
    return {
        "moe": (x, w1, w2, s, b1, b2, "full", False, *tail), "up_proj": (x, w1, b1, *tail),
        "dequantize_h": (kept.data, kept.scale, kept.dtype, *tail),
        "down_proj_dgrad_dact": (do, w2, b2, h, s, *tail),
        "down_proj_wgrad": (do, a_scaled, is_column_major(w2), *tail), "up_proj_input_grad": (dh, w1, *tail),
        "up_proj_wgrad": (x, dh, is_column_major(w1), *tail),
        "down_proj_bias_grad": (do, s, *tail),
        "up_proj_bias_grad": (dh, *tail),
    }  # fmt: skip


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OPS = {op.name: op.registered for op in vars(library).values() if isinstance(op, Operator) and op.registered}


def test_samples_cover_every_registered_operator() -> None:
    registered = {name for name in dir(torch.ops.tilemoe) if name in torch.ops.tilemoe}
    modules = (plan_ops, router_ops, rounding_ops, lora_ops, window_ops)  # which have tests of their own
    elsewhere = {op.name for module in modules for op in vars(module).values() if isinstance(op, Operator)}
    assert set(OPS) | elsewhere == registered
    assert set(OPS) == set(sample_arguments(PLANS["random"], 8, 8, torch.float32, True))


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    for plan in FULL_PLANS:
        for dtype, size, bias in ((torch.float32, (8, 8), True), (torch.bfloat16, (8, 5), False)):
            arguments = sample_arguments(PLANS[plan], *size, dtype, bias)[name]
            if name == "moe":
                torch.library.opcheck(library.moe.registered, arguments)
                arguments = (*arguments[:6], "none", *arguments[7:])
            # The steps of the backward refuse to be differentiated.
            # PyTorch compares no e4m3 to tell whether an operand was written to.
            checks = OPCHECKS[1:] if name == "dequantize_h" else OPCHECKS
            torch.library.opcheck(OPS[name], tuple(_detached(argument) for argument in arguments), test_utils=checks)


@pytest.mark.parametrize("plan", FULL_PLANS)
def test_opcheck_of_what_is_kept_in_fp8(plan: str) -> None:
    arguments = sample_arguments(PLANS[plan], 8, 64, torch.bfloat16, bias=True)["moe"]
    arguments = (*arguments[:6], "fp8", *arguments[7:])
    torch.library.opcheck(library.moe.registered, tuple(_detached(argument) for argument in arguments))
    checks = OPCHECKS[:-1]  # the last adds up all outputs, and PyTorch adds no e4m3
    torch.library.opcheck(library.moe.registered, arguments, test_utils=checks)


def _detached(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, Tensor) else argument


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_opcheck_of_plan_building(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 3], [4, 1], [1, 9], [2, 2]], dtype=dtype)
    torch.library.opcheck(plan_ops.build_topk.registered, (ids, 4, False))
    torch.library.opcheck(plan_ops.build_topk.registered, (ids[:0], 4, False))
    torch.library.opcheck(plan_ops.build_topk.registered, (ids.T, 4, True))
    token = torch.tensor([3, 0, 3, 1], dtype=dtype)
    torch.library.opcheck(plan_ops.build_pairs.registered, (token, ids[:, 1].contiguous(), 5, 4))
    torch.library.opcheck(plan_ops.build_pairs.registered, (token[:0], token[:0], 0, 4))


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("options", [{}, {"recompute": "up_proj"}, {"save": "fp8"}], ids=str)
@pytest.mark.parametrize("name", ["pairs, sentinels", "no tokens"])
def test_compiled_in_one_graph_equals_eager(name: str, options: dict[str, str]) -> None:
    inputs = make_inputs(PLANS[name], 16, 64, dtype=torch.bfloat16, bias=True)
    expected = forward_and_grads(moe, inputs, PLANS[name], **options)
    assert_equal(forward_and_grads(compiled(moe), inputs, PLANS[name], **options), expected)
    assert not counters["graph_break"]


def test_bad_arguments_are_still_named_under_compile() -> None:
    plan = PLANS["random"]
    inputs = make_inputs(plan, 16, 8)
    with pytest.raises(Exception, match="recompute must be None or 'up_proj', got 'all'"):
        compiled(moe)(plan=plan, recompute="all", **inputs)
    with pytest.raises(ValueError, match="found a negative id"):
        compiled(plan_topk)(torch.full((6, 2), -1), 4)


D, N, E, K = 16, 8, 4, 2
TOKENS = (32, 51, 27)
LOSSES = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}
LAYERS = {
    "loss over the model": MoEConfig(D, N, E, K, router=RouterConfig(**LOSSES, aux_loss_over="model")),
    "clamped": MoEConfig(
        D, N, E, K, activation="swiglu_oai", activation_limit=0.5, activation_alpha=1.5, gate_up="interleaved",
        expert_bias=True, router=RouterConfig(softmax_after_topk=True, bias=True, scale=1.5),
    ),
    "shared": MoEConfig(
        D, N, E, K, shared_intermediate_size=12, shared_gate=True,
        router=RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, num_groups=2, top_groups=1, **LOSSES),
    ),
    "rounded": MoEConfig(
        D, N, E, K, rounding=TokenRounding("nearest_score", 16), router=RouterConfig(scale=2.5, **LOSSES)
    ),
}  # fmt: skip


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
        torch.testing.assert_close(found, expected)
        assert counters["stats"]["unique_graphs"] == 1, f"compiled again for {tokens} tokens"


def results(
    function: Callable[..., tuple[Tensor, ...]], given: dict[str, Any], leaves: list[Tensor]
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)  # the same draws
    outputs = function(**given)
    loss = sum(out.float().square().sum() for out in outputs if out.requires_grad)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    return *outputs, *(grad for grad in grads if grad is not None)


def input_of(tokens: int) -> dict[str, Any]:
    return {"x": torch.randn(tokens, D, requires_grad=True)}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    layer = MoE(LAYERS[name])
    check(lambda x: tuple(layer(x)), input_of, tuple(layer.parameters()))


@pytest.mark.parametrize("name", ["clamped", "shared"])
def test_layer_of_a_model_that_writes_to_a_dict(name: str) -> None:
    """As transformers' do to capture outputs: Dynamo then refuses each MappingProxyType that it meets."""
    layer, kept = MoE(LAYERS[name]), dict[str, Tensor]()

    def model(x: Tensor) -> Tensor:
        kept["x"] = x
        kept["hidden"] = layer(x).hidden
        return kept["hidden"]

    x = input_of(5)["x"]
    assert_equal(compiled(model)(x), model(x))


@pytest.mark.parametrize("differentiated", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_layer_itself_by_inductor(differentiated: bool) -> None:
    """With its backward, which `test_layer` has in one graph and `test_experts` by Inductor, it is thorough."""
    layer = MoE(MoEConfig(D, N, E, K, router=RouterConfig(**LOSSES))).requires_grad_(differentiated)

    def make(tokens: int) -> dict[str, Any]:
        return {"x": torch.randn(tokens, D, requires_grad=differentiated)}

    check(layer, make, tuple(layer.parameters()), backend="inductor")


@pytest.mark.parametrize("mode", [None, "stochastic", pytest.param("balance", marks=pytest.mark.thorough)])
def test_route(mode: Any) -> None:
    """Of a configuration that is no module's, all numbers are symbols."""
    cfg = replace(LAYERS["shared"], rounding=None if mode is None else TokenRounding(mode, 16))

    def routed(logits: Tensor, token_mask: Tensor, selection_bias: Tensor | None) -> tuple[Tensor, ...]:
        routing = tilemoe.route(logits, cfg, token_mask=token_mask, selection_bias=selection_bias)
        plan = routing.plan
        return routing.scores, routing.aux_loss, routing.tokens_per_expert, plan.row_of_pair, routing.dense()

    def make(tokens: int) -> dict[str, Any]:
        logits, bias = torch.randn(tokens, E, requires_grad=True), torch.randn(E)
        mask = torch.rand(tokens) > 0.2
        return {"logits": logits, "token_mask": mask, "selection_bias": bias if cfg.router.selection_bias else None}

    check(routed, make)


def experts_inputs(tokens: int, activation: str = "swiglu", **options: Any) -> dict[str, Any]:
    ids = torch.rand(tokens, E).argsort(1)[:, :K].contiguous()
    plan = tilemoe.plan_topk(ids, E)
    tensors = make_inputs(plan, D, N, activation, **options)
    return {"plan": plan} | {key: tensor.requires_grad_() for key, tensor in tensors.items()}


def experts(**given: Any) -> tuple[Tensor, ...]:
    return (tilemoe.moe(**given),)


def test_experts() -> None:
    check(experts, lambda tokens: experts_inputs(tokens, bias=True), backend="inductor")


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


@pytest.mark.parametrize("rounding", [None, TokenRounding(mode="up", tile=16)], ids=["unrounded", "rounded"])
def test_layers_of_one_configuration_that_are_repeated(rounding: TokenRounding | None) -> None:
    """A number that a part to be repeated reads first as a symbol is an error of PyTorch's in the next one."""
    cfg = MoEConfig(D, N, E, K, router=RouterConfig(scale=2.5, **LOSSES), rounding=rounding)

    def layer(logits: Tensor) -> Tensor:
        routing = tilemoe.route(logits, cfg)
        return logits + routing.scores.sum() + routing.aux_loss

    def model(logits: Tensor) -> Tensor:
        for _ in range(2):
            logits = checkpoint(layer, logits, use_reentrant=False)
        return logits

    logits = torch.randn(20, E, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(logits), model(logits))

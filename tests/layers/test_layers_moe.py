"""The MoE layer against the reference, under autocast, checkpointing and compilation, and what it refuses.

T tokens · d hidden_size · E experts · K experts per token
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raises_one_line, saved_tensors
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import tilemoe
from tilemoe import reference
from tilemoe.config import ROUTER_PRESETS, MoEConfig, RouterConfig, TokenRounding
from tilemoe.layers.moe import MoE, MoEOutput
from tilemoe.testing import assert_equal, relative_error

SIZES = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 16, "num_experts_per_tok": 3}
EVERYTHING: dict[str, Any] = {
    "expert_bias": True,
    "shared_intermediate_size": 12,
    "shared_gate": True,
    "router": RouterConfig(selection_bias=True, bias=True, aux_loss_coef=0.1, z_loss_coef=0.01),
    "initializer_range": 0.3,
}
TOLERANCES = [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]


def make(dtype: torch.dtype = torch.float32, recompute: str | None = None, **options: Any) -> MoE:
    """A layer whose biases, as after some training, are not zero."""
    torch.manual_seed(0)
    layer = MoE(MoEConfig(**{**SIZES, "initializer_range": 0.3, **options}), dtype=dtype, recompute=recompute)
    for name, tensor in layer.state_dict().items():
        if name.endswith(("bias", "b1", "b2")):
            torch.nn.init.normal_(tensor, 0.0, 0.2)
    return layer


def by_reference(layer: MoE, x: Tensor, token_mask: Tensor | None = None, scores_of: Tensor | None = None) -> MoEOutput:
    """The layer in fp64 from the reference's parts; x (T, d). ``scores_of``: logits to route by, if not its own."""
    cfg = layer.cfg
    weight = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    x = x.double()
    logits = x @ weight["router.weight"].T + weight.get("router.bias", 0.0)
    decided_by = logits if scores_of is None else scores_of.double()
    bias = weight.get("router.selection_bias")
    routing = reference.route(decided_by, cfg, selection_bias=bias, token_mask=token_mask)
    token, expert = routing.scores.nonzero(as_tuple=True)
    plan = tilemoe.plan_pairs(token, expert, x.shape[0], cfg.num_experts)
    options = {key: getattr(cfg, key) for key in ("activation", "gate_up", "activation_limit", "activation_alpha")}
    biases = {name: weight.get(f"experts.{name}") for name in ("b1", "b2")}
    experts = (weight["experts.w1"], weight["experts.w2"], plan, routing.scores[token, expert])
    hidden = reference.moe(x, *experts, **biases, **options)
    if cfg.shared_intermediate_size:
        shared = (weight["shared.w1"], weight["shared.w2"])
        hidden = hidden + reference.shared_expert(x, *shared, gate_weight=weight.get("shared_gate.weight"), **options)
    if token_mask is not None:
        hidden = hidden * token_mask[:, None]
        logits = (x * token_mask[:, None]) @ weight["router.weight"].T + weight.get("router.bias", 0.0)
    return MoEOutput(hidden, routing.aux_loss, routing.tokens_per_expert, logits, routing.tokens_per_expert)


def assert_matches(out: MoEOutput, expected: MoEOutput, tolerance: float) -> None:
    assert relative_error(out.hidden.detach().flatten(0, -2), expected.hidden) < tolerance
    assert relative_error(out.router_logits.detach(), expected.router_logits) < max(tolerance, 1e-6)
    assert out.tokens_per_expert.tolist() == expected.tokens_per_expert.tolist()
    torch.testing.assert_close(out.aux_loss.double(), expected.aux_loss.double(), rtol=1e-4, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {"shared_intermediate_size": 12},
    "gated": {"shared_intermediate_size": 12, "shared_gate": True},
    "relu2": {"shared_intermediate_size": 12, "activation": "relu2"},
    "interleaved": {"shared_intermediate_size": 12, "activation": "geglu", "gate_up": "interleaved"},
    "clamped": {"activation": "swiglu_oai", "activation_limit": 0.5, "gate_up": "interleaved", "expert_bias": True},
    "ungated-bias": {"activation": "gelu_tanh", "expert_bias": True},
    "everything": EVERYTHING,
    **{f"routed as {name}": {"router": RouterConfig.preset(name)} for name in sorted(ROUTER_PRESETS)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_every_option_and_router_match_the_reference(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    layer = make(dtype, **options)
    x = torch.randn(2, 3, 5, 16).to(dtype)
    out = layer(x)
    assert out.hidden.shape == x.shape
    assert out.hidden.dtype == dtype
    assert out.aux_loss.dtype == torch.float32
    assert out.router_logits.shape == (30, 16)
    # In bf16 the layer routes by its own logits' rounding: the reference is given those.
    expected = by_reference(layer, x.reshape(30, 16), scores_of=out.router_logits.detach())
    assert_matches(out, expected, tolerance)


def test_gradients_of_everything() -> None:
    layer = make(torch.float64, **EVERYTHING)
    x = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *_: Tensor) -> Tensor:
        return layer(x).hidden

    assert all(parameter.requires_grad for parameter in layer.parameters())
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    layer = make(**EVERYTHING)
    x = torch.zeros(shape, requires_grad=True)
    out = layer(x)
    (out.hidden.sum() + out.aux_loss).backward()
    assert out.hidden.shape == shape
    assert not out.tokens_per_expert.any()
    assert float(out.aux_loss.detach()) == 0.0
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_autocast_routes_in_fp32_and_gives_its_own_dtype() -> None:
    layer = make(**EVERYTHING)
    x = torch.randn(40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.hidden.dtype == torch.bfloat16
    assert out.router_logits.dtype == torch.float32
    torch.testing.assert_close(out.router_logits, layer(x).router_logits, rtol=0, atol=0)
    assert_matches(out._replace(router_logits=layer(x).router_logits), by_reference(layer, x), 3e-2)
    out.hidden.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters() if parameter.grad is not None)


def test_low_precision_weights_are_widened_for_the_logits() -> None:
    layer = make(torch.bfloat16)
    x = torch.randn(40, 16).bfloat16()
    exact = x.double() @ layer.router.weight.detach().double().T
    assert layer(x).router_logits.dtype == torch.float32
    assert relative_error(layer(x).router_logits.detach(), exact) < 1e-6


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_router_keeps_x_as_it_came_and_differentiates_the_upcast(weight_dtype: torch.dtype) -> None:
    router = make(weight_dtype, router=RouterConfig(bias=True)).router
    x = torch.randn(40, 16).bfloat16().requires_grad_()
    with saved_tensors() as kept:
        logits = router(x).logits
    storages, expected = ({t.untyped_storage().data_ptr() for t in each} for each in (kept, (x, router.weight)))
    assert storages == expected
    leaves = (x, router.weight, router.bias)
    d_logits = torch.randn(40, 16)
    with torch.autocast("cpu", torch.bfloat16):  # must not lower the backward either
        grads = torch.autograd.grad(logits, leaves, d_logits)
    plain = torch.nn.functional.linear(x.float(), router.weight.float(), router.bias.float())
    torch.testing.assert_close(grads, torch.autograd.grad(plain, leaves, d_logits))


def test_selection_bias_stays_fp32_when_the_layer_is_cast_or_given_a_coarser_state() -> None:
    layer = make(router=RouterConfig(selection_bias=True))
    before = layer.router.selection_bias.clone()
    layer.to(torch.bfloat16)
    assert layer.experts.w1.dtype == torch.bfloat16
    assert torch.equal(layer.router.selection_bias, before)
    layer(torch.randn(4, 16).bfloat16())
    assert torch.equal(copy.deepcopy(layer).double().router.selection_bias, before)
    layer.load_state_dict({name: value.bfloat16() for name, value in layer.state_dict().items()}, assign=True)
    layer(torch.randn(4, 16).bfloat16())


def test_initialisation() -> None:
    layer = MoE(MoEConfig(128, 64, 8, 2, expert_bias=True, shared_intermediate_size=64, router=RouterConfig(bias=True)))
    for name, parameter in layer.named_parameters():
        if name.endswith(("bias", "b1", "b2")):
            assert not parameter.any(), name
        else:
            assert abs(float(parameter.detach().mean())) < 2e-3, name
            assert 0.018 < float(parameter.detach().std()) < 0.022, name


def test_meta_device_then_materialised_equals_made_here() -> None:
    cfg = make(**EVERYTHING).cfg
    on_meta = MoE(cfg, device="meta", dtype=torch.float64)
    assert all(tensor.is_meta for tensor in on_meta.state_dict().values())
    layer = on_meta.to_empty(device="cpu")
    layer.reset_parameters(torch.Generator().manual_seed(5))
    here = MoE(cfg, dtype=torch.float64)
    here.reset_parameters(torch.Generator().manual_seed(5))
    assert_equal(layer.state_dict(), here.state_dict())


def test_names_and_shapes_of_the_state() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in make(**EVERYTHING).state_dict().items()}
    assert shapes == {
        "router.weight": (16, 16), "router.bias": (16,), "router.selection_bias": (16,), "experts.w1": (16, 16, 16),
        "experts.w2": (16, 16, 8), "experts.b1": (16, 16), "experts.b2": (16, 16), "shared.w1": (24, 16),
        "shared.w2": (16, 12), "shared_gate.weight": (1, 16),
    }  # fmt: skip
    assert set(make(activation="relu").state_dict()) == {"router.weight", "experts.w1", "experts.w2"}
    assert make(activation="relu").experts.w1.shape == (16, 8, 16)


def losses_and_grads(layer: MoE, x: Tensor, run: Callable[[Tensor], Any]) -> list[Tensor]:
    """Of what ``run`` computes, the layer or something made of it."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    hidden, aux_loss, counts = run(x)[:3]
    (hidden.square().sum() + aux_loss).backward()
    grads = [parameter.grad.clone() for parameter in layer.parameters()]
    return [hidden.detach(), aux_loss.detach(), counts, x.grad, *grads]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "up_proj"])
def test_recomputation_changes_nothing(how: str) -> None:
    layer = make(**EVERYTHING)
    again = make(recompute="up_proj" if how == "up_proj" else None, **EVERYTHING)

    def checkpointed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return checkpoint(lambda x: tuple(again(x)[:3]), x, use_reentrant=how == "reentrant")

    x = torch.randn(50, 16)
    found = losses_and_grads(again, x, again if how == "up_proj" else checkpointed)
    assert_equal(found, losses_and_grads(layer, x, layer))


def test_nan_is_one_line() -> None:
    with raises_one_line("NaN"):
        make()(torch.full((3, 16), float("nan")))


def test_bad_arguments_are_one_line() -> None:
    with pytest.raises(ValueError, match="cfg must be a MoEConfig"):
        MoE({"hidden_size": 16})
    with pytest.raises(ValueError, match="no selection bias"):
        make().update_selection_bias(torch.ones(16, dtype=torch.int64), 0.1)
    with pytest.raises(ValueError, match="recompute must be None or 'up_proj', got 'all'"):
        MoE(make().cfg, recompute="all")


@pytest.mark.parametrize("rounding", [None, TokenRounding("nearest", 16)], ids=["top-K", "rounded"])
def test_a_layer_under_vmap_or_func_says_what_to_do_instead(rounding: TokenRounding | None) -> None:
    layer = MoE(MoEConfig(16, 8, 4, 2, rounding=rounding))
    x = torch.randn(3, 20, 16)
    refused = r"tilemoe.MoE does not go through torch\.vmap or torch\.func\. Pass a batch as further tokens"
    weights = dict(layer.named_parameters())
    for transformed in (
        lambda: torch.vmap(lambda each: layer(each).hidden)(x),
        lambda: torch.func.grad(lambda each: layer(each).hidden.sum())(x[0]),
        lambda: torch.func.grad(lambda w: torch.func.functional_call(layer, w, (x[0],)).hidden.sum())(weights),
    ):
        with pytest.raises(RuntimeError, match=refused):
            transformed()
    with pytest.raises(RuntimeError, match=r"tilemoe\.MoE has no forward-mode derivative"):
        torch.func.jvp(lambda each: layer(each).hidden, (x[0],), (x[1],))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"tilemoe\.MoE has no forward-mode derivative"):
        layer(forward_ad.make_dual(x[0], x[1]))
    # Without a transform, weights of one's own are ordinary.
    out = torch.func.functional_call(layer, {name: 2 * tensor for name, tensor in weights.items()}, (x[0],))
    assert not torch.equal(out.hidden, layer(x[0]).hidden)


@pytest.mark.parametrize("shape", [(16,), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_the_output_of_a_layer_given_to_fsdp_may_be_changed_in_place(
    shape: tuple[int, ...], options: dict[str, Any], one_process: DeviceMesh
) -> None:
    """FSDP2 hangs the gather for the backward on the output, and warns of a view, which would lose it."""
    layer, x = make(**options), torch.randn(shape)
    whole = copy.deepcopy(layer)
    fully_shard(layer, mesh=one_process)
    for each in (layer, whole):
        hidden = each(x).hidden
        assert hidden.shape == shape
        assert not hidden._is_view()
        hidden *= 2
        hidden.square().sum().backward()
    for sharded, parameter in zip(layer.parameters(), whole.parameters(), strict=True):
        if parameter.grad is not None:
            assert_equal(sharded.grad.full_tensor(), parameter.grad)

"""Muon against torch.optim.Muon, matrix by matrix, and against singular values; which parameter it updates; resuming.

E experts · m, n rows and columns of a matrix
"""

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn

from tilemoe.config import ModelConfig, MoEConfig, RouterConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.train import muon
from tilemoe.train.config import MuonConfig, OptimConfig
from tilemoe.train.muon import MuonWithAdamW, muon_group, newton_schulz
from tilemoe.train.optim import make_optimizer, set_learning_rate

CONFIG = OptimConfig(lr=0.1, name="muon", weight_decay=0.5)
BF16 = 2.0**-8  # products of a stack may be summed in another order than those of a single matrix
SHAPES = [(16, 16), (24, 16), (16, 40)]


def gradients(shape: tuple[int, ...], steps: int = 4) -> Tensor:
    return torch.randn(steps, *shape, generator=torch.Generator().manual_seed(1))


def stepped(parameters: list[Tensor], gradients: list[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The changes of the parameters (m, n) by steps with each gradient (steps, m, n)."""
    before = [parameter.detach().clone() for parameter in parameters]
    for grads in zip(*gradients, strict=True):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return [parameter.detach() - old for parameter, old in zip(parameters, before, strict=True)]


def theirs(parameters: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    settings = asdict(config.muon)
    lr = config.lr * settings.pop("lr_scale")
    return torch.optim.Muon(parameters, lr=lr, weight_decay=config.weight_decay, **settings)


def assert_near(got: Tensor, want: Tensor) -> None:
    assert (got - want).norm() <= BF16 * want.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings",
    [
        MuonConfig(),
        MuonConfig(adjust_lr_fn="original", lr_scale=3.0, momentum=0.5),
        MuonConfig(nesterov=False, ns_steps=3, ns_coefficients=(3.0, -3.2, 1.2)),
    ],
)
def test_matrices_move_as_by_torchs_muon(shape: tuple[int, int], settings: MuonConfig) -> None:
    """Three of one shape, which are orthogonalised together, one without a gradient."""
    config = replace(CONFIG, muon=settings)
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for _ in range(4)]
    single = [nn.Parameter(p.detach().clone()) for p in ours[:3]]
    grads = list(gradients((3, *shape)).unbind(1))
    got = stepped(ours[:3], grads, MuonWithAdamW([muon_group(ours, config)]))
    for left, right in zip(got, stepped(single, grads, theirs(single, config)), strict=True):
        assert_near(left, right)
    assert ours[3].grad is None


def test_stacks_that_are_too_large_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def watched(matrices: Tensor, *settings: object) -> Tensor:
        sizes.append(len(matrices))
        return newton_schulz(matrices, *settings)  # type: ignore[arg-type]

    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(7)]
    grads = list(gradients((7, 4, 4)).unbind(1))
    want = stepped(weights, grads, MuonWithAdamW([muon_group(weights, CONFIG)]))
    monkeypatch.setattr(muon, "_LARGEST_STACK", 3 * 16)
    monkeypatch.setattr(muon, "newton_schulz", watched)
    again = [nn.Parameter(torch.ones(4, 4)) for _ in range(7)]
    got = stepped(again, grads, MuonWithAdamW([muon_group(again, CONFIG)]))
    assert sizes == [3, 3, 1] * 4
    for left, right in zip(got, want, strict=True):
        assert_near(left, right)


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("shape", [(32, 32), (48, 32), (32, 64)])
def test_singular_values_become_about_one(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], has_bf16: bool
) -> None:
    """And the singular vectors stay: U^T O V is diagonal."""
    monkeypatch.setattr(muon, "has_fast_gemm", lambda device_type, dtype: has_bf16)
    matrices = gradients(shape, steps=6).double()
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ newton_schulz(matrices, CONFIG.muon.ns_coefficients, 5).double() @ vh.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert (inner - torch.diag_embed(values)).norm() < 0.05 * values.norm()


MOE = MoEConfig(
    8, 8, 4, 2, expert_bias=True, shared_intermediate_size=8, shared_gate=True, router=RouterConfig(bias=True)
)
MODEL = ModelConfig(32, 8, 2, 2, 1, 4, 8, moe=MOE, dense_intermediate_size=16, dense_layers=(0,), qk_norm="head")
ATTENTION = {f"attention.{name}_proj.weight" for name in "qkvo"}


@pytest.mark.parametrize("tied", [True, False])
def test_which_parameters_of_a_decoder_are_muons(tied: bool) -> None:
    model = DecoderLM(replace(MODEL, tie_embeddings=tied))
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [{name_of[id(p)] for p in group["params"]} for group in make_optimizer(model, CONFIG).param_groups]
    experts = {"mlp.experts.w1", "mlp.experts.w2", "mlp.shared.w1", "mlp.shared.w2"}
    assert groups[0] == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in ATTENTION} | {
        "blocks.0.mlp.w1", "blocks.0.mlp.w2", *(f"blocks.1.{name}" for name in experts)
    }  # fmt: skip
    gates = {"blocks.1.mlp.router.weight", "blocks.1.mlp.shared_gate.weight"}
    assert groups[1] == gates | (set() if tied else {"head.weight"})
    assert {"embed.weight", "norm.weight", "blocks.1.mlp.router.bias", "blocks.1.mlp.experts.b1"} < groups[2]
    assert sum(map(len, groups)) == len(name_of)


def separate(weight: Tensor, gate_up: str | None) -> list[Tensor]:
    """Views of the matrices of (..., m, n), of all gates first; ``gate_up`` None: each is one."""
    halves = [weight]
    if gate_up is not None:
        halves = [weight[..., 0::2, :], weight[..., 1::2, :]] if gate_up == "interleaved" else [*weight.chunk(2, -2)]
    return [matrix for half in halves for matrix in (half[None] if half.ndim == 2 else half)]


@pytest.mark.parametrize("stored", ["rows", "columns"])
@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original"])
@pytest.mark.parametrize(
    ("activation", "gate_up"),
    [("swiglu", "concatenated"), ("geglu", "interleaved"), ("swiglu_oai", "interleaved"), ("relu2", "concatenated")],
)
def test_gate_and_up_move_as_two_matrices(activation: str, gate_up: str, adjust_lr_fn: str, stored: str) -> None:
    """Of experts, shared expert and dense MLP, the gates' gradients the larger ones; every other matrix is one."""
    torch.manual_seed(0)
    moe = replace(MOE, activation=activation, gate_up=gate_up, intermediate_size=12, shared_intermediate_size=20)
    model = DecoderLM(replace(MODEL, moe=moe))
    experts = model.blocks[1].mlp.experts
    experts.w1.data = experts.w1.data.mT.contiguous().mT if stored == "columns" else experts.w1.data
    order = gate_up if moe.is_gated else None
    order_of = {"blocks.0.mlp.w1": "concatenated", "blocks.1.mlp.experts.w1": order, "blocks.1.mlp.shared.w1": order}
    config = replace(CONFIG, muon=replace(CONFIG.muon, adjust_lr_fn=adjust_lr_fn))
    optimizer = make_optimizer(model, config)
    weights, orders, single, grads = optimizer.param_groups[0]["params"], [], [], []
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for weight in weights:
        orders.append(order_of.get(name_of[id(weight)]))
        single += [nn.Parameter(matrix.detach().clone()) for matrix in separate(weight, orders[-1])]
        grads.append(gradients(tuple(weight.shape)))
        for gate in separate(grads[-1], orders[-1])[: len(grads[-1]) if orders[-1] else 0]:
            gate *= 10.0
    got = stepped(weights, grads, optimizer)
    assert experts.w1.is_contiguous() == (stored == "rows")
    alone = [torch.stack(each) for grad, its in zip(grads, orders, strict=True)
             for each in zip(*(separate(step, its) for step in grad), strict=True)]  # fmt: skip
    want = stepped(single, alone, theirs(single, config))
    changes = [change for weight, its in zip(got, orders, strict=True) for change in separate(weight, its)]
    for left, right in zip(changes, want, strict=True):
        assert_near(left, right)


def with_gradients(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def test_the_others_move_as_by_adamw() -> None:
    """Bit for bit, at a learning rate that is not scaled."""
    torch.manual_seed(0)
    ours = DecoderLM(MODEL)
    plain = DecoderLM(MODEL)
    plain.load_state_dict(ours.state_dict())
    scaled = replace(CONFIG, muon=MuonConfig(lr_scale=20.0))
    optimizers = make_optimizer(ours, scaled), make_optimizer(plain, replace(CONFIG, name="adamw"))
    assert [group["lr"] for group in optimizers[0].param_groups] == pytest.approx([2.0, 0.1, 0.1])
    for _ in range(3):
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            with_gradients(model)
            set_learning_rate(optimizer, 0.01)
            optimizer.step()
    assert [group["lr"] for group in optimizers[0].param_groups] == pytest.approx([0.2, 0.01, 0.01])
    matrices = {id(p) for p in optimizers[0].param_groups[0]["params"]}
    for (name, left), right in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right) == (id(left) not in matrices), name

"""The experts with adapters over the Triton kernels in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from triton_checks import interpret, normal

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.plan import RoutingPlan
from tilemoe.testing import hostile_routings, poisoned_memory, relative_error

pytestmark = pytest.mark.process("interpreter")

D, N, R = 32, 24, 8
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=16)}
# Both ways to reach memory are met by several; all pairs would take a minute.
CASES = {
    "random": 90, "ragged tiles": 0, "sentinels": 90, "one token on a sentinel": 0, "pairs, many per token": 0,
    "pairs, sentinels": 90, "rounded up": 90,
}  # fmt: skip


def run(plan: RoutingPlan, kernels: str, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of x, the scores and the adapters."""
    generator = torch.Generator().manual_seed(0)
    experts, tokens = plan.num_experts, plan.num_tokens

    def random(*shape: int) -> Tensor:
        return (shape[-1] ** -0.5 * torch.randn(shape, generator=generator)).to(dtype)

    pairs = (plan.num_pairs,) if plan.pair_start_of_token is not None else (tokens, plan.num_pairs // tokens)
    x, scores = random(tokens, D).mul_(4).requires_grad_(), torch.rand(pairs, generator=generator).requires_grad_()
    shapes = ((experts, R, D), (experts, 2 * N, R), (experts, R, N), (experts, D, R))
    adapters = [random(*shape).requires_grad_() for shape in shapes]
    w1, w2, b1, b2 = random(experts, 2 * N, D), random(experts, D, N), random(experts, 2 * N), random(experts, D)
    with poisoned_memory():
        o = moe_lora(x, w1, w2, plan, scores, Adapters(*adapters, 0.5), b1=b1, b2=b2, kernels=kernels)
        do = torch.linspace(-1.0, 1.5, o.numel()).view_as(o).to(dtype)
        return [o.detach(), *torch.autograd.grad(o, [x, scores, *adapters], do)]


@pytest.mark.parametrize(("name", "capability"), CASES.items())
def test_hostile_routings(name: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, capability)
    for ours, plain in zip(
        run(ROUTINGS[name], "triton", torch.float32), run(ROUTINGS[name], "torch", torch.float32), strict=True
    ):
        if plain.any():
            assert relative_error(ours, plain.double()) < 5e-6
        else:
            assert not ours.any()


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize("name", ["swiglu_oai", "swiglu_clamped", "geglu", "relu2"])
def test_the_activation_and_its_gradient(name: str, gate_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several tiles of columns, the last of them partial, and rows that no pair has."""
    interpret(monkeypatch)
    plan, spec, n = ROUTINGS["sentinels"], activation_spec(name, gate_up), 136
    shapes = ((plan.capacity, spec.width_factor * n), (plan.capacity, n), (plan.num_tokens, D), (plan.num_experts, D))
    h, da, do, b2 = (4 * normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    s = normal(plan.num_pairs, seed=4).sigmoid()
    rows = slice(int(plan.row_start_of_expert[-1]))
    found, wanted = (
        (*backend.dact(da, do, b2, h, s, plan, spec), backend.activation(h, plan, spec))
        for backend in (TritonBackend(), TorchBackend())
    )
    for ours, exact in zip(found, wanted, strict=True):
        used = rows if len(exact) == plan.capacity and exact.ndim == 2 else slice(None)
        assert relative_error(ours[used], exact[used].double()) < 5e-6

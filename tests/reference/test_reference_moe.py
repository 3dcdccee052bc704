"""The oracle itself against a formula without indices: every expert on every token, weighted by dense scores."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe import reference
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_pairs, plan_topk

T, D, N, E, K = 11, 6, 5, 4, 2


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (T, D), "w1": (E, 2 * N, D), "w2": (E, D, N), "b1": (E, 2 * N), "b2": (E, D)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def every_expert_on_every_token(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor, dense: Tensor) -> Tensor:
    gate, up = (torch.einsum("td,end->ten", x, w1) + b1).chunk(2, dim=-1)
    y = torch.einsum("ten,edn->ted", F.silu(gate) * up, w2) + b2
    return torch.einsum("ted,te->td", y, dense)


def assert_same_with_gradients(actual: Tensor, expected: Tensor, inputs: dict[str, Tensor]) -> None:
    assert float(expected.detach().abs().mean()) > 0.1
    torch.testing.assert_close(actual, expected)
    do = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tensors = list(inputs.values())
    torch.testing.assert_close(torch.autograd.grad(actual, tensors, do), torch.autograd.grad(expected, tensors, do))


def test_topk_plan_equals_the_dense_formula() -> None:
    p = weights()
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K]
    ids[2, 1] = E  # a sentinel
    ids[4] = E
    scores = torch.rand(T, K, generator=generator, dtype=torch.float64).requires_grad_()
    dense = torch.zeros(T, E + 1, dtype=torch.float64).scatter(1, ids, scores)[:, :E]

    out = reference.moe(p["x"], p["w1"], p["w2"], plan_topk(ids, E), scores, b1=p["b1"], b2=p["b2"])

    assert torch.equal(out[4], torch.zeros(D, dtype=torch.float64))
    assert_same_with_gradients(out, every_expert_on_every_token(**p, dense=dense), {**p, "scores": scores})


def test_pairs_plan_counts_a_repeated_pair_twice() -> None:
    p = weights()
    token = torch.tensor([7, 0, 7, 3, 7, 0])
    expert = torch.tensor([1, 3, 1, 0, 2, E])
    scores = torch.tensor([0.5, 1.0, 0.25, 2.0, -1.0, 9.0], dtype=torch.float64, requires_grad=True)
    dense = torch.zeros(T, E + 1, dtype=torch.float64).index_put((token, expert), scores, accumulate=True)[:, :E]

    out = reference.moe(p["x"], p["w1"], p["w2"], plan_pairs(token, expert, T, E), scores, b1=p["b1"], b2=p["b2"])

    assert_same_with_gradients(out, every_expert_on_every_token(**p, dense=dense), {**p, "scores": scores})


def test_interleaved_weights_are_the_same_layer() -> None:
    p = {name: tensor.detach() for name, tensor in weights().items()}
    ids = torch.arange(T)[:, None] % E
    scores = torch.ones(T, 1)
    mixed = torch.arange(2 * N).view(2, N).T.reshape(-1)  # gate0, up0, gate1, ...
    plan = plan_topk(ids, E)
    out = reference.moe(p["x"], p["w1"], p["w2"], plan, scores, b1=p["b1"], b2=p["b2"])
    also = reference.moe(
        p["x"], p["w1"][:, mixed], p["w2"], plan, scores, gate_up="interleaved", b1=p["b1"][:, mixed], b2=p["b2"]
    )
    torch.testing.assert_close(also, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_computed_in_fp32_and_autocast_changes_nothing(dtype: torch.dtype) -> None:
    p = {name: tensor.detach() for name, tensor in weights(dtype).items()}
    plan = plan_topk(torch.arange(T)[:, None] % E, E)
    scores = torch.rand(T, 1, generator=torch.Generator().manual_seed(0))
    exact = reference.moe(p["x"].double(), p["w1"].double(), p["w2"].double(), plan, scores)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = reference.moe(p["x"], p["w1"], p["w2"], plan, scores)
    assert out.dtype == dtype
    torch.testing.assert_close(out, exact.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


def test_no_tokens_leave_gradients_of_zero() -> None:
    p = weights()
    x = torch.empty(0, D, dtype=torch.float64, requires_grad=True)
    scores = torch.empty(0, K, requires_grad=True)
    out = reference.moe(x, p["w1"], p["w2"], plan_topk(torch.empty(0, K, dtype=torch.int64), E), scores)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, D)
    assert scores.grad is not None
    assert scores.grad.shape == (0, K)
    for name in ("w1", "w2"):
        assert p[name].grad is not None
        assert not p[name].grad.any()


def test_gradcheck() -> None:
    p = weights()
    plan = plan_topk(torch.tensor([[0, 3], [3, 1], [4, 0]]), E)
    scores = torch.rand(3, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor, scores: Tensor) -> Tensor:
        return reference.moe(x, w1, w2, plan, scores, "geglu", b1=b1, b2=b2)

    assert torch.autograd.gradcheck(run, (p["x"][:3], p["w1"], p["w2"], p["b1"], p["b2"], scores))


def test_shared_expert_with_and_without_gate() -> None:
    p = weights()
    w1, w2, gate_weight = p["w1"][0], p["w2"][0], p["x"][:1]
    gate, up = (p["x"] @ w1.T).chunk(2, dim=-1)
    plain = (F.silu(gate) * up) @ w2.T
    torch.testing.assert_close(reference.shared_expert(p["x"], w1, w2), plain)
    gated = reference.shared_expert(p["x"], w1, w2, gate_weight=gate_weight)
    torch.testing.assert_close(gated, torch.sigmoid(p["x"] @ gate_weight.T) * plain)


def test_the_oracle_is_called_as_the_layer_is() -> None:
    oracle, layer = inspect.signature(reference.moe).parameters, inspect.signature(moe).parameters
    assert list(oracle) == list(layer)
    assert [p.default for p in oracle.values()] == [p.default for p in layer.values()]

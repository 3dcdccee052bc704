"""Token rounding on a GPU: no host sync, graphs, compilation, and the whole layer against the reference.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

import pytest
import torch
from gpu_layers import no_host_sync
from torch import Tensor

from tilemoe.config import ROUNDING_MODES, MoEConfig, RouterConfig, TokenRounding
from tilemoe.kernels.choose import choose_rounding
from tilemoe.layers.moe import MoE
from tilemoe.routing.rounding import rounds
from tilemoe.routing.topk import Routing, route
from tilemoe.testing import assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

T, E, K = 4096, 64, 4
LOSSES = RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01)


def config(mode: str, experts: int = E, k: int = K, router: RouterConfig = LOSSES, tile: int = 128) -> MoEConfig:
    rounding = TokenRounding(mode, tile)  # type: ignore[arg-type]
    return MoEConfig(256, 128, experts, k, router=router, rounding=rounding, initializer_range=0.05)


def random_logits(tokens: int = T, experts: int = E, seed: int = 0) -> Tensor:
    return (1.5 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))).cuda()


def seeded(device: str = "cuda") -> torch.Generator:
    return torch.Generator(device).manual_seed(3)


@pytest.mark.parametrize("mode", ["nearest", "balance", "up", "down"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(T, E, K), (16384, 512, 10), (3001, 128, 8), (40960, 60, 33)])
def test_route_equals_the_cpu(tokens: int, experts: int, k: int, mode: str) -> None:
    cfg = config(mode, experts, k)
    logits = random_logits(tokens, experts).requires_grad_()
    on_cpu = logits.detach().cpu().requires_grad_()
    found, expected = route(logits, cfg), route(on_cpu, cfg)
    assert torch.equal(found.tokens_per_expert.cpu(), expected.tokens_per_expert)
    torch.testing.assert_close(found.aux_loss.cpu(), expected.aux_loss, rtol=1e-4, atol=1e-6)
    dense, wanted = found.dense().cpu(), expected.dense()
    # Two scores that differ in their last bit may change places.
    differs = (dense != 0) != (wanted != 0)
    assert int(differs.sum()) <= 16
    torch.testing.assert_close(dense[~differs], wanted[~differs], rtol=1e-4, atol=1e-7)
    weight = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1)).masked_fill(differs, 0.0)
    (grad,) = torch.autograd.grad((found.dense() * weight.cuda()).sum() + found.aux_loss, logits)
    (exact,) = torch.autograd.grad((expected.dense() * weight).sum() + expected.aux_loss, on_cpu)
    torch.testing.assert_close(grad.cpu(), exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_fp64_logits_are_rounded_by_pytorch(mode: str) -> None:
    """By the operators of any device, and the fused kernels agree with them: the same draws, the same rows."""
    cfg, logits = config(mode), random_logits()
    assert choose_rounding(logits.device, torch.float64, E).name == "torch"
    found, exact = route(logits, cfg, generator=seeded()), route(logits.double(), cfg, generator=seeded())
    assert exact.scores.dtype == torch.float64
    assert torch.equal(found.tokens_per_expert, exact.tokens_per_expert)
    dense, wanted = found.dense(), exact.dense()
    differs = (dense != 0) != (wanted != 0)
    assert int(differs.sum()) <= 16
    torch.testing.assert_close(dense[~differs].double(), wanted[~differs], rtol=1e-4, atol=1e-7)


def step(logits: Tensor, cfg: MoEConfig, weight: Tensor) -> tuple[Routing, Tensor]:
    routing = route(logits, cfg)
    (grad,) = torch.autograd.grad((routing.scores * weight[: routing.plan.capacity]).sum(), logits)
    return routing, grad


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_no_host_sync(mode: str) -> None:
    cfg, weight = config(mode), torch.randn(E * T, device="cuda")
    logits = random_logits().requires_grad_()
    step(logits, cfg, weight)
    with no_host_sync():
        step(logits, cfg, weight)


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_a_replayed_graph_follows_its_inputs(mode: str) -> None:
    cfg, static = config(mode), random_logits()
    route(static, cfg)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route(static, cfg)
    static.copy_(random_logits(seed=1))
    graph.replay()
    torch.cuda.synchronize()
    if mode in ("stochastic", "nearest_score"):  # replays draw anew
        assert bool((captured.tokens_per_expert % 128 == 0).all())
        return
    eager = route(static, cfg)
    rows = int(eager.plan.row_start_of_expert[-1])
    assert torch.equal(captured.plan.token_of_row[:rows], eager.plan.token_of_row[:rows])
    assert torch.equal(captured.scores, eager.scores)


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_compiled_equals_eager(mode: str) -> None:
    layer = MoE(config(mode), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(T, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)(x)
    assert bool((compiled.tokens_per_expert % 128 == 0).all())
    if mode == "nearest":
        eager = layer(x)
        assert torch.equal(compiled.tokens_per_expert, eager.tokens_per_expert)
        torch.testing.assert_close(compiled.hidden, eager.hidden, rtol=2e-2, atol=2e-2)


def test_twenty_runs_are_bit_equal() -> None:
    layer = MoE(config("nearest_score"), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(T, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    found = []
    for _ in range(20):
        out = layer(x, generator=seeded())
        found.append((out.hidden, *torch.autograd.grad(out.hidden.sum(), [x, *layer.parameters()])))
    for again in found[1:]:
        assert_equal(found[0], again)


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_the_layer_has_full_tiles_and_the_values_of_plain_pytorch(mode: str) -> None:
    layer = MoE(config(mode), device="cuda", dtype=torch.bfloat16)
    plain = MoE(config(mode), device="cuda", dtype=torch.bfloat16, kernels="torch")
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(T, 256, device="cuda", dtype=torch.bfloat16)
    out, expected = layer(x, generator=seeded()), plain(x, generator=seeded())
    assert bool((out.tokens_per_expert % 128 == 0).all())
    assert torch.equal(out.tokens_per_expert, expected.tokens_per_expert)
    error = (out.hidden.float() - expected.hidden.float()).norm() / expected.hidden.float().norm()
    assert float(error) < 1e-2


def test_few_real_tokens_are_routed_by_top_k() -> None:
    cfg, mask = config("nearest"), torch.arange(T, device="cuda") < 100
    assert rounds(cfg, T, training=True)
    found = route(random_logits(), cfg, token_mask=mask)
    assert int(found.tokens_per_expert.sum()) == 100 * K


def test_a_generator_on_the_cpu_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"generator is on cpu but the logits are on cuda.*device='cuda:0'"):
        route(random_logits(), config("stochastic"), generator=seeded("cpu"))

"""The oracle: its layer against a formula without indices, activations against PyTorch, router and rounding by hand."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe import reference
from tilemoe.config import GATE_UP_LAYOUTS, GATED_ACTIVATIONS, MoEConfig, RouterConfig, TokenRounding
from tilemoe.ops.moe import moe
from tilemoe.reference import activation, route
from tilemoe.reference.rounding import round_rows
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


UNGATED = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
}
INNER_OF_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def pre_activation(name: str) -> torch.Tensor:
    """(R, 2n or n) values wide enough to reach the clamps, with exact zeros (a kink of relu) among them."""
    generator = torch.Generator().manual_seed(0)
    h = 6 * torch.randn(37, 10 if name in GATED_ACTIVATIONS else 5, dtype=torch.float64, generator=generator)
    h[3] = 0.0
    return h


@pytest.mark.parametrize("name", sorted(UNGATED))
def test_ungated_values_are_pytorchs(name: str) -> None:
    h = pre_activation(name)
    torch.testing.assert_close(activation(h, name), UNGATED[name](h))


@pytest.mark.parametrize("name", sorted(INNER_OF_GATED))
@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
def test_gated_values_are_the_gates_times_up(name: str, layout: str) -> None:
    h = pre_activation(name)
    gate, up = (h[:, :5], h[:, 5:]) if layout == "concatenated" else (h[:, 0::2], h[:, 1::2])
    torch.testing.assert_close(activation(h, name, layout), UNGATED[INNER_OF_GATED[name]](gate) * up)


@pytest.mark.parametrize(
    ("name", "limit", "slope", "shift"), [("swiglu_oai", 7.0, 1.702, 1.0), ("swiglu_clamped", 10.0, 1.0, 0.0)]
)
def test_clamped_gates_by_hand(name: str, limit: float, slope: float, shift: float) -> None:
    h = torch.tensor([[2.0, 1.0], [12.0, -12.0], [-12.0, 12.0]], dtype=torch.float64)  # one gate and one up column

    def gated(gate: float, up: float) -> float:
        return gate * float(torch.sigmoid(torch.tensor(slope * gate, dtype=torch.float64))) * (up + shift)

    expected = torch.tensor([[gated(2, 1)], [gated(limit, -limit)], [gated(-12, limit)]], dtype=torch.float64)
    torch.testing.assert_close(activation(h, name), expected)


def test_unknown_name_and_stray_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="activation must be one of"):
        activation(torch.zeros(1, 2), "swish")
    with pytest.raises(ValueError, match="activation_limit is a parameter of activation='swiglu_oai'"):
        activation(torch.zeros(1, 2), "swiglu", limit=7.0)
    with pytest.raises(ValueError, match="gate_up must be one of concatenated, interleaved; got 'paired'"):
        activation(torch.zeros(1, 2), "swiglu", "paired")


def router_config(num_experts: int, k: int, **router: object) -> MoEConfig:
    return MoEConfig(8, 8, num_experts, k, router=RouterConfig(**router))  # type: ignore[arg-type]


def log_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def scores_of(logits: torch.Tensor, cfg: MoEConfig, **options: torch.Tensor) -> list[float]:
    return route(logits, cfg, **options).scores[0].tolist()


def test_softmax_scores_kept_normalised_and_scaled() -> None:
    logits = log_of(0.1, 0.4, 0.3, 0.2)
    assert scores_of(logits, router_config(4, 2, normalize=False)) == pytest.approx([0, 0.4, 0.3, 0])
    assert scores_of(logits, router_config(4, 2)) == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert scores_of(logits, router_config(4, 2, scale=2.5)) == pytest.approx([0, 10 / 7, 7.5 / 7, 0])
    assert scores_of(logits, router_config(4, 2, softmax_after_topk=True)) == pytest.approx([0, 4 / 7, 3 / 7, 0])


def test_sigmoid_scores_and_a_bias_that_only_selects() -> None:
    logits = torch.tensor([[0.0, math.log(3), -math.log(3)]], dtype=torch.float64)  # sigmoids 1/2, 3/4, 1/4
    assert scores_of(logits, router_config(3, 2, score="sigmoid", normalize=False)) == pytest.approx([0.5, 0.75, 0])
    bias = torch.tensor([0.0, 0.0, 1.0])
    biased = router_config(3, 2, score="sigmoid", selection_bias=True)
    assert scores_of(logits, biased, selection_bias=bias) == pytest.approx([0, 0.75, 0.25])


def test_groups_are_worth_their_two_best() -> None:
    # Group 1 holds the single best expert, group 0 the better pair.
    logits = torch.tensor([[2.0, 1.9, -9.0, 2.5, 0.0, -9.0]], dtype=torch.float64)
    cfg = router_config(6, 2, score="sigmoid", normalize=False, num_groups=2, top_groups=1)
    expected = torch.sigmoid(logits)[0].tolist()
    assert scores_of(logits, cfg) == pytest.approx([expected[0], expected[1], 0, 0, 0, 0])


def test_ties_go_to_the_lower_expert() -> None:
    assert scores_of(torch.zeros(1, 4), router_config(4, 2)) == pytest.approx([0.5, 0.5, 0, 0])


def test_losses_by_hand() -> None:
    logits = torch.cat([log_of(0.6, 0.4, 0.0), log_of(0.2, 0.3, 0.5), log_of(1.0, 0.0, 0.0)])
    routing = route(logits, router_config(3, 1, aux_loss_coef=0.5), token_mask=torch.tensor([True, True, False]))
    assert routing.tokens_per_expert.tolist() == [1, 0, 1]
    # f = (1/2, 0, 1/2), P = (0.4, 0.35, 0.25): 0.5 * 3 * (0.2 + 0.125)
    assert float(routing.aux_loss) == pytest.approx(0.4875)
    shifted = logits[:2] + torch.tensor([[1.0], [3.0]])  # logsumexp 1 and 3
    assert float(route(shifted, router_config(3, 1, z_loss_coef=0.1)).aux_loss) == pytest.approx(0.1 * (1 + 9) / 2)


def test_masked_tokens_are_left_out_entirely() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, False])
    cfg = router_config(3, 2, aux_loss_coef=1.0, z_loss_coef=1.0)
    masked, alone = route(logits, cfg, token_mask=mask), route(logits[mask], cfg)
    assert torch.equal(masked.scores[mask], alone.scores)
    assert not masked.scores[~mask].any()
    assert torch.equal(masked.tokens_per_expert, alone.tokens_per_expert)
    assert masked.aux_loss == alone.aux_loss


TILE = 16


def rows_of(counts: list[int], mode: str, tokens: int, uniform: list[float] | None = None) -> list[int]:
    """Rows of experts that ``counts`` of the tokens chose each, one expert a token; scores fall with the token."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([ids, torch.full((tokens - ids.shape[0],), len(counts))])[:, None]
    scores = torch.linspace(0.9, 0.1, tokens)[:, None].repeat(1, len(counts))
    draws = None if uniform is None else torch.tensor(uniform)
    rounding = TokenRounding(mode, TILE)  # type: ignore[arg-type]
    return [len(rows) for rows in round_rows(scores, ids, scores[:, :1], rounding, uniform=draws)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("nearest", [0, 0, 16, 16, 32]),
        ("up", [0, 16, 16, 16, 32]),
        ("down", [0, 0, 0, 16, 16]),
        # z: 0, then down to -8 (a tie), up to -1, stays, up from 25 to 32 would be 6, which is below 10.
        ("balance", [0, 0, 16, 16, 32]),
    ],
)
def test_counts(mode: str, expected: list[int]) -> None:
    assert rows_of([0, 8, 9, 16, 25], mode, 90) == expected


def test_balance_makes_up_for_what_the_experts_before_lost() -> None:
    assert rows_of([4] * 8, "balance", 64) == [0, 0, 16, 0, 0, 0, 16, 0]
    assert rows_of([4] * 8, "nearest", 64) == [0] * 8


def test_stochastic_goes_up_with_the_remainder() -> None:
    assert rows_of([20, 20, 20, 16], "stochastic", 80, [0.24, 0.25, 0.99, 0.0]) == [32, 16, 16, 16]


def test_rows_are_clamped_to_whole_tiles_of_tokens() -> None:
    assert rows_of([40], "up", 40) == [32]
    assert rows_of([33], "nearest", 40) == [32]
    assert rows_of([15], "up", 15) == [15]


def test_the_best_are_kept_and_the_next_best_are_added() -> None:
    scores = torch.zeros(40, 2)
    scores[:18, 0] = torch.arange(18) / 100 + 0.5
    scores[18:, 1] = 0.5
    scores[18:, 0] = torch.arange(22) / 100
    ids = (torch.arange(40) >= 18).long()[:, None]
    down, _ = round_rows(scores, ids, scores.amax(1, keepdim=True), TokenRounding("nearest", TILE))
    assert down == list(range(2, 18))
    up, _ = round_rows(scores, ids, scores.amax(1, keepdim=True), TokenRounding("up", TILE))
    assert up == [*range(18), *range(26, 40)]


def rounding_config(mode: str, **router: object) -> MoEConfig:
    rounding = TokenRounding(mode, TILE)  # type: ignore[arg-type]
    return MoEConfig(8, 8, 4, 2, router=RouterConfig(**router), rounding=rounding)  # type: ignore[arg-type]


def random_logits(tokens: int) -> Tensor:
    return torch.randn(tokens, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_padded_pair_carries_the_score_of_all_experts_times_scale() -> None:
    logits = random_logits(40)
    plain = route(logits, rounding_config("up", scale=2.5), training=False).scores
    rounded = route(logits, rounding_config("up", scale=2.5)).scores
    added = (plain == 0) & (rounded != 0)
    assert bool(added.any())
    assert torch.equal(rounded[plain != 0], plain[plain != 0])
    torch.testing.assert_close(rounded[added], 2.5 * torch.softmax(logits, dim=1)[added])


def test_losses_count_from_before_the_rounding() -> None:
    cfg = rounding_config("down", aux_loss_coef=0.1)
    logits = random_logits(40)
    rounded, plain = route(logits, cfg), route(logits, cfg, training=False)
    assert rounded.tokens_per_expert.tolist() != plain.tokens_per_expert.tolist()
    assert float(rounded.aux_loss) == float(plain.aux_loss)

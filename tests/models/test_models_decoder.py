"""The decoder: shapes, losses, autocast, state, checkpointing, compilation, refusals, generation, fake tensors.

B sequences · S tokens each · V vocabulary · E experts · L MoE layers
"""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import raises_one_line, tiny_model, watch_attention
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch._subclasses import FakeTensorMode

from tilemoe.config import ModelConfig, MoEConfig, RouterConfig, TokenRounding
from tilemoe.layers.attention import KVCache
from tilemoe.layers.moe import MoE
from tilemoe.models import decoder
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate
from tilemoe.testing import assert_equal, relative_error

MOE = MoEConfig(16, 8, 6, 2, router=RouterConfig(aux_loss_coef=0.05, selection_bias=True), initializer_range=0.2)
CONFIG = tiny_model(vocab_size=41, moe=MOE, initializer_range=0.2)
DENSE = replace(CONFIG, moe=None, dense_layers=())


def make(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32, recompute: str | None = None) -> DecoderLM:
    model = DecoderLM(config, dtype=dtype, recompute=recompute)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


def batch(count: int = 3, length: int = 11) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 41, (count, length + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[0, :4] = -100
    return tokens[:, :-1], labels


def test_outputs() -> None:
    model, (inputs, labels) = make(), batch()
    out = model(inputs)
    assert out.loss is None
    assert out.logits.shape == (3, 11, 41)
    assert out.tokens_per_expert.shape == (2, 6)
    assert out.tokens_per_expert.sum(1).tolist() == [66, 66]
    assert not out.tokens_per_expert.requires_grad
    assert out.aux_loss.shape == ()
    trained = model(inputs, labels)
    assert trained.logits is None
    assert trained.loss.dtype == trained.aux_loss.dtype == torch.float32
    torch.testing.assert_close(trained.loss, F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]
    assert len(layers) == 2
    assert 0.05 * 2 * 2 <= float(out.aux_loss.detach()) < 0.05 * 2 * 4  # K per layer when balanced, and a little more


def test_dense_outputs() -> None:
    model, (inputs, labels) = make(DENSE), batch()
    out = model(inputs, labels)
    assert out.tokens_per_expert.shape == (0, 0)
    assert float(out.aux_loss) == 0.0
    (out.loss + out.aux_loss).backward()
    model.update_selection_bias(out.tokens_per_expert, 0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_gets_the_gradient_of_the_plain_loss(tied: bool) -> None:
    model, (inputs, labels) = make(replace(CONFIG, tie_embeddings=tied), torch.float64), batch()
    assert (model.head is None) == tied
    out = model(inputs, labels)
    assert out.loss.dtype == torch.float64
    grads = torch.autograd.grad(out.loss + out.aux_loss, list(model.parameters()))
    plain = model(inputs)
    loss = F.cross_entropy(plain.logits.flatten(0, 1), labels.flatten()) + plain.aux_loss
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), got, wanted in zip(model.named_parameters(), grads, expected, strict=True):
        assert wanted.any(), name
        torch.testing.assert_close(got, wanted, msg=name)


def test_autocast_stays_close_and_keeps_fp32_gradients() -> None:
    model, (inputs, labels) = make(), batch()
    expected = model(inputs, labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        out = model(inputs, labels)
        logits = model(inputs).logits
    assert out.loss.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    assert relative_error(out.loss.detach(), expected.detach().double()) < 1e-2
    (out.loss + out.aux_loss).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert model.double()(inputs).logits.dtype == torch.float64, "autocast leaves it alone"


def test_initial_weights_are_a_function_of_the_seed() -> None:
    first, second = make(), make()
    other = DecoderLM(CONFIG)
    other.reset_parameters(torch.Generator().manual_seed(1))
    for (name, one), two, three in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert torch.equal(one, three) == name.endswith("norm.weight"), name


def test_selection_biases_follow_the_load() -> None:
    model = make()
    counts = torch.tensor([[9, 1, 5, 5, 5, 5], [5, 5, 5, 5, 9, 1]])
    model.update_selection_bias(counts, 0.01)
    biases = torch.stack([model.blocks[layer].mlp.router.selection_bias for layer in (0, 2)])
    torch.testing.assert_close(biases, 0.01 * torch.sign(5.0 - counts))
    without = make(replace(CONFIG, moe=replace(MOE, router=RouterConfig())))
    before = copy.deepcopy(without.state_dict())
    without.update_selection_bias(counts, 0.01)
    assert_equal(without.state_dict(), before)


def gradients(model: DecoderLM, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Losses and parameters' gradients."""
    model.zero_grad()
    out = model(inputs, labels)
    (out.loss + out.aux_loss).backward()
    return [out.loss.detach(), out.aux_loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_a_deep_copy_of_compiled_blocks_computes_its_own() -> None:
    model, (inputs, labels) = make(), batch()
    model.set_checkpointing("block")
    model.compile_blocks("aot_eager")
    copied, plain = copy.deepcopy(model), make()
    for each in (copied, plain):
        with torch.no_grad():
            for parameter in each.blocks.parameters():
                parameter.mul_(0.5)
    torch.testing.assert_close(gradients(copied, inputs, labels), gradients(plain, inputs, labels))
    torch.testing.assert_close(gradients(model, inputs, labels), gradients(make(), inputs, labels))


def test_all_graphs_of_compiled_blocks_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()  # in a process that has compiled blocks often, parts would run without a graph
    graphs, compiler = [], torch.compile

    def compiled(run: Any, options: dict[str, Any]) -> Any:
        def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Any:
            with torch._inductor.config.patch(options):
                check_cacheable(graph)
            graphs.append({node.target for node in graph.graph.nodes})
            return graph.forward

        return compiler(run, backend=backend)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(decoder, "_compiled_body", decoder._compiled_body.__wrapped__)
    model, (inputs, labels) = make(), batch()
    model.compile_blocks("inductor")
    for trains in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(trains):
            model(inputs, labels)
    called = set().union(*graphs)
    assert {torch.ops.higher_order.autograd_function_apply, torch.amp.autocast_mode._enter_autocast} <= called


def test_exports() -> None:
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens).logits

    module, (inputs, _) = Logits(), batch()
    exported = torch.export.export(module, (inputs,), strict=False).module()
    torch.testing.assert_close(exported(inputs), module(inputs))


def test_cache_gives_what_one_pass_gives() -> None:
    model, (inputs, _) = make().eval(), batch()
    cache = KVCache(3, 11)
    with torch.no_grad():
        parts = [model(piece, cache=cache).logits for piece in inputs.split([5, 1, 4, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(inputs).logits)
        again = KVCache(3, 11)
        torch.testing.assert_close(model.next_logits(inputs, again), model(inputs).logits[:, -1])
    assert cache.length == again.length == 11


IDS = torch.zeros(1, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (IDS.repeat(1, 5), None, "25 tokens, too many for the 24"),
        (IDS + 41, None, r"input_ids must lie in \[0, 41\), got 41"),
        (IDS, IDS + 99, "labels must lie in .* or -100, got 99"),
    ],
)
def test_bad_input_is_one_line(inputs: Tensor, labels: Tensor | None, message: str) -> None:
    with raises_one_line(message):
        make()(inputs, labels)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_cache_of_another_batch_size_is_refused(count: int) -> None:
    model, (inputs, _), cache = make(), batch(), KVCache(3, 12)
    with torch.no_grad():
        model(inputs[:, :5], cache=cache)
        with raises_one_line(f"input_ids has {count} sequences but the cache holds 3; begin"):
            model(inputs[:1].repeat(count, 1)[:, :2], cache=cache)
    assert cache.length == 5


def test_full_cache_and_labels_with_a_cache_are_refused() -> None:
    model, (inputs, labels) = make(), batch()
    cache = KVCache(3, 12)
    with torch.no_grad():
        model(inputs, cache=cache)
        with pytest.raises(ValueError, match="the cache, which holds 11 of 12"):
            model(inputs[:, :2], cache=cache)
    with pytest.raises(ValueError, match="labels and cache"):
        model(inputs, labels, KVCache(3, 12))


GENERATING = tiny_model(
    vocab_size=37, num_layers=2, num_kv_heads=1, max_seq_len=40, initializer_range=0.4,
    moe=MoEConfig(16, 8, 6, 2, initializer_range=0.4), dense_layers=(),
)  # fmt: skip
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def model() -> DecoderLM:
    made = DecoderLM(GENERATING)
    made.reset_parameters(torch.Generator().manual_seed(0))
    return made


def without_cache(model: DecoderLM, tokens: Tensor, count: int) -> Tensor:
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_equals_full_recomputation(model: DecoderLM, dtype: torch.dtype) -> None:
    model.to(dtype)
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    out = generate(model, prompts, 30, temperature=0)
    assert torch.equal(out, without_cache(model, prompts, 30))
    assert len(set(out[0].tolist())) > 5  # it does not say the same token again and again


def test_cudnn_does_not_attend_to_a_cache(model: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    by_cudnn = watch_attention(monkeypatch)
    generate(model, PROMPT, 3, temperature=0)
    model(PROMPT)
    assert by_cudnn == [False] * 6 + [True] * 2  # of two layers


def test_generator_makes_it_repeatable(model: DecoderLM) -> None:
    def run(seed: int) -> list[int]:
        return generate(model, PROMPT, 20, generator=torch.Generator().manual_seed(seed))[0].tolist()

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert run(0)[:5] == PROMPT[0].tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 5e-324])
def test_the_lowest_temperatures_take_the_likeliest(model: DecoderLM, temperature: float) -> None:
    assert torch.equal(generate(model, PROMPT, 20, temperature=temperature), generate(model, PROMPT, 20, temperature=0))


def test_samples_follow_the_distribution(model: DecoderLM) -> None:
    with torch.no_grad():
        logits = model(PROMPT).logits[0, -1]
    prompts = PROMPT.expand(4000, 5)
    tokens = generate(model, prompts, 1, temperature=2.0, generator=torch.Generator().manual_seed(0))[:, -1]
    share = torch.bincount(tokens, minlength=37) / 4000
    assert (share - torch.softmax(logits / 2.0, -1)).abs().max() < 0.03

    likeliest = logits.topk(3)
    tokens = generate(model, prompts, 1, top_k=3, generator=torch.Generator().manual_seed(0))[:, -1]
    assert set(tokens.tolist()) == set(likeliest.indices.tolist())
    share = torch.bincount(tokens, minlength=37)[likeliest.indices] / 4000
    assert (share - torch.softmax(likeliest.values, -1)).abs().max() < 0.03


def test_compiled_blocks_are_not_compiled_anew_for_every_token(model: DecoderLM) -> None:
    expected = generate(model, PROMPT, 20, temperature=0)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    model(PROMPT)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(generate(model, PROMPT, 20, temperature=0), expected)


def test_fills_the_context_exactly(model: DecoderLM) -> None:
    assert generate(model, PROMPT, 35, temperature=0).shape == (1, 40)
    assert torch.equal(generate(model, PROMPT, 0), PROMPT)


def test_generation_leaves_each_part_in_its_mode() -> None:
    model = make().train()
    model.blocks[0].eval()  # as of a part that is not trained
    modes = [module.training for module in model.modules()]
    generate(model, batch()[0][:, :2], 1)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(1, 41, dtype=torch.int64)}, "41 tokens, but model.max_seq_len is 40"),
        ({"max_new_tokens": 36}, "ask for at most 35"),
        ({"temperature": -0.5}, "temperature must be"),
    ],
)
def test_bad_arguments_are_one_line(model: DecoderLM, arguments: dict[str, Any], message: str) -> None:
    with raises_one_line(message):
        generate(model, **{"input_ids": PROMPT, "max_new_tokens": 1, **arguments})


FAKED_MOE = MoEConfig(64, 32, 6, 2, router=RouterConfig(aux_loss_coef=0.05, selection_bias=True))
FAKED = tiny_model(hidden_size=64, head_dim=16, moe=FAKED_MOE, dense_intermediate_size=24)
FAKED_CONFIGS = {
    "routed": FAKED,
    "rounded": replace(FAKED, moe=replace(FAKED_MOE, rounding=TokenRounding("nearest", 16)), tie_embeddings=True),
}
Described = dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]


def step(kind: str, config: ModelConfig, checkpointing: str, precision: torch.dtype | None) -> Described:
    """One training step's outputs and gradients; ``precision``: autocast's, None for a model in bf16 without it."""
    model = DecoderLM(config, device=kind, dtype=torch.float32 if precision else torch.bfloat16)
    model.set_checkpointing(checkpointing)
    ids = torch.zeros(2, 20, dtype=torch.int64, device=kind)
    has_autocast = torch.amp.is_autocast_available(kind)
    with torch.autocast(kind, precision) if has_autocast and precision else nullcontext():
        out = model(ids, ids)
    (out.loss + out.aux_loss).backward()
    tensors = {"loss": out.loss, "aux_loss": out.aux_loss, "tokens_per_expert": out.tokens_per_expert}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: (t.shape, t.stride(), t.dtype) for name, t in {**tensors, **gradients}.items()}


@pytest.mark.parametrize(("checkpointing", "precision"), [("none", None), ("block", torch.bfloat16)])
@pytest.mark.parametrize("name", FAKED_CONFIGS)
@pytest.mark.parametrize("kind", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_step(kind: str, name: str, checkpointing: str, precision: torch.dtype | None) -> None:
    given: Any = (FAKED_CONFIGS[name], checkpointing, precision)
    expected = step("cpu" if kind == "meta" else kind, *given)
    with nullcontext() if kind == "meta" else FakeTensorMode():
        found = step(kind, *given)
    assert found == expected


def test_dynamic_shapes_take_one_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = DecoderLM(replace(FAKED, num_layers=1, dense_layers=()))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 9), (3, 17), (4, 6)):
        ids = torch.randint(0, FAKED.vocab_size, (batch, length))
        parameters = list(model.parameters())
        losses = [out.loss + out.aux_loss for out in (compiled(ids, ids), model(ids, ids))]
        torch.testing.assert_close(*(torch.autograd.grad(loss, parameters) for loss in losses))
        torch.testing.assert_close(*losses)
        assert counters["stats"]["unique_graphs"] == 1

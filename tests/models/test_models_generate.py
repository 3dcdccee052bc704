"""Generation with the cache equals generation without one; sampling; refusals."""

from typing import Any

import pytest
import torch
from helpers import raises_one_line, tiny_model
from torch import Tensor

from tilemoe.config import MoEConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate

SIZES = {"vocab_size": 37, "num_layers": 2, "num_kv_heads": 1, "max_seq_len": 40, "initializer_range": 0.4}
CONFIG = tiny_model(**SIZES, moe=MoEConfig(16, 8, 6, 2, initializer_range=0.4), dense_layers=())
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def model() -> DecoderLM:
    made = DecoderLM(CONFIG)
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


def test_top_one_is_greedy(model: DecoderLM) -> None:
    assert torch.equal(generate(model, PROMPT, 20, top_k=1), generate(model, PROMPT, 20, temperature=0))


def test_generator_makes_it_repeatable(model: DecoderLM) -> None:
    def run(seed: int) -> list[int]:
        return generate(model, PROMPT, 20, generator=torch.Generator().manual_seed(seed))[0].tolist()

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert run(0)[:5] == PROMPT[0].tolist()


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


def test_under_autocast(model: DecoderLM) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = generate(model, PROMPT, 10, temperature=0)
    assert out.shape == (1, 15)


def test_compiled_blocks_are_not_compiled_anew_for_every_token(model: DecoderLM) -> None:
    expected = generate(model, PROMPT, 20, temperature=0)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    model(PROMPT)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(generate(model, PROMPT, 20, temperature=0), expected)


def test_fills_the_context_exactly_and_restores_the_mode(model: DecoderLM) -> None:
    model.train()
    assert generate(model, PROMPT, 35, temperature=0).shape == (1, 40)
    assert model.training
    assert torch.equal(generate(model.eval(), PROMPT, 0), PROMPT)
    assert not model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(1, 41, dtype=torch.int64)}, "41 tokens, but model.max_seq_len is 40"),
        ({"max_new_tokens": 36}, "ask for at most 35"),
        ({"max_new_tokens": -1}, "max_new_tokens must be >= 0"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "prompt of S >= 1"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"input_ids must be \(B, S\)"),
        ({"temperature": -0.5}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": -1}, "top_k must be"),
    ],
)
def test_bad_arguments_are_one_line(model: DecoderLM, arguments: dict[str, Any], message: str) -> None:
    with raises_one_line(message):
        generate(model, **{"input_ids": PROMPT, "max_new_tokens": 1, **arguments})

"""The decoder where tensors have no values: what an estimator of memory sees is what a step on real ones makes.

L MoE layers · E experts
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import tiny_model
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

from tilemoe.config import ModelConfig, MoEConfig, RouterConfig, TokenRounding
from tilemoe.layers.attention import KVCache
from tilemoe.models.decoder import DecoderLM

MOE = MoEConfig(64, 32, 6, 2, router=RouterConfig(aux_loss_coef=0.05, selection_bias=True))
CONFIG = tiny_model(hidden_size=64, head_dim=16, moe=MOE, dense_intermediate_size=24)
CONFIGS = {
    "routed": CONFIG,
    "rounded": replace(CONFIG, moe=replace(MOE, rounding=TokenRounding("nearest", 16)), tie_embeddings=True),
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


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["bf16", "autocast"])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_step(kind: str, name: str, checkpointing: str, precision: torch.dtype | None) -> None:
    given: Any = (CONFIGS[name], checkpointing, precision)
    expected = step("cpu" if kind == "meta" else kind, *given)
    with nullcontext() if kind == "meta" else FakeTensorMode():
        found = step(kind, *given)
    assert found == expected


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@torch.no_grad()
def test_evaluation_and_generation(kind: str) -> None:
    def shapes(device: str) -> list[torch.Size]:
        model = DecoderLM(CONFIG, device=device).eval()
        ids = torch.zeros(2, 5, dtype=torch.int64, device=device)
        cache = KVCache(CONFIG.num_layers, 8)
        made = [model(ids).logits, model.next_logits(ids, cache), model.next_logits(ids[:, :1], cache)]
        return [tensor.shape for tensor in made]

    with nullcontext() if kind == "meta" else FakeTensorMode():
        found = shapes(kind)
    assert found == shapes("cpu") == [(2, 5, 40), (2, 40), (2, 40)]


def test_dynamic_shapes_take_one_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = DecoderLM(replace(CONFIG, num_layers=1, dense_layers=()))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 9), (3, 17), (4, 6)):
        ids = torch.randint(0, CONFIG.vocab_size, (batch, length))
        parameters = list(model.parameters())
        losses = [out.loss + out.aux_loss for out in (compiled(ids, ids), model(ids, ids))]
        torch.testing.assert_close(*(torch.autograd.grad(loss, parameters) for loss in losses))
        torch.testing.assert_close(*losses)
        assert counters["stats"]["unique_graphs"] == 1

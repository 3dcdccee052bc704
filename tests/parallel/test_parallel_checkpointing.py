"""What a decoder computes again in its backward, and that nothing else changes."""

from collections import Counter

import pytest
import torch

from tilemoe.config import ModelConfig, MoEConfig
from tilemoe.models.decoder import Block, DecoderLM
from tilemoe.models.generate import generate
from tilemoe.testing import assert_equal

MODEL = ModelConfig(32, 16, 2, 2, 1, 8, 16, moe=MoEConfig(16, 8, 8, 2))


def make() -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(MODEL, recompute="up_proj")


def gradients(model: DecoderLM) -> list[torch.Tensor]:
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    out = model(ids[:, :-1], ids[:, 1:])
    assert out.loss is not None
    out.loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("mode", "attention", "experts", "recompute"),
    [("none", 1, 1, "up_proj"), ("attention", 2, 1, "up_proj"), ("block", 2, 2, None)],
)
def test_what_is_repeated(mode: str, attention: int, experts: int, recompute: str | None) -> None:
    model = make()
    model.set_checkpointing(mode)
    runs: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, given, name=name: runs.update([name]))
    assert_equal(gradients(model), gradients(make()))
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        assert runs[f"blocks.{layer}.attention"] == attention
        assert runs[f"blocks.{layer}.mlp.experts"] == experts
        assert block.mlp.experts.recompute == recompute
    runs.clear()
    tokens = generate(model, torch.arange(4)[None], 3, temperature=0.0)  # with a cache, and nothing to differentiate
    assert torch.equal(tokens, generate(make(), torch.arange(4)[None], 3, temperature=0.0))
    assert runs["blocks.0.attention"] == 3


def test_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="checkpointing must be one of attention, block, none; got 'all'"):
        make().set_checkpointing("all")

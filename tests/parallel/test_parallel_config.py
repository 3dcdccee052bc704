"""Sizes of a job, as far as they can be told without one, and what a decoder computes again in its backward."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilemoe.config import ModelConfig, MoEConfig, ParallelConfig, Save
from tilemoe.models.decoder import Block, DecoderLM
from tilemoe.models.generate import generate
from tilemoe.parallel.mesh import build_meshes
from tilemoe.testing import assert_equal

DENSE = ModelConfig(32, 8, 2, 2, 2, 4, 8, dense_intermediate_size=16)
MODEL = ModelConfig(32, 8, 2, 2, 2, 4, 8, moe=MoEConfig(8, 8, 12, 2))


@pytest.mark.parametrize(
    ("sizes", "world_size", "shard"),
    [({}, 1, 1), ({}, 4, 4), ({"expert": 4}, 8, 2), ({"replicate": 2, "expert": 2, "shard": 3}, 12, 3)],
)
def test_shard_takes_what_is_left(sizes: dict[str, Any], world_size: int, shard: int) -> None:
    found = ParallelConfig(**sizes).for_job(world_size, MODEL)
    assert found == ParallelConfig(**{**sizes, "shard": shard})
    assert found.for_job(world_size, MODEL) == found


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        ({"replicate": 2, "shard": 4}, 4, "replicate 2 x shard 4 x expert 1 needs 8 processes and the job has 4; "),
        ({"expert": 3}, 4, "the job's 4 processes are not divided evenly by replicate 1 x shard any x expert 3; "),
        ({"shard": 2}, 4, "the job's 4 processes are not divided evenly by replicate 1 x shard 2 x expert 1; "),
        ({"expert": 8}, 8, r"parallel.expert \(8\) must divide model.moe.num_experts \(12\)"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**sizes).for_job(world_size, MODEL)


def test_a_dense_model_has_no_experts_to_divide() -> None:
    assert ParallelConfig().for_job(4, DENSE).shard == 4
    with pytest.raises(ValueError, match="the model has no experts"):
        ParallelConfig(expert=2).for_job(4, DENSE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicate": 0}, "parallel.replicate must be an integer >= 1, got 0"),
        ({"shard": -1}, "parallel.shard must be an integer >= 0, got -1"),
        ({"expert": True}, "parallel.expert must be an integer >= 1, got True"),
        ({"param_dtype": "float8"}, "parallel.param_dtype must be one of bfloat16, float32; got 'float8'"),
        ({"reduce_dtype": "int8"}, "parallel.reduce_dtype must be one of"),
        ({"exchange": "nccl"}, "parallel.exchange must be one of auto, collective, symmetric; got 'nccl'"),
        ({"checkpointing": "all"}, "parallel.checkpointing must be one of attention, block, none; got 'all'"),
        ({"reshard_after_forward": 1}, "parallel.reshard_after_forward must be True or False"),
        ({"between_micro_batches": "all"}, "parallel.between_micro_batches must be one of nothing, weights"),
        ({"between_micro_batches": "weights"}, "parallel.reshard_after_forward frees them; set the latter to False"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**settings)


def test_without_a_job() -> None:
    with pytest.raises(ValueError, match=r"torch.distributed is not initialised; start the job with torchrun"):
        build_meshes(ParallelConfig(), MODEL, "cpu")


DECODER = ModelConfig(32, 16, 2, 2, 1, 8, 16, moe=MoEConfig(16, 8, 8, 2))


def make(recompute: str | None = "up_proj", save: Save = "full") -> DecoderLM:
    torch.manual_seed(0)
    assert DECODER.moe is not None
    moe = replace(DECODER.moe, intermediate_size=64, save=save)
    return DecoderLM(replace(DECODER, moe=moe), recompute=recompute)


def gradients(model: DecoderLM) -> list[torch.Tensor]:
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    out = model(ids[:, :-1], ids[:, 1:])
    out.loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_repeated_block_keeps_no_h_in_fp8() -> None:
    plain = gradients(make(None))
    narrow, repeated = make(None, save="fp8"), make(None, save="fp8")
    repeated.set_checkpointing("block")
    assert_equal(gradients(repeated), plain)
    assert not all(torch.equal(*pair) for pair in zip(gradients(narrow), plain, strict=True))


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

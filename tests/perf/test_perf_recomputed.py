"""What the planner says of blocks that are computed again: the bytes that `DecoderLM` keeps, FLOPs, and the choice."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import saved_tensors
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilemoe
from tilemoe.config import CHECKPOINTING_MODES, Checkpointing, ModelConfig, MoEConfig
from tilemoe.models.flops import repeated_flops_per_token
from tilemoe.models.preset_sizes import SIZES_PRESETS
from tilemoe.perf.hardware import GPUS
from tilemoe.perf.training import (
    Setup,
    cheapest_that_fits,
    fewest_gpus,
    fits,
    kept_bytes,
    largest_micro_batch,
    training_plan,
)

H200 = GPUS["H200"]
BATCH, LENGTH = 2, 512
TOKENS = BATCH * LENGTH
MOE = MoEConfig(128, 64, 8, 2, shared_intermediate_size=96)
CONFIG = ModelConfig(64, 128, 4, num_heads=8, num_kv_heads=4, head_dim=16, max_seq_len=LENGTH, moe=MOE)
DENSE = replace(CONFIG, dense_intermediate_size=192, dense_layers=(0, 1))


class FusedNorm(torch.autograd.Function):
    """Keeps what a GPU's kernel does, the input and a number for each row; the CPU's is made of several operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, scale)
        return (x * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        raise AssertionError("only what the forward keeps is counted")


def kept_by(config: ModelConfig, mode: Checkpointing, dtype: torch.dtype) -> int:
    """Bytes of a forward, parameters and their casts apart. fp32 weights are trained under autocast."""
    model = tilemoe.DecoderLM(config, dtype=dtype)
    model.set_checkpointing(mode)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {parameter.shape for parameter in model.parameters()} | {p.T.shape for p in model.embed.parameters()}
    ids = torch.randint(config.vocab_size, (BATCH, LENGTH))
    with saved_tensors() as saved, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        model(ids)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in saved
        if tensor.untyped_storage().data_ptr() not in weights and tensor.shape not in shapes
    }
    return sum(storages.values())


def of_config(config: ModelConfig, mode: Checkpointing, *, wrapped: bool) -> Setup:
    return Setup(config, H200, 1, 1, LENGTH, wrapped=wrapped, checkpointing=mode)


@pytest.fixture
def fused_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: FusedNorm.apply(x, weight, eps))


@pytest.mark.usefixtures("fused_norms")
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [*((torch.bfloat16, mode) for mode in CHECKPOINTING_MODES), (torch.float32, "block")],
    ids=[*CHECKPOINTING_MODES, "alone-block"],
)
@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, qk_norm="none"), DENSE], ids=["normed", "not-normed", "dense"]
)
def test_blocks_keep_what_the_trainer_s_do(config: ModelConfig, dtype: torch.dtype, mode: Checkpointing) -> None:
    """Of two blocks more, so that embedding, last norm and head count in neither. What is kept under autocast and not
    repeated depends on torch.compile.

    A CPU's attention writes its output in the order that the next map reads; a GPU's is planned with a copy.
    """
    longer = replace(config, num_layers=config.num_layers + 2)
    found = kept_by(longer, mode, dtype) - kept_by(config, mode, dtype)
    found += 2 * 2 * TOKENS * config.num_heads * config.head_dim if mode == "none" else 0
    setups = [of_config(each, mode, wrapped=dtype == torch.bfloat16) for each in (longer, config)]
    assert found == pytest.approx(kept_bytes(setups[0], TOKENS) - kept_bytes(setups[1], TOKENS), rel=0.03)


@pytest.mark.parametrize("mode", CHECKPOINTING_MODES)
def test_repeated_flops_are_those_of_a_backward(mode: Checkpointing) -> None:
    """As PyTorch counts them on a CPU, where it counts matrices alone, and repeats nothing after the last kept tensor:
    not attention's last map, and of a dense block not the MLP's.
    """
    dense = replace(CONFIG, moe=None, dense_intermediate_size=192)
    counted = []
    for each in ("none", mode):
        model = tilemoe.DecoderLM(dense)
        model.set_checkpointing(each)
        with FlopCounterMode(display=False) as counter:
            model(torch.randint(64, (1, LENGTH))).logits.sum().backward()
        counted.append(counter.get_total_flops() / LENGTH)
    last = {"none": 0, "attention": 2 * 128 * 128, "block": 2 * 192 * 128}[mode]
    products = 4 * (LENGTH + 1) * 2 * 128 / 2 * 2 if mode != "none" else 0
    assert counted[1] - counted[0] == repeated_flops_per_token(dense, mode, LENGTH) - products - 4 * last


def test_the_cheapest_that_fits_is_chosen() -> None:
    """On fewer and fewer GPUs attention is repeated, then blocks, then nothing fits."""
    setup = Setup(SIZES_PRESETS["glm-4.5"], H200, 1024, 8, 4096)
    chosen = [cheapest_that_fits(replace(setup, gpus=gpus)) for gpus in (1024, 128, 64, 32)]
    assert [each and each.checkpointing for each in chosen] == ["none", "attention", "block", None]
    kimi = replace(setup, model=SIZES_PRESETS["kimi-k2"], gpus=256)
    found = cheapest_that_fits(kimi)
    assert found is not None
    assert found.checkpointing == "block"
    assert not any(fits(replace(kimi, checkpointing=mode), 1) for mode in ("none", "attention"))
    assert fewest_gpus(kimi, CHECKPOINTING_MODES) == fewest_gpus(replace(kimi, checkpointing="block")) == 256
    assert fewest_gpus(kimi) == 512
    assert cheapest_that_fits(kimi, ["none"]) is None


def test_a_way_that_takes_far_more_gpus_does_not_set_their_number() -> None:
    """A GPU that gathers DeepSeek-V3's layers whole has little left for its share of the rest."""
    plan = training_plan(SIZES_PRESETS["deepseek-v3"], H200, 4096, 0.35, None, 8, None)
    whole, shared = plan["setups"][:2]
    assert plan["gpus"] == shared["fewest_gpus"] < whole["fewest_gpus"] // 8
    assert whole["micro_batch"] == 0
    assert training_plan(SIZES_PRESETS["deepseek-v3"], H200, 4096, 0.35, 4096, 8, None)["setups"][0]["micro_batch"] > 0


def test_a_mode_that_is_given_is_not_chosen() -> None:
    for mode in CHECKPOINTING_MODES:
        plan = training_plan(SIZES_PRESETS["olmoe-1b-7b"], H200, 4096, 0.35, 8, 8, None, mode)
        assert {setup["checkpointing"] for setup in plan["setups"]} == {mode}
    setup = Setup(SIZES_PRESETS["olmoe-1b-7b"], H200, 8, 8, 4096)
    most = [largest_micro_batch(replace(setup, checkpointing=mode)) for mode in CHECKPOINTING_MODES]
    assert most == sorted(most)
    assert most[0] < most[1] < most[2]

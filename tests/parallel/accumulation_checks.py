"""What processes check of a decoder whose experts' kernels add to the sums of gradients that FSDP reduces."""

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import torch
from parallel_checks import (
    CAP_32,
    FSDP,
    LIMIT_32,
    MOE,
    SEQUENCES,
    assert_within,
    error,
    make_model,
    meshes_of,
    shared_backward,
    whole,
)
from ranks import device_of_rank
from torch import Tensor
from torch.profiler import profile

from tilemoe.config import ParallelConfig
from tilemoe.layers.experts import accumulate_grads
from tilemoe.models.decoder import DecoderLM
from tilemoe.ops import experts as expert_ops
from tilemoe.parallel.gradients import clip_gradients
from tilemoe.parallel.model import begin_micro_batch, parallelize

PARTS = 3  # micro-batches of a step
KEPT = replace(FSDP, reshard_after_forward=False, between_micro_batches="weights_and_gradients")
IN_BF16 = replace(KEPT, param_dtype="bfloat16", reduce_dtype="float32")


def check_sums_that_kernels_add_to() -> None:
    """FSDP reduces what the experts' kernels have added to; all other gradients stay as they were."""
    noise = CAP_32 if device_of_rank().type == "cuda" else 0.0
    for config, backend, limit, layers in (
        (KEPT, None, LIMIT_32, 2),
        (replace(IN_BF16, checkpointing="block"), None, 2**-7, 2),
        (IN_BF16, "aot_eager", 2**-7, 2),
        (replace(IN_BF16, expert=2), None, 0.0, 0),
    ):
        torch.compiler.reset()
        steps = []
        for accumulate in (False, True):
            model = make_shared(config, accumulate, backend)
            with counted_adds() as adds:
                steps.append([step(model, config) for _ in range(2)])
            assert adds.call_count == 2 * PARTS * layers * accumulate
        for before, after in zip(*steps, strict=True):
            limits = {name: limit if name.endswith(("w1", "w2", "norm")) else noise for name in before}
            assert_within({name: (error(after[name], before[name]), limits[name]) for name in before})


def check_nothing_else_touches_the_sums() -> None:
    """Between two micro-batches; without kernels that add, autograd or FSDP widens each gradient and adds it."""
    found = []
    for accumulate in (False, True):
        model = make_shared(IN_BF16, accumulate)
        begin_micro_batch(model, IN_BF16, is_last=False)
        shared_backward(model, SEQUENCES)
        begin_micro_batch(model, IN_BF16, is_last=False)
        with profile(record_shapes=True) as seen:
            shared_backward(model, SEQUENCES)
        w1 = [MOE.num_experts, MOE.up_rows, MOE.hidden_size]
        found.append({event.name for event in seen.events() if w1 in event.input_shapes})
    passes = {"aten::add_", "aten::copy_", "aten::_to_copy"}
    assert "aten::add_" in found[0], found  # and what widens it, which differs between releases and devices
    assert found[1].isdisjoint(passes | {"aten::zero_", "aten::fill_"}), found


def make_shared(config: ParallelConfig, accumulate: bool, backend: str | None = None) -> DecoderLM:
    model = make_model(torch.float32)
    parallelize(model, meshes_of(config), compile_backend=backend)
    if accumulate:
        accumulate_grads(model)
    return model


def counted_adds() -> AbstractContextManager[mock.MagicMock]:
    """The calls of up_proj_wgrad that add to a sum, of layers with biases."""
    return mock.patch.object(expert_ops, "add_up_proj_wgrad", wraps=expert_ops.add_up_proj_wgrad)


def step(model: DecoderLM, config: ParallelConfig) -> dict[str, Tensor]:
    """The gradients of `PARTS` micro-batches, and their norm."""
    for part in range(PARTS):
        begin_micro_batch(model, config, is_last=part == PARTS - 1)
        shared_backward(model, SEQUENCES)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    norm = clip_gradients(model.parameters(), 0.0)
    model.zero_grad()
    return {**gradients, "norm": norm}


CHECKS = [check_sums_that_kernels_add_to, check_nothing_else_touches_the_sums]

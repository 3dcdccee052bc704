"""What two and four processes check of Megatron's parallel groups with tilemoe's experts; `test_megatron` runs it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random as megatron_random
from megatron_models import (
    LENGTH,
    D,
    E,
    N,
    Training,
    assert_same,
    assert_same_step,
    config,
    gpt,
    gradients,
    layer_of,
    loss_of,
    losses_of,
    megatron_on_cpu,
    models,
    shards_of,
    spec,
    tokens,
)

from tilemoe.integrations.megatron import LocalTokenDispatcher, tilemoe_spec


def check_expert_parallelism() -> None:
    with megatron_on_cpu(expert_model_parallel_size=2):
        for dispatcher in ("allgather", "alltoall"):
            stock, ours = models(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
            assert layer_of(ours).experts.w1.shape == (E // 2, 2 * N, D)
            assert not layer_of(ours).experts.w1.allreduce  # the other process has other experts
            assert_same_step(stock, ours, tokens(1 + dist.get_rank()))
            assert shards_of(ours) == shards_of(stock)


def check_expert_tensor_parallelism() -> None:
    """And context parallelism, of the layer alone: Megatron's attention has neither without Transformer Engine."""
    for parallel, shape in (
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, (E, N, D)),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, (E, 2 * N, D)),  # tokens stay
        ({"context_parallel_size": 2, "expert_model_parallel_size": 2}, (E // 2, 2 * N, D)),
    ):
        with megatron_on_cpu(**parallel):
            cfg = config(**parallel, sequence_parallel="tensor_model_parallel_size" in parallel)
            found = []
            for layers in (spec(cfg), tilemoe_spec(spec(cfg))):
                megatron_random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
                torch.manual_seed(0)
                layer = layers.layer_specs[0].submodules.mlp(config=cfg, pg_collection=None, is_mtp_layer=False)
                generator = torch.Generator().manual_seed(2 + dist.get_rank())
                x, do = torch.randn(2, LENGTH // 2, 2, D, generator=generator)
                out, _ = layer(x.requires_grad_())
                out.backward(do)
                found.append(({"out": out, "x": x.grad, **gradients(layer)}, shards_of(layer)))
            assert layer.experts.w1.shape == shape
            assert isinstance(layer.token_dispatcher, LocalTokenDispatcher) == (shape == (E, 2 * N, D))
            assert_same(found[1][0], found[0][0], 3e-6)
            assert found[1][1] == found[0][1]


def losses_and_gradients_of_a_pipeline(cfg: Any, wrap: Callable[[Any], Any]) -> tuple[list[float], dict[str, Any]]:
    """Of two micro-batches and the stages of this process."""
    stages = []
    for number in range(cfg.virtual_pipeline_model_parallel_size or 1):
        stage = {"vp_stage": number if cfg.virtual_pipeline_model_parallel_size else None}
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        }
        stages.append(gpt(cfg, wrap(spec(cfg, **stage)), **ends, **stage))

    def forward(batches: Any, model: Any) -> tuple[Any, Any]:
        return losses_of(model, next(batches)), lambda losses: (losses.mean(), losses.mean().item())

    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter([tokens(1), tokens(2)]) for _ in stages],
        model=stages,
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return losses, {f"{i}.{name}": each for i, stage in enumerate(stages) for name, each in gradients(stage).items()}


def check_pipelines() -> None:
    """The first stage has no MoE layer."""
    for parallel, layers in (
        ({"pipeline_model_parallel_size": 2}, [0, 0, 1, 1]),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, [0, 1, 1, 1]),
    ):
        with megatron_on_cpu(**parallel):
            cfg = config(**parallel, num_layers=4, moe_layer_freq=layers, pipeline_dtype=torch.float32)
            stock, ours = (losses_and_gradients_of_a_pipeline(cfg, wrap) for wrap in (lambda spec: spec, tilemoe_spec))
            assert ours[0] == pytest.approx(stock[0], rel=1e-6)
            assert_same(ours[1], stock[1], 3e-6)


LAYOUTS: list[dict[str, Any]] = [
    {"expert_model_parallel_size": 4},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
]


def runs_of(layout: dict[str, Any]) -> tuple[Training, Training]:
    """Of Megatron's experts and of ours."""
    parallel = {**layout, "sequence_parallel": "tensor_model_parallel_size" in layout}
    stock, ours = models(**parallel, num_moe_experts=8, moe_token_dispatcher_type="alltoall")
    return Training(stock), Training(ours)


def check_fifty_steps_and_a_checkpoint_of_another_layout() -> None:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    folder, after = Path(folders[0]), []
    for number, layout in enumerate(LAYOUTS):
        with megatron_on_cpu(**layout):
            runs = runs_of(layout)
            for which, run in enumerate(runs):
                run.go_on(50)
                (folder / f"{number}{which}").mkdir(exist_ok=True)
                dist_checkpointing.save(run.state(), str(folder / f"{number}{which}"))
                after.append(loss_of(run.model, tokens(9)).item())
            assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
            assert runs[1].norms == pytest.approx(runs[0].norms, rel=1e-4)
            assert runs[1].losses[-1] < runs[1].losses[0] - 0.1
    for number, layout in enumerate(reversed(LAYOUTS)):
        with megatron_on_cpu(**layout):
            for which, run in enumerate(runs_of(layout)):
                state = run.state(is_loading=True)
                run.load(dist_checkpointing.load(state, str(folder / f"{number}{1 - which}")))
                assert loss_of(run.model, tokens(9)).item() == pytest.approx(after[2 * number + 1 - which], rel=1e-6)
                run.go_on(1)


CHECKS = [check_expert_parallelism, check_expert_tensor_parallelism, check_pipelines]

"""What two processes check of Megatron's parallel groups with tilemoe's experts; `test_megatron` runs it."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron_models import (
    LENGTH,
    D,
    E,
    N,
    assert_same,
    config,
    gradients,
    layer_of,
    loss_of,
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
            losses = [loss_of(model, tokens(1 + dist.get_rank())) for model in (stock, ours)]
            for loss in losses:
                loss.backward()
            assert_same({"loss": losses[1]}, {"loss": losses[0]})
            assert_same(gradients(ours), gradients(stock), 3e-6)
            assert shards_of(ours) == shards_of(stock)


def check_expert_tensor_parallelism() -> None:
    """Of the layer alone: Megatron's norms without Transformer Engine or Apex have no sequence parallelism."""
    for size, shape in ((2, (E, N, D)), (1, (E, 2 * N, D))):  # of 1, tokens stay where they are
        parallel = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": size}
        with megatron_on_cpu(**parallel):
            cfg = config(**parallel, sequence_parallel=True)
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
            assert isinstance(layer.token_dispatcher, LocalTokenDispatcher) == (size == 1)
            assert_same(found[1][0], found[0][0], 3e-6)
            assert found[1][1] == found[0][1]


CHECKS = [check_expert_parallelism, check_expert_tensor_parallelism]

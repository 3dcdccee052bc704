"""What two processes check of Megatron's parallel groups with tilemoe's experts; `test_megatron` runs it."""

import torch.distributed as dist
from megatron_models import (
    D,
    E,
    N,
    assert_same,
    gradients,
    layer_of,
    loss_of,
    megatron_on_cpu,
    models,
    tokens,
)


def check_expert_parallelism() -> None:
    with megatron_on_cpu(expert_model_parallel_size=2):
        for dispatcher in ("allgather", "alltoall"):
            stock, ours = models(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
            assert layer_of(ours).experts.w1.shape == (E // 2, 2 * N, D)
            losses = [loss_of(model, tokens(1 + dist.get_rank())) for model in (stock, ours)]
            for loss in losses:
                loss.backward()
            assert_same({"loss": losses[1]}, {"loss": losses[0]})
            assert_same(gradients(ours), gradients(stock), 3e-6)


CHECKS = [check_expert_parallelism]

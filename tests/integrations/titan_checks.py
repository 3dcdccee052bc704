"""What two processes check of torchtitan's expert parallelism; `test_titan_moe` runs it.

Each holds half of the experts, and torchtitan's own dispatcher brings their rows.
"""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from titan_layers import TARGET, D, E, K, config, filled, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.qwen3.sharding import _GROUPED_EXPERTS_PARAM_LAYOUT

from tilemoe.testing import relative_error

BACKEND = "partial_dtensor"  # what torchtitan 0.3 can shard with on a released PyTorch


def divided_config() -> Any:
    cfg = config()
    cfg.routed_experts.token_dispatcher = AllToAllTokenDispatcher.Config(num_experts=E, top_k=K)
    set_moe_sharding_config(cfg, enable_ep=True, enable_sp=False, expert_param_layout=_GROUPED_EXPERTS_PARAM_LAYOUT)
    return cfg


def divided_layers() -> tuple[nn.Module, nn.Module]:
    """The stock layer and the overridden one, with equal weights, over two processes."""
    set_spmd_backend(BACKEND)
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, world_size=2, spmd_backend=BACKEND
    )
    with mock.patch.object(parallel_dims, "device_type", "cpu"):  # it takes a machine without an accelerator for one
        dims.build_mesh()
    overridden = divided_config()
    apply_overrides(OverrideConfig(imports=[TARGET]), overridden)  # after the sharding, as torchtitan's trainer does
    stock, ours = filled(divided_config().build(), overridden.build())
    for layer in (stock, ours):
        layer.parallelize(dims)
    return stock, ours


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def check_expert_parallelism() -> None:
    stock, ours = divided_layers()
    assert local(ours.routed_experts.inner_experts.w13).shape[0] == E // 2
    x = torch.randn(2, 25, D, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    theirs, mine = run(stock, x), run(ours, x)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert local(expected).any(), name
        assert relative_error(local(mine[name]), local(expected).double()) < 0.01, name


CHECKS = [check_expert_parallelism]

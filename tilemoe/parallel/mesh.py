"""The meshes of a job: which processes share what.

A process' rank is ``(replicate index * shard + shard index) * expert + expert index``. Processes that share a layer's
experts exchange the most, so their ranks are consecutive: they are on one host if it has enough processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilemoe.checks import require_type, shown
from tilemoe.config import ModelConfig, ParallelConfig
from tilemoe.models.hf_base import HFBase
from tilemoe.runtime.tensors import device_named

REPLICATE, SHARD, EXPERT, FSDP = "replicate", "shard", "expert", "fsdp"


@dataclass(frozen=True, eq=False)
class Meshes:
    """The device meshes of one job; every process is in each of them.

    config          the job's, with its sizes filled in
    fsdp            shards parameters that all processes share: 1-D, or 2-D (replicate, fsdp) if the model has replicas
    experts         for `expert_parallel`: its dimension "expert" divides each layer's experts, the others replicate and
                    shard a process' share; None if every process has all experts
    """

    config: ParallelConfig
    fsdp: DeviceMesh
    experts: DeviceMesh | None

    @property
    def world_size(self) -> int:
        return self.config.replicate * self.config.shard * self.config.expert


def build_meshes(config: ParallelConfig, model: ModelConfig | HFBase, device_type: str) -> Meshes:
    """The `Meshes` of a job; their ``config`` has its sizes filled in. All processes must call it.

    It checks the sizes before it uses device memory.

    ValueError: torch.distributed is not initialised, or `ParallelConfig.for_job` refuses.

    Examples:
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> meshes = tilemoe.build_meshes(tilemoe.ParallelConfig(), config, "cpu")  # in a job of one process
        >>> meshes.world_size, meshes.experts
        (1, None)
    """
    require_type("config", config, ParallelConfig)
    if not isinstance(model, HFBase):
        require_type("model", model, ModelConfig)
    if device_named(device_type, "device_type").type != device_type:
        raise ValueError(f"device_type must be a type such as 'cpu' or 'cuda', got {shown(device_type)}")
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised; start the job with torchrun and init_process_group")
    config = config.for_job(dist.get_world_size(), model)
    sizes = (config.replicate, config.shard, config.expert)
    copies = config.replicate > 1
    whole = init_device_mesh(
        device_type, (config.replicate, config.shard * config.expert), mesh_dim_names=(REPLICATE, FSDP)
    )
    fsdp = whole if copies else whole[FSDP]
    if config.expert == 1:
        return Meshes(config, fsdp, None)
    divided = init_device_mesh(device_type, sizes, mesh_dim_names=(REPLICATE, SHARD, EXPERT))
    return Meshes(config, fsdp, divided if copies else divided[SHARD, EXPERT])

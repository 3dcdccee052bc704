"""A model on many processes: meshes, FSDP2 and expert parallelism, built on torch.distributed."""

from tilemoe.parallel.expert import expert_parallel
from tilemoe.parallel.gradients import clip_gradients
from tilemoe.parallel.mesh import build_meshes
from tilemoe.parallel.model import parallelize

__all__ = ["build_meshes", "clip_gradients", "expert_parallel", "parallelize"]

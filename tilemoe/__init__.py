"""tilemoe: mixture-of-experts training in PyTorch, fast, memory-lean and tile-aware.

Importing this package imports neither torch nor other heavy modules: public names load on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "MoEConfig": "tilemoe.config",
    "ModelConfig": "tilemoe.config",
    "ParallelConfig": "tilemoe.config",
    "RouterConfig": "tilemoe.config",
    "TokenRounding": "tilemoe.config",
    "moe_preset": "tilemoe.models.presets",
    "model_preset": "tilemoe.models.presets",
    "RoutingPlan": "tilemoe.plan",
    "plan_topk": "tilemoe.routing.build",
    "plan_pairs": "tilemoe.routing.build",
    "Routing": "tilemoe.routing.topk",
    "RoutingRecord": "tilemoe.routing.replay",
    "route": "tilemoe.routing.topk",
    "moe": "tilemoe.ops.moe",
    "Backend": "tilemoe.kernels.experts.base",
    "register_backend": "tilemoe.kernels.experts.registry",
    "select_kernels": "tilemoe.kernels.choose",
    "MoE": "tilemoe.layers.moe",
    "MoEOutput": "tilemoe.layers.moe",
    "accumulate_grads": "tilemoe.layers.experts",
    "DecoderLM": "tilemoe.models.decoder",
    "load_hf": "tilemoe.models.huggingface",
    "build_meshes": "tilemoe.parallel.mesh",
    "expert_parallel": "tilemoe.parallel.expert",
    "parallelize": "tilemoe.parallel.model",
}

if TYPE_CHECKING:
    from tilemoe import reference as reference
    from tilemoe.config import ModelConfig as ModelConfig
    from tilemoe.config import MoEConfig as MoEConfig
    from tilemoe.config import ParallelConfig as ParallelConfig
    from tilemoe.config import RouterConfig as RouterConfig
    from tilemoe.config import TokenRounding as TokenRounding
    from tilemoe.kernels.choose import select_kernels as select_kernels
    from tilemoe.kernels.experts.base import Backend as Backend
    from tilemoe.kernels.experts.registry import register_backend as register_backend
    from tilemoe.layers.experts import accumulate_grads as accumulate_grads
    from tilemoe.layers.moe import MoE as MoE
    from tilemoe.layers.moe import MoEOutput as MoEOutput
    from tilemoe.models.decoder import DecoderLM as DecoderLM
    from tilemoe.models.huggingface import load_hf as load_hf
    from tilemoe.models.presets import model_preset as model_preset
    from tilemoe.models.presets import moe_preset as moe_preset
    from tilemoe.ops.moe import moe as moe
    from tilemoe.parallel.expert import expert_parallel as expert_parallel
    from tilemoe.parallel.mesh import build_meshes as build_meshes
    from tilemoe.parallel.model import parallelize as parallelize
    from tilemoe.plan import RoutingPlan as RoutingPlan
    from tilemoe.routing.build import plan_pairs as plan_pairs
    from tilemoe.routing.build import plan_topk as plan_topk
    from tilemoe.routing.replay import RoutingRecord as RoutingRecord
    from tilemoe.routing.topk import Routing as Routing
    from tilemoe.routing.topk import route as route

__all__ = [*sorted(_HOME), "__version__", "reference"]


def __getattr__(name: str) -> Any:
    if name == "reference":
        return import_module("tilemoe.reference")
    if name not in _HOME:
        raise AttributeError(f"module 'tilemoe' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

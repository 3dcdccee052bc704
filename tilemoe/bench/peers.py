"""The contestants: a common way to build and call each implementation of the layer, with its router.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

All compute the same function of the same weights: softmax over the K kept logits, SwiGLU, no biases, no auxiliary
loss. Each adapter imports its package when it is built, so that a missing one is skipped. sonic-moe and tilemoe bring a
router; the others get `plain_router`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tilemoe import __version__
from tilemoe.bench import record
from tilemoe.config import MoEConfig, Precision, RouterConfig
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.layers.moe import MoE
from tilemoe.shape import MoEShape

# RMS error over RMS value: bf16's own error is 3e-3 to 1e-2, that of e4m3 operands 5e-2 to 7e-2.
TOLERANCES = MappingProxyType({"bf16": 2e-2, "fp8": 8e-2})

# x (T, d), scores (T, K) fp32, ids (T, K), w1 (E, 2n, d) with rows [gate; up], w2 (E, d, n) -> (T, d)
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Weights:
    """router (E, d), w1 (E, 2n, d) with rows [gate; up], w2 (E, d, n): parameters, shared by the contestants."""

    router: nn.Parameter
    w1: nn.Parameter
    w2: nn.Parameter

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.router, self.w1, self.w2


@dataclass(frozen=True, eq=False)
class Contestant:
    """``run(x)`` returns the output (T, d). ``leaves``: router, w1 (one or more tensors) and w2. ``w1_rows`` makes of
    its w1's gradients one with the rows (dimension 1) [gate; up]. ``tolerance``: the allowed RMS error over RMS
    value. ``own_heap``: it allocates memory that PyTorch does not count.
    """

    name: str
    version: str
    run: Callable[[Tensor], Tensor]
    leaves: tuple[Tensor, ...]
    w1_rows: Callable[..., Tensor] = lambda grad: grad
    tolerance: float = TOLERANCES["bf16"]
    own_heap: bool = False


def make_weights(shape: MoEShape, device: torch.device, dtype: torch.dtype) -> Weights:
    """Random weights, scaled so that activations and outputs stay O(1)."""
    d, n, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts

    def normal(*sizes: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(sizes, device=device, dtype=dtype).mul_(sizes[-1] ** -0.5))

    return Weights(normal(experts, d), normal(experts, 2 * n, d), normal(experts, d, n))


def layer_config(shape: MoEShape, precision: Precision = "bf16") -> MoEConfig:
    """The configuration of our layer for the function that all contestants compute."""
    return MoEConfig(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_experts,
        shape.num_experts_per_tok,
        router=RouterConfig(score="softmax", softmax_after_topk=True),
        precision=precision,
    )


def tilemoe_layer(shape: MoEShape, weights: Weights, kernels: str | None = None) -> Contestant:
    """Our layer, as a user builds it; ``kernels`` names a backend, which sets the precision."""
    precision = cast(Precision, "bf16" if kernels is None else backend_named(kernels).precision)
    # In eval mode, since in training the layer refuses K = 1, where the router's gradient is 0.
    moe = MoE(layer_config(shape, precision), device="meta", kernels=kernels).eval()
    moe.router.weight, moe.experts.w1, moe.experts.w2 = weights.router, weights.w1, weights.w2
    name = "tilemoe" if kernels is None else f"tilemoe[{kernels}]"
    return Contestant(name, __version__, lambda x: moe(x).hidden, weights.leaves, tolerance=TOLERANCES[precision])


def sonic_moe(shape: MoEShape, weights: Weights) -> Contestant:
    """sonic-moe's fused router, top-K and experts, called as in its own benchmark; gate and up rows alternate."""
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    w1 = nn.Parameter(interleaved(weights.w1.detach()))
    w1_transposed, w2_transposed = w1.permute(1, 2, 0), weights.w2.permute(1, 2, 0)
    stream = torch.cuda.current_stream().cuda_stream

    def run(x: Tensor) -> Tensor:
        out, _, _ = moe_TC_softmax_topk_layer(
            x, weights.router, w1_transposed, None, w2_transposed, None, shape.num_experts_per_tok, stream
        )
        return out

    version = f"{record.version('sonic-moe')} (quack-kernels {record.version('quack-kernels')})"
    return Contestant("sonic-moe", version, run, (weights.router, w1, weights.w2), concatenated)


def grouped_mm(shape: MoEShape, weights: Weights) -> Contestant:
    """Plain PyTorch under torch.compile, with the router."""
    layer = torch.compile(routed(grouped_mm_experts, weights, shape.num_experts_per_tok), dynamic=False)
    return Contestant("grouped_mm", f"torch {torch.__version__}", layer, weights.leaves)


def liger_cute(shape: MoEShape, weights: Weights) -> Contestant:
    """LigerCute's fused experts, which exchange tokens through NVSHMEM, in a group of this process alone.

    Its scores are bf16; gate and up are two parameters. It saves tensors in NVSHMEM's heap.
    """
    from liger_cute_kernels import nvshmem
    from liger_kernel.ops.configure import MoEConfig as Sizes
    from liger_kernel.ops.configure import configure
    from liger_kernel.transformers.moe import LigerExpertParallelFusedMoe

    k, sizes = shape.num_experts_per_tok, (shape.num_tokens, shape.hidden_size, shape.num_experts)
    if dist.is_initialized():
        nvshmem.pool_clear_all()  # an earlier case's pools, which cannot grow
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    if not configure(moe=Sizes(*sizes, k, num_hosts=1, gpus_per_host=1, max_inflight=2)):
        raise NotImplementedError("LigerCute has no kernels for this GPU")
    experts = LigerExpertParallelFusedMoe()
    gate, up = (nn.Parameter(half.contiguous()) for half in weights.w1.detach().chunk(2, dim=1))

    def run(x: Tensor) -> Tensor:
        scores, ids = plain_router(x, weights.router, k)
        return experts(x, ids, scores.to(x.dtype), gate, up, weights.w2, shape.num_experts)

    leaves = (weights.router, gate, up, weights.w2)
    version = str(record.version("liger-cute-kernels"))
    return Contestant("liger-cute", version, run, leaves, lambda *halves: torch.cat(halves, 1), own_heap=True)


def behind_plain_router(name: str, find: Callable[[], tuple[str, Compute]]) -> Callable[..., Contestant]:
    """The adapter for experts that bring no router."""

    def adapter(shape: MoEShape, weights: Weights) -> Contestant:
        version, experts = find()
        return Contestant(name, version, routed(experts, weights, shape.num_experts_per_tok), weights.leaves)

    return adapter


def routed(experts: Compute, weights: Weights, k: int) -> Callable[[Tensor], Tensor]:
    """The layer with these experts behind a plain PyTorch router."""

    def layer(x: Tensor) -> Tensor:
        scores, ids = plain_router(x, weights.router, k)
        return experts(x, scores, ids, weights.w1, weights.w2)

    return layer


def scattermoe_experts() -> tuple[str, Compute]:
    """ScatterMoE's version, and its experts, called as in its own ``GLUMLP``. ImportError: it is not installed."""
    from scattermoe import flatten_sort_count, parallel_linear

    def compute(x: Tensor, scores: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        order = flatten_sort_count(ids, num_experts=w1.shape[0])
        h = parallel_linear(x, w1.transpose(1, 2), ids.shape[1], *order, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        a, scores = F.silu(gate) * up, scores.to(x.dtype)
        return parallel_linear(a, w2.transpose(1, 2), 1, *order, gates=scores, grouped_in=True)

    return record.version("scattermoe") or "a checkout", compute


def liger_experts() -> tuple[str, Compute]:
    """Liger's version, and its Triton experts, called as in its ``LigerExperts``. ImportError: it is not installed."""
    from liger_kernel.ops import LigerFusedMoEFunction

    def compute(x: Tensor, scores: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return LigerFusedMoEFunction.apply(x, w1, w2, ids.int(), scores.to(x.dtype))

    return f"{record.version('liger-kernel')}{_environment('LIGER_FUSED_MOE_AUTOTUNE')}", compute


def unsloth_experts() -> tuple[str, Compute]:
    """Unsloth's version, and its experts, called as in its ``forward_triton_grouped_gemm`` with its own autotuning
    cache. ImportError: it is not installed; NotImplementedError: it finds no GPU.
    """
    from unsloth.kernels.moe.autotune_cache import get_or_autotune_moe_kernels
    from unsloth.kernels.moe.grouped_gemm.interface import grouped_gemm
    from unsloth_zoo.temporary_patches.moe_fused_swiglu import moe_fused_swiglu
    from unsloth_zoo.temporary_patches.moe_utils import moe_routing_sort

    tiles = cache(get_or_autotune_moe_kernels)  # per GEMM: (E, contraction, half of the width, K, dtype)

    def compute(x: Tensor, scores: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        k = ids.shape[1]
        counts, order, _ = moe_routing_sort(ids, w1.shape[0])
        routing = {"m_sizes": counts, "topk": k, "gather_indices": order}

        def gemm(x: Tensor, w: Tensor, is_first: bool) -> Tensor:
            forward, dgrad, wgrad = tiles(w.shape[0], w.shape[2], w.shape[1] // 2, k, x.dtype)
            chosen = {"kernel_config_fwd": forward, "kernel_config_bwd_dX": dgrad, "kernel_config_bwd_dW": wgrad}
            permuted = {"permute_x": is_first, "permute_y": not is_first, "is_first_gemm": is_first}
            return grouped_gemm(x, w, **routing, **chosen, **permuted)

        y = gemm(moe_fused_swiglu(gemm(x, w1, True)), w2, False)
        return (y.unflatten(0, (-1, k)) * scores.to(x.dtype)[..., None]).sum(dim=1)

    return f"{record.version('unsloth')}{_environment('UNSLOTH_MOE_DISABLE_AUTOTUNE')}", compute


def _environment(variable: str) -> str:
    """The suffix of a version for an environment variable that changes what is timed; "" if it is not set."""
    return f" ({variable}={os.environ[variable]})" if variable in os.environ else ""


def grouped_mm_experts(x: Tensor, scores: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A sort, two calls of `F.grouped_mm`, and plain operations around them; scores, ids (T, K) -> (T, d)."""
    expert, order = ids.flatten().sort(stable=True)
    offsets = torch.searchsorted(expert, torch.arange(w1.shape[0], device=x.device), right=True, out_int32=True)
    token = order // ids.shape[1]
    h = F.grouped_mm(x[token], w1.transpose(1, 2), offs=offsets)
    gate, up = h.chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
    weighted = y * scores.flatten()[order].unsqueeze(1)
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add(0, token, weighted).to(x.dtype)


def plain_router(x: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(scores (T, K) fp32, ids (T, K)): softmax over the K largest logits."""
    logits, ids = F.linear(x, weight).float().topk(k, dim=-1)
    return logits.softmax(dim=-1), ids


def interleaved(w1: Tensor) -> Tensor:
    """w1 (E, 2n, d) with its rows [gate; up] reordered to gate, up, gate, up, ..."""
    return w1.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def concatenated(w1: Tensor) -> Tensor:
    """The inverse of `interleaved`."""
    return w1.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


PEERS: MappingProxyType[str, Callable[[MoEShape, Weights], Contestant]] = MappingProxyType(
    {
        "tilemoe": tilemoe_layer,
        "sonic-moe": sonic_moe,
        "scattermoe": behind_plain_router("scattermoe", scattermoe_experts),
        "grouped_mm": grouped_mm,
        "liger": behind_plain_router("liger", liger_experts),
        "liger-cute": liger_cute,
        "unsloth": behind_plain_router("unsloth", unsloth_experts),
    }
)
_FOR_A_GPU = PEERS.keys() - {"tilemoe", "grouped_mm"}


def build(name: str, shape: MoEShape, weights: Weights) -> Contestant | str:
    """The contestant, or why it cannot take part, in one line. ``tilemoe[triton]`` names a backend.

    ValueError: the name is unknown; the message lists all.
    """
    if name.startswith("tilemoe[") and name.endswith("]"):
        return tilemoe_layer(shape, weights, name[len("tilemoe[") : -1])
    if name not in PEERS:
        raise ValueError(f"no peer called {name!r}; known are {', '.join(PEERS)}")
    if weights.w1.device.type == "cpu" and name in _FOR_A_GPU:
        return "it needs a GPU"
    try:
        return PEERS[name](shape, weights)
    except (ImportError, NotImplementedError) as error:
        return f"not importable here: {str(error).partition(chr(10))[0]}"

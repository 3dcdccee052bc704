"""A decoder on many processes: checkpointing, expert parallelism, compilation and FSDP2, in that order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tilemoe.checks import require_choice, require_type
from tilemoe.config import ParallelConfig
from tilemoe.dispatch.choose import Transports
from tilemoe.integrations.hf_decoder import HFDecoder
from tilemoe.integrations.quantized_weight import FrozenWeight
from tilemoe.layers.experts import Experts
from tilemoe.layers.lora import PackedLoRAExperts
from tilemoe.layers.moe import MoE
from tilemoe.models.decoder import Block, DecoderLM
from tilemoe.parallel.expert import even_placements, expert_parallel
from tilemoe.parallel.mesh import EXPERT, Meshes
from tilemoe.runtime.tensors import device_named, require_generator
from tilemoe.runtime.weight_cache import promise_unchanged_weights


def parallelize(
    model: DecoderLM,
    meshes: Meshes,
    *,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    compile_backend: str | None = None,
) -> None:
    """Shard ``model`` over the processes of ``meshes``, in place, as ``meshes.config`` says.

    A model on the meta device is materialised on ``device``, if given, once it is sharded; each process draws its own
    shards. Its weights are those of ``model.reset_parameters(generator)``, the same for all meshes. Other models must
    hold the same weights in every process. ``compile_backend``: torch.compile each block with it; None: do not.

    Gradients are summed over the processes, not averaged: scale each process' loss to its share of the whole batch's,
    ``(out.loss + out.aux_loss) / meshes.world_size`` if all have equally many labels. All processes must call forward
    and backward together.

    ValueError: an argument is invalid; the message names it.

    Examples:
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> meshes = tilemoe.build_meshes(tilemoe.ParallelConfig(param_dtype=None), config, "cpu")
        >>> model = tilemoe.DecoderLM(config, device="meta")
        >>> tilemoe.parallelize(model, meshes, device="cpu", generator=torch.Generator().manual_seed(0))
        >>> tokens = torch.randint(64, (2, 9))
        >>> out = model(tokens[:, :-1], labels=tokens[:, 1:])
        >>> ((out.loss + out.aux_loss) / meshes.world_size).backward()
    """
    require_type("model", model, DecoderLM)
    require_type("meshes", meshes, Meshes)
    require_generator(generator)
    if device is not None:
        device_named(device)
    if compile_backend is not None:
        require_choice("compile_backend", compile_backend, torch.compiler.list_backends(exclude_tags=()))
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("model is sharded already; call parallelize once, instead of expert_parallel and fully_shard")
    config = meshes.config
    model.set_checkpointing(config.checkpointing)
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    transports = None
    if meshes.experts is not None:
        transports = Transports(meshes.experts.get_group(EXPERT), config.exchange, config.keep_received)
    for block in blocks:
        if compile_backend is not None:
            block.compiled_by = compile_backend
        _shard_block(block, meshes, transports, is_last=block is blocks[-1])
    _shard_rest(model, meshes)
    if device is not None and model.embed.weight.is_meta:
        model.to_empty(device=device)
        model.reset_parameters(generator)


def _shard_block(block: Block, meshes: Meshes, transports: Transports | None, *, is_last: bool) -> None:
    """Shard a block with FSDP2: one all-gather for it, and one more for experts that are divided or in 4 bits.

    ``transports``: of the group that shares a layer's experts; None: every process has all experts. The last block
    stays gathered after its forward, since its backward comes next.
    """
    reshard = meshes.config.reshard_after_forward and not is_last
    experts = block.mlp.experts if isinstance(block.mlp, MoE) else None
    if meshes.experts is not None and transports is not None and experts is not None:
        expert_parallel(
            block,
            meshes.experts,
            gradient_divide_factor=1.0,
            reshard_after_forward=reshard,
            mp_policy=_policy(meshes.config),
            exchange=transports,
        )
        _sum_gradients(experts)
        experts = None
    elif isinstance(experts, PackedLoRAExperts):  # by themselves: their storage is never cast
        experts.as_floats()
        _shard(experts, meshes.fsdp, replace(meshes.config, param_dtype=None), reshard, experts)
        experts = None
    _shard(block, meshes.fsdp, meshes.config, reshard, experts)


def shard_adapted(model: HFDecoder, meshes: Meshes) -> None:
    """Shard a model of a transformers class layer by layer; each process must hold all of it before.

    ValueError: the processes do not divide the experts in 4 bits, which are sharded by whole experts.
    """
    shards = meshes.config.shard
    for weight in model.parameters():
        if isinstance(weight, FrozenWeight) and weight.shape[0] % shards:
            raise ValueError(
                f"{weight.shape[0]} experts in 4 bit are not divided evenly by {shards} processes; take a number that "
                "divides them, --parallel.replicate, or --lora.storage dense"
            )
    *layers, last = model.blocks
    for layer in layers:
        _shard(layer, meshes.fsdp, meshes.config, meshes.config.reshard_after_forward, None)
    _shard(last, meshes.fsdp, meshes.config, False, None)
    _shard_rest(model, meshes)


def _shard_rest(model: DecoderLM | HFDecoder, meshes: Meshes) -> None:
    """Shard the embeddings, the head and the last norm; they stay gathered from forward to the end of backward."""
    _shard(model, meshes.fsdp, meshes.config, False, None)
    register_fsdp_forward_method(model, "next_logits")
    if meshes.experts is not None and isinstance(model, DecoderLM):
        _prefetch(model)


def micro_batches(config: ParallelConfig) -> AbstractContextManager[None]:
    """Context manager for a step's micro-batches: weights that stay gathered between them are quantised only once."""
    return nullcontext() if config.between_micro_batches == "nothing" else promise_unchanged_weights()


def begin_micro_batch(model: nn.Module, config: ParallelConfig, *, is_last: bool) -> None:
    """Call it before the forward of each micro-batch of a step, whether or not the model is sharded.

    What ``config.between_micro_batches`` names stays unsharded in this process until the last micro-batch's backward.
    """
    if config.between_micro_batches == "nothing" or not isinstance(model, FSDPModule):
        return
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last or config.between_micro_batches == "weights")


def _shard(module: nn.Module, mesh: DeviceMesh, config: ParallelConfig, reshard: bool, experts: Experts | None) -> None:
    """Apply FSDP2 to ``module``. ``experts``: its experts, if their parameters are not sharded yet."""
    placements = {} if experts is None else even_placements(experts, mesh.size(mesh.ndim - 1))
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard,
        shard_placement_fn=placements.get,
        mp_policy=_policy(config),
    )
    _sum_gradients(module)


def _policy(config: ParallelConfig) -> MixedPrecisionPolicy:
    """Inputs are not cast: the embeddings set the activations' dtype, and the rotary angles must stay in fp32."""
    return MixedPrecisionPolicy(_dtype(config.param_dtype), _dtype(config.reduce_dtype), cast_forward_inputs=False)


def _sum_gradients(sharded: nn.Module) -> None:
    """Reduce gradients by sum, not mean: scaling the loss instead can weigh processes differently."""
    assert isinstance(sharded, FSDPModule)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _prefetch(model: DecoderLM) -> None:
    """Prefetch the next block explicitly: the host waits for each exchange's sizes, so FSDP's own order is late."""
    gathers: list[list[FSDPModule]] = [  # a block is the first of its modules
        [module for module in block.modules() if isinstance(module, FSDPModule)] for block in model.blocks
    ]
    for gathered, following in pairwise(gathers):
        gathered[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(gathered[::-1])


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

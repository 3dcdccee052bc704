"""Parallelises a decoder: activation checkpointing, expert parallelism, compilation and FSDP2, in that order."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from tilemoe.checks import require_choice, require_type
from tilemoe.dispatch.choose import Transports
from tilemoe.models.decoder import Block, DecoderLM
from tilemoe.parallel.fsdp import shard_block, shard_rest
from tilemoe.parallel.mesh import EXPERT, Meshes
from tilemoe.runtime.tensors import device_named, require_generator


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
        shard_block(block, meshes, transports, is_last=block is blocks[-1])
    shard_rest(model, meshes)
    if device is not None and model.embed.weight.is_meta:
        model.to_empty(device=device)
        model.reset_parameters(generator)

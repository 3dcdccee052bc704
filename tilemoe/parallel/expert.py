"""Expert parallelism of any module: each process keeps a shard of every layer's experts.

The stacked parameters (E, ...) of each experts module become DTensors sharded on E over one dimension of a mesh, and an
all-to-all dispatcher brings the module its tokens. FSDP2 shards each process' share over the mesh's other dimensions,
each experts module by itself, so that a later fully_shard of the rest skips it. An expert's gradient is the sum over
the expert dimension's processes, divided by their number; FSDP's mean over the other dimensions then makes it the mean
over all processes, as for every other parameter.

E experts · e experts of a process
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from tilemoe.checks import require_finite, require_text, require_type, shown
from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.dispatch.choose import Transports
from tilemoe.integrations import transformers as integration
from tilemoe.integrations.divided_adapters import divide_adapters, wrappers_of
from tilemoe.layers.experts import Experts
from tilemoe.layers.lora import PackedLoRAExperts
from tilemoe.runtime.random import local_of

_FSDP = "fsdp"  # the dimension that is added to a mesh which has only the expert dimension
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute that DistributedDataParallel reads


def expert_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str = "expert",
    gradient_divide_factor: float | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    exchange: str | Transports = "auto",
    keep_received: bool = False,
    max_tokens: int = 0,
) -> None:
    """Divide the experts of every MoE layer in ``module``, in place: of `tilemoe.MoE`, with or without adapters, and of
    transformers' models with ``experts_implementation="tilemoe"``, with or without PEFT's adapters.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("fsdp", "expert"))
        expert_parallel(model, mesh)
        for layer in model.model.layers:
            fully_shard(layer)  # the rest of it, over all processes
        fully_shard(model)

    Call it with the same weights in every process, or on the meta device, and make the optimiser afterwards. From then
    on all processes of ``dim`` must call every layer together, each with its own tokens, or with none. If ``dim`` has
    one process, nothing changes.

    Args:
        mesh: all processes that train ``module``. Its dimension ``dim`` divides the experts, evenly and in order. One
            more dimension, if any, is where FSDP2 shards each process' share; two more are replicas, then shards.
        gradient_divide_factor: divides an expert's gradient, which is the sum over the processes of ``dim``. None:
            the number of these processes, right if FSDP (or other code) averages over the other processes. Pass 1 if
            it sums over them.
        reshard_after_forward: `fully_shard`'s, for the experts.
        mp_policy: likewise. The experts' inputs are never cast, so that scores keep the router's precision; nor are the
            parameters of experts with weights in 4 bits.
        offload_policy: likewise.
        exchange: how tokens are sent: "collective", "symmetric" or "auto", see `ParallelConfig`; or the group's
            `Transports`, which should be shared if parts of one model are divided by separate calls.
        keep_received: see `ParallelConfig`. Like max_tokens, ignored if ``exchange`` is a `Transports`: it has its own.
        max_tokens: the most tokens that a process has in a forward, if their number varies. Without it there is room
            for a quarter more than any process had at first, and for more only once all processes have more.

    Raises:
        ValueError: there is no MoE layer, or one that cannot be divided; the mesh lacks the dimension ``dim`` or some
            processes, or does not divide the experts; another argument is invalid. Then nothing has changed.

    Examples:
        In a job of one process; with more, each process keeps its share of w1, w2 (E, ., .).

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2))
        >>> mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("expert",))
        >>> tilemoe.expert_parallel(layer, mesh)
        >>> layer(torch.randn(5, 16)).hidden.shape
        torch.Size([5, 16])
    """
    layers = _layers(module)
    group_mesh, shares = _meshes(mesh, dim)
    if gradient_divide_factor is None:
        gradient_divide_factor = group_mesh.size()
    require_finite("gradient_divide_factor", gradient_divide_factor, positive=True)
    _check_sharding(reshard_after_forward, mp_policy, offload_policy, shares.size(shares.ndim - 1))
    transports = exchange
    if not isinstance(transports, Transports):
        transports = Transports(group_mesh.get_group(), transports, keep_received, max_tokens)
    if group_mesh.size() == 1:
        return
    for layer in layers:
        if isinstance(layer, PackedLoRAExperts):
            layer.as_floats()
    divide_experts(layers, group_mesh, transports, gradient_divide_factor)
    for name, experts in integration.experts_modules(module):
        share = _num_experts(experts) // group_mesh.size()
        divide_adapters(experts, wrappers_of(module, name), group_mesh.get_local_rank() * share)
    policy = dataclasses.replace(mp_policy or MixedPrecisionPolicy(), cast_forward_inputs=False)
    for layer in layers:
        fully_shard(
            layer,
            mesh=shares,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=even_placements(layer, shares.size(shares.ndim - 1)).get,
            mp_policy=dataclasses.replace(policy, param_dtype=None) if isinstance(layer, PackedLoRAExperts) else policy,
            offload_policy=offload_policy or OffloadPolicy(),
        )
    # DistributedDataParallel must ignore these: their gradients are already means over all processes.
    divided = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    vars(module)[_IGNORED] = [*vars(module).get(_IGNORED, ()), *divided]


def divide_experts(
    layers: list[nn.Module], mesh: DeviceMesh, transports: Transports, gradient_divide_factor: float = 1.0
) -> None:
    """Shard the experts modules ``layers`` over the 1-D ``mesh``, without FSDP.

    ``transports``: the mesh's. ValueError: the mesh does not divide a layer's experts; then nothing has changed.
    """
    dispatchers = [
        AllToAllDispatcher(
            transports,
            _num_experts(layer),
            gradient_divide_factor,
            layer.precision_of if isinstance(layer, Experts) else None,
        )
        for layer in layers
    ]
    for layer, dispatcher in zip(layers, dispatchers, strict=True):
        first = mesh.get_local_rank() * dispatcher.experts_per_rank
        for name, parameter in list(layer.named_parameters()):
            share = parameter.detach()[first : first + dispatcher.experts_per_rank].clone()
            divided = DTensor.from_local(share, mesh, [Shard(0)], run_check=False)
            owner, _, own = name.rpartition(".")  # a parametrised weight lies in a submodule
            kept = nn.Parameter(divided, requires_grad=parameter.requires_grad)
            layer.get_submodule(owner).register_parameter(own, kept)
        if isinstance(layer, Experts):
            layer.dispatcher = dispatcher
        else:
            integration.set_dispatcher(layer, dispatcher)


def even_placements(experts: nn.Module, ranks: int) -> dict[nn.Parameter, Shard]:
    """The expert parameters that FSDP must shard by rows, dimension 1; it shards the others by whole experts.

    A parameter is sharded by rows if ``ranks`` divides its rows but not its experts: otherwise some rank would hold no
    expert, and still gather as much as the others.
    """
    placements: dict[nn.Parameter, Shard] = {}
    for parameter in experts.parameters(recurse=False):
        here, rows = local_of(parameter).shape[:2]
        if here % ranks and rows % ranks == 0:
            placements[parameter] = Shard(1)
    return placements


def rows_of_experts(module: nn.Module, tokens_per_expert: Tensor) -> Tensor:
    """(..., E) number of rows that each expert computes, from the counts (..., E) of this process' tokens.

    Under expert parallelism they are summed over the processes that share the experts of ``module``; all must call it.
    """
    if (group := _group_of(module)) is None:
        return tokens_per_expert
    rows = tokens_per_expert.clone()
    dist.all_reduce(rows, group=group)
    return rows


def rows_of_ranks(module: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    """(number of rows (..., W) of each of the W processes that share the experts of ``module``, this one's rank among
    them). ``rows``: from `rows_of_experts`.
    """
    group = _group_of(module)
    ranks, here = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    return rows.unflatten(-1, (ranks, -1)).sum(-1), here


def _group_of(module: nn.Module) -> dist.ProcessGroup | None:
    """The process group that shares the experts of ``module``; None: each process has all of them."""
    dispatchers = (layer.dispatcher for layer in module.modules() if isinstance(layer, Experts))
    return next((each.transports.group for each in dispatchers if isinstance(each, AllToAllDispatcher)), None)


def _layers(module: nn.Module) -> list[nn.Module]:
    """The experts modules of ``module``. ValueError: there are none, or one cannot be divided."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, (DistributedDataParallel, FullyShardedDataParallel)):
            kind = f"{type(part).__name__}{name and f' ({name})'}"
            raise ValueError(f"module is wrapped by {kind} already; call expert_parallel before you wrap it")
    found = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, Experts)]
    theirs = list(integration.experts_modules(module))
    if not found and not theirs:
        raise ValueError(
            f"module ({type(module).__name__}) has no MoE layer to divide: no tilemoe.MoE, and no experts of "
            "transformers whose implementation can be chosen; shard it by fully_shard alone"
        )
    seen: set[nn.Parameter] = set()
    for name, layer in found + theirs:
        parameters = dict(layer.named_parameters())
        if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            raise ValueError(
                f"module has experts that are sharded already ({name}); call expert_parallel once, before fully_shard"
            )
        shared = [key for key, each in parameters.items() if each in seen or each.shape[:1] != (_num_experts(layer),)]
        seen.update(parameters.values())
        if shared:
            raise ValueError(
                f"module has experts ({name}) that share the parameter {shared[0]}, which cannot be divided; move it "
                "out of them, or shard the model by fully_shard alone"
            )
    for name, layer in theirs:
        wrappers_of(module, name)
        integration.check_experts(layer)
    return [layer for _, layer in found + theirs]


def _meshes(mesh: DeviceMesh, dim: str) -> tuple[DeviceMesh, DeviceMesh]:
    """The 1-D mesh that divides experts, and the mesh, 1-D or 2-D, over which FSDP shards a process' share."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}; make one by init_device_mesh")
    require_text("dim", dim)
    names = mesh.mesh_dim_names or ()
    if dim not in names:
        raise ValueError(
            f"mesh has no dimension {dim!r} (it has {', '.join(map(repr, names)) or 'no names'}); pass "
            "init_device_mesh(device_type, sizes, mesh_dim_names=('fsdp', 'expert')), or name its dimension by dim="
        )
    others = tuple(name for name in names if name != dim)
    if len(others) > 2:
        raise ValueError(
            f"mesh has {len(others)} dimensions beside {dim!r}, but FSDP takes at most two, replicas and shards; "
            "pass a part of it, mesh[...], or flatten it"
        )
    if not others:
        if mesh.size() != (job := dist.get_world_size()):
            raise ValueError(
                f"mesh has only the dimension {dim!r} and {mesh.size()} of the job's {job} processes; pass a mesh "
                "of all of them, with a second dimension over which FSDP shards the experts"
            )
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(0), mesh_dim_names=(_FSDP, dim))
        others = (_FSDP,)
    return mesh[dim], mesh[others]


def _check_sharding(reshard: object, mp_policy: object, offload_policy: object, ranks: int) -> None:
    """ValueError unless `fully_shard` accepts these options for a share that ``ranks`` processes hold."""
    of_ranks = type(reshard) is int and 0 < reshard <= ranks and ranks % reshard == 0
    if not (reshard is None or isinstance(reshard, bool) or of_ranks):
        raise ValueError(
            "reshard_after_forward must be None, True, False or a divisor of the number of processes that share an "
            f"expert ({ranks}), got {shown(reshard)}"
        )
    if mp_policy is not None:
        require_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    if offload_policy is not None:
        require_type("offload_policy", offload_policy, OffloadPolicy)


def _num_experts(layer: nn.Module) -> int:
    return next(layer.parameters()).shape[0]

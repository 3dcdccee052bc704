"""Expert parallelism applied to a model: each process keeps its share of every layer's experts.

E experts · e experts of a process
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.dispatch.choose import Transports
from tilemoe.layers.experts import Experts


def apply_expert_parallel(module: nn.Module, mesh: DeviceMesh, transports: Transports | None = None) -> None:
    """Divide the experts of every MoE layer in ``module`` over the 1-D ``mesh``, evenly and in order.

    Their parameters, the same (E, ...) in every process, become DTensors sharded on E: checkpoints that know DTensors
    can load them on another mesh. From then on the mesh's processes call every layer together, each with tokens of
    its own, and an expert's gradient is the sum over all of them.
    ``transports``: the mesh's, which all layers of a model should share; None: one for ``module``.

    ValueError: the mesh does not divide a layer's experts; then nothing has changed.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Experts)]
    transports = transports or Transports(mesh.get_group())
    dispatchers = [AllToAllDispatcher(transports, layer.cfg.num_experts) for layer in layers]
    for layer, dispatcher in zip(layers, dispatchers, strict=True):
        first = mesh.get_local_rank() * dispatcher.experts_per_rank
        for name, parameter in list(layer.named_parameters()):
            share = parameter.detach()[first : first + dispatcher.experts_per_rank].clone()
            divided = DTensor.from_local(share, mesh, [Shard(0)], run_check=False)
            layer.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        layer.dispatcher = dispatcher


def rows_of_experts(module: nn.Module, tokens_per_expert: Tensor) -> Tensor:
    """(..., E) rows that each expert computes, of ``module``'s counts (..., E) of this process' tokens: under expert
    parallelism those of all processes that share its layers' experts, which all call it.
    """
    dispatchers = (layer.dispatcher for layer in module.modules() if isinstance(layer, Experts))
    groups = [dispatcher.transports.group for dispatcher in dispatchers if isinstance(dispatcher, AllToAllDispatcher)]
    if not groups:
        return tokens_per_expert
    rows = tokens_per_expert.clone()
    dist.all_reduce(rows, group=groups[0])
    return rows

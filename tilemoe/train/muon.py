"""Muon for weight matrices, single or stacked by experts, and AdamW for all other parameters, in one optimiser.

B matrices of a stack · m, n rows and columns of a matrix · m', n' rows and columns of this process' shard of it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.adamw import adamw

from tilemoe.runtime.device import has_fast_gemm
from tilemoe.runtime.random import local_of
from tilemoe.train.config import OptimConfig

_EPS = 1e-7  # lower bound of the norm in the division, as in torch.optim.Muon
_LARGEST_STACK = 1 << 26  # most elements of matrices that are sent and orthogonalised together


def newton_schulz(matrices: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """(B, m, n) -> (B, m, n) in bf16: approximately U V^T of each matrix U S V^T, with singular values near 1.

    x / |x|_F, then ``steps`` times ``x <- a x + (b x x^T + c (x x^T)^2) x`` (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon), on the transpose if m > n, because its GEMMs are smaller. GEMMs are in
    bf16, or in fp32 on a CPU without bf16.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    if not has_fast_gemm(x.device.type, x.dtype):
        x = x.float()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_EPS)  # not in place: x may be the momentum
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).bfloat16()


def muon_group(parameters: Sequence[Tensor], config: OptimConfig, gate_up: Sequence[str | None] = ()) -> dict[str, Any]:
    """The parameter group, (m, n) or (B, m, n) each, that `MuonWithAdamW` updates by Muon.

    gate_up: per parameter, the order of its rows if it holds gate and up: "concatenated" or "interleaved"; else None.
    """
    assert all(parameter.ndim in (2, 3) for parameter in parameters), [p.shape for p in parameters]
    return {
        "params": parameters,
        "algorithm": "muon",
        "gate_up": tuple(gate_up or [None] * len(parameters)),
        "lr": config.lr * config.muon.lr_scale,
        "weight_decay": config.weight_decay,
        **asdict(config.muon),
    }


def adamw_group(parameters: Sequence[Tensor], config: OptimConfig, weight_decay: float) -> dict[str, Any]:
    """The parameter group for AdamW, in ``torch.optim.AdamW`` or in `MuonWithAdamW`."""
    return {
        "params": parameters,
        "algorithm": "adamw",
        "lr": config.lr,
        "weight_decay": weight_decay,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True,  # PyTorch then keeps the step count in fp32 on the parameter's device
    }


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon on the groups of `muon_group`, AdamW on those of `adamw_group`.

    The update of a matrix W (m, n) with gradient G, running mean M, momentum mu, learning rate lr and weight decay wd
    is that of ``torch.optim.Muon``:

    * ``M <- mu M + (1 - mu) G`` and ``U = mu M + (1 - mu) G`` (nesterov) or ``M``;
    * ``W <- (1 - lr wd) W - lr r(m, n) newton_schulz(U)``, where ``adjust_lr_fn`` selects r: original is
      ``sqrt(max(1, m/n))``, match_rms_adamw is ``0.2 sqrt(max(m, n))`` (arXiv 2502.16982, equation 4).

    A stack (B, m, n) is B such matrices; a matrix of gate and up is two with m/2 rows, each with its own r. If matrices
    are sharded by rows or columns, they are redistributed in bf16, all of one shape together, so that each process gets
    some whole matrices. A stack that is sharded by whole matrices stays where it is.

    State per parameter, sharded like it: ``momentum_buffer``; for AdamW ``exp_avg``, ``exp_avg_sq`` and ``step``.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; all processes that share parameters must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                for stack, gate_up in _stacks(group):
                    self._step_muon(stack, gate_up, group)
            elif parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._step_adamw(parameters, group)
        return loss

    def _step_muon(self, parameters: list[Tensor], gate_up: str | None, group: dict[str, Any]) -> None:
        """Update matrices of one shape, or one stack."""
        updates = [self._update(parameter, group) for parameter in parameters]
        is_stack = parameters[0].ndim == 3
        part = _orthogonalise(updates[0] if is_stack else torch.stack(updates), parameters[0], gate_up, group)
        rows = parameters[0].shape[-2] // (2 if gate_up else 1)
        ratio = _lr_ratio(rows, parameters[0].shape[-1], group["adjust_lr_fn"])
        for parameter, direction in zip(parameters, [part] if is_stack else part.unbind(), strict=True):
            local = local_of(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(direction, alpha=-group["lr"] * ratio)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum; returns this process' shard of U in bf16, to which `newton_schulz` casts it anyway."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, mean = local_of(parameter.grad), local_of(state["momentum_buffer"])
        mean.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean).bfloat16()

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _stacks(group: dict[str, Any]) -> Iterator[tuple[list[Tensor], str | None]]:
    """Batches of parameters that have a gradient, with their ``gate_up``: matrices of one shape and sharding, at most
    `_LARGEST_STACK` elements together; each stack of experts alone.
    """
    alike: dict[tuple[Hashable, str | None], list[Tensor]] = {}
    for parameter, gate_up in zip(group["params"], group["gate_up"], strict=True):
        if parameter.grad is None:
            continue
        sharing = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else parameter.device
        key = (parameter.shape, sharing) if parameter.ndim == 2 else id(parameter)
        alike.setdefault((key, gate_up), []).append(parameter)
    for (_, gate_up), found in alike.items():
        count = max(1, _LARGEST_STACK // found[0].numel())
        for first in range(0, len(found), count):
            yield found[first : first + count], gate_up


def _orthogonalise(part: Tensor, parameter: Tensor, gate_up: str | None, group: dict[str, Any]) -> Tensor:
    """This process' shard ``part`` (B, m', n') of matrices U -> the same shard of `newton_schulz` of U. ``parameter``,
    the stack or one of its matrices, has the placements.
    """

    def compute(whole: Tensor) -> Tensor:
        if gate_up is None:
            return newton_schulz(whole, group["ns_coefficients"], group["ns_steps"])
        halves = (whole[:, 0::2], whole[:, 1::2]) if gate_up == "interleaved" else whole.tensor_split(2, dim=1)
        gate, up = newton_schulz(torch.cat(halves), group["ns_coefficients"], group["ns_steps"]).tensor_split(2)
        return torch.stack((gate, up), 2).flatten(1, 2) if gate_up == "interleaved" else torch.cat((gate, up), 1)

    if not isinstance(parameter, DTensor):
        return compute(part)
    divided, shape = parameter.placements, parameter.shape
    if parameter.ndim == 2:
        divided, shape = tuple(map(_behind_stack, divided)), torch.Size((len(part), *shape))
    whole = _whole_placements(divided)
    if whole == divided:
        return compute(part)
    stride, mesh = torch.empty(shape, device="meta").stride(), parameter.device_mesh
    shared = DTensor.from_local(part, mesh, divided, run_check=False, shape=shape, stride=stride)
    result = compute(shared.redistribute(placements=whole).to_local())
    shared = DTensor.from_local(result, mesh, whole, run_check=False, shape=shape, stride=stride)
    return shared.redistribute(placements=divided).to_local()


def _whole_placements(divided: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements of a stack (B, m, n) with which each matrix is whole in some process; maybe ``divided`` itself.

    Processes with shards of all matrices each take some whole matrices. One all-to-all there and one back send less
    than an all-gather of all matrices, and nothing is computed twice. If the stack itself is sharded too, by expert
    parallelism, that would change the order of its shards, so rows are gathered instead.
    """
    by_rows = [placement for placement in divided if _dim(placement) > 0]
    is_divided = len(by_rows) > 1 or any(_dim(placement) == 0 for placement in divided)
    target = Replicate() if is_divided else Shard(0)
    return tuple(target if _dim(placement) > 0 else placement for placement in divided)


def _behind_stack(placement: Placement) -> Placement:
    """The placement of a stack whose matrices each have ``placement``."""
    assert type(placement) in (Shard, Replicate), placement  # FSDP divides matrices in no other way
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _dim(placement: Placement) -> int:
    """The sharded dimension; -1: none."""
    return getattr(placement, "dim", -1)


def _lr_ratio(rows: int, columns: int, adjust_lr_fn: str) -> float:
    """The factor r(m, n) of the learning rate, as defined by `MuonWithAdamW`."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))

"""Muon for weight matrices, single or stacked by experts, and AdamW for all other parameters, in one optimiser.

B matrices of a stack · m, n rows and columns of a matrix
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from tilemoe.runtime.device import has_fast_gemm
from tilemoe.runtime.random import local_of, shared_as
from tilemoe.train.config import OptimConfig

_EPS = 1e-7  # lower bound of the norm in the division, as in torch.optim.Muon


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
    are sharded by rows or columns, each process gathers them in bf16 and orthogonalises them whole. A stack that is
    sharded by whole matrices stays where it is.

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
                for parameter, gate_up in zip(group["params"], group["gate_up"], strict=True):
                    if parameter.grad is not None:
                        self._step_muon(parameter, gate_up, group)
            elif parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._step_adamw(parameters, group)
        return loss

    def _step_muon(self, parameter: Tensor, gate_up: str | None, group: dict[str, Any]) -> None:
        """Update a matrix or a stack."""
        direction = _orthogonalise(self._update(parameter, group), parameter, gate_up, group)
        rows = parameter.shape[-2] // (2 if gate_up else 1)
        ratio = _lr_ratio(rows, parameter.shape[-1], group["adjust_lr_fn"])
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


def _orthogonalise(part: Tensor, parameter: Tensor, gate_up: str | None, group: dict[str, Any]) -> Tensor:
    """This process' shard ``part`` of U (m, n) or (B, m, n), sharded like ``parameter`` -> the same shard of
    `newton_schulz` of U.
    """

    def compute(whole: Tensor) -> Tensor:
        stack = whole if whole.ndim == 3 else whole[None]
        settings = group["ns_coefficients"], group["ns_steps"]
        if gate_up is None:
            return newton_schulz(stack, *settings).reshape(whole.shape)
        halves = (stack[:, 0::2], stack[:, 1::2]) if gate_up == "interleaved" else stack.tensor_split(2, dim=1)
        gate, up = newton_schulz(torch.cat(halves), *settings).tensor_split(2)
        both = torch.stack((gate, up), 2) if gate_up == "interleaved" else torch.cat((gate, up), 1)
        return both.reshape(whole.shape)

    if not isinstance(parameter, DTensor):
        return compute(part)
    divides_stack = [parameter.ndim == 3 and getattr(at, "dim", None) == 0 for at in parameter.placements]
    targets = [at if stays else Replicate() for at, stays in zip(parameter.placements, divides_stack, strict=True)]
    shared: Any = shared_as(parameter, part)
    whole = shared.redistribute(placements=targets)
    result: Any = shared_as(whole, compute(whole.to_local()))
    return result.redistribute(placements=parameter.placements).to_local()


def _lr_ratio(rows: int, columns: int, adjust_lr_fn: str) -> float:
    """The factor r(m, n) of the learning rate, as defined by `MuonWithAdamW`."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))

"""The mixture-of-experts layer: router, routed experts, and optionally a shared expert.

T tokens · d hidden_size · E experts · K experts per token
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilemoe.activations import activation_spec
from tilemoe.checks import require_type
from tilemoe.config import MoEConfig
from tilemoe.kernels.experts.base import FLOAT_DTYPES, Backend
from tilemoe.layers.experts import Experts
from tilemoe.layers.mlp import MLP
from tilemoe.layers.router import Router, checked_output
from tilemoe.routing.balance import check_group, update_selection_bias
from tilemoe.routing.topk import Routing, route
from tilemoe.runtime.tensors import require_tensor, require_tensors


class MoEOutput(NamedTuple):
    """What `MoE` returns.

    Attributes:
        hidden: (..., d) in x's dtype, under autocast in autocast's
        aux_loss: fp32 scalar, coefficients applied; 0 when the router has none
        tokens_per_expert: (E,) int32 rows really computed
        router_logits: (T, E) fp32 or fp64, or as a router of one's own gave them; differentiable. None where it gave a
            `Routing`
        pairs_per_expert: (E,) int32 rows before they were rounded
        expert_ids: (T, K) int32, each token's top-K experts before any rounding, or those replayed; E for a token left
            out. A record of the routing, to be replayed. None where a `Routing` had none

    Examples:
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2))
        >>> out = layer(torch.randn(3, 5, 16))
        >>> out.hidden.shape, int(out.tokens_per_expert.sum()), out.aux_loss.item()
        (torch.Size([3, 5, 16]), 30, 0.0)
    """

    hidden: Tensor
    aux_loss: Tensor
    tokens_per_expert: Tensor
    router_logits: Tensor | None
    pairs_per_expert: Tensor
    expert_ids: Tensor | None = None


class MoE(nn.Module):
    """A drop-in MLP with ``cfg.num_experts`` experts, of which each token uses ``cfg.num_experts_per_tok``.

    Args:
        cfg: the layer.
        device: of the parameters.
        dtype: of the parameters: bf16, fp16, fp32 or fp64.
        recompute: "up_proj" keeps no pre-activations for backward and repeats one GEMM there.
        kernels: a `Backend`, or the name of one; None chooses by device, dtype and shape.
        router: None for a linear one; or any module that is called with x (T, d) and gives logits (T, E) of a float
            dtype, which `tilemoe.route` turns into experts as ``cfg.router`` says, or a `tilemoe.Routing` of its own
            (`tilemoe.plan_topk` and `tilemoe.plan_pairs` make plans). It is on the layer's device already. With
            ``cfg.router.selection_bias`` it has an fp32 buffer ``selection_bias`` (E,).
        group: the processes over whose tokens the auxiliary loss and the bias balancing count; the attribute may be set
            later. None: all ranks, so that in training, where the configuration has a loss, a forward makes one
            all_reduce (and `update_selection_bias` one), which waits until all ranks have called this layer. Where
            only some call it, give the group of those, made by ``torch.distributed.new_group`` in all ranks; or
            ``torch.distributed.GroupMember.NON_GROUP_MEMBER``, which is what that gives to a rank outside the group:
            then this rank counts for itself, and no collective is called. Evaluation never calls one.

    Parameters: ``router.weight`` (E, d) · ``experts.w1`` (E, 2n or n, d) · ``experts.w2`` (E, d, n) ·
    ``experts.b1``, ``experts.b2`` · ``shared.w1`` (2m or m, d), ``shared.w2`` (d, m), m the shared width, in the
    experts' activation and gate_up layout · ``shared_gate.weight`` (1, d). Weights start as normal(0,
    cfg.initializer_range), biases at 0.

    Raises:
        ValueError: an argument is off; the message names it.

    Examples:
        >>> router = tilemoe.RouterConfig(aux_loss_coef=0.01)
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2, router=router))
        >>> out = layer(torch.randn(3, 5, 16, requires_grad=True))
        >>> (out.hidden.square().mean() + out.aux_loss).backward()
        >>> layer.experts.w1.grad.shape
        torch.Size([4, 16, 16])
    """

    def __init__(
        self,
        cfg: MoEConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: str | None = None,
        kernels: str | Backend | None = None,
        router: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        require_type("cfg", cfg, MoEConfig)
        if router is not None and not isinstance(router, nn.Module):
            raise ValueError(
                "router must be None or a torch.nn.Module that gives logits (T, E) or a Routing, got "
                f"{type(router).__name__}; wrap a function in a module"
            )
        check_group(group)
        self.cfg, self.group = cfg, group
        self.router = Router(cfg, device=device, dtype=dtype) if router is None else router
        self.experts = Experts(cfg, device=device, dtype=dtype, recompute=recompute, kernels=kernels)
        self.shared: MLP | None = None
        self.shared_gate: nn.Linear | None = None
        if cfg.shared_intermediate_size:
            spec = activation_spec(cfg.activation, cfg.gate_up, cfg.activation_limit, cfg.activation_alpha)
            self.shared = MLP(
                cfg.hidden_size, cfg.shared_intermediate_size, spec, cfg.initializer_range, device=device, dtype=dtype
            )
        if cfg.shared_gate:
            self.shared_gate = nn.Linear(cfg.hidden_size, 1, bias=False, device=device, dtype=dtype)
            nn.init.normal_(self.shared_gate.weight, 0.0, cfg.initializer_range)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """With the same group: processes cannot be copied."""
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def selection_bias(self) -> Tensor | None:
        """(E,) fp32, the router's buffer; None where it has none."""
        return getattr(self.router, "selection_bias", None)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights anew, for instance after ``to_empty`` brought the layer here from the meta device.

        A router of one's own is left as it is.
        """
        if isinstance(self.router, Router):
            self.router.reset_parameters(generator)
        self.experts.reset_parameters(generator)
        if self.shared is not None:
            self.shared.reset_parameters(generator)
        if self.shared_gate is not None:
            nn.init.normal_(self.shared_gate.weight, 0.0, self.cfg.initializer_range, generator=generator)

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        expert_ids: Tensor | None = None,
    ) -> MoEOutput:
        """x (..., d); token_mask, bool, shaped like x without d or (T,): False marks padding, which is not routed.

        ``generator`` is for the random modes of ``cfg.rounding``. None: the default one of x's device, whose state
        activation checkpointing restores before it repeats a forward; one's own is refused there, in the backward.

        ``expert_ids``, int32 or int64, (T, K) or shaped like x with K in place of d, replays a routing: these experts
        compute, with the scores that the router's present weights give them, through which both it and x get their
        gradients. No rounding then, whatever ``cfg.rounding`` says; the auxiliary loss and ``tokens_per_expert`` count
        these experts. Any layer returns its ids as ``expert_ids``.

        Raises:
            ValueError: a shape, dtype or device is off, (on CPU) the router's logits are not finite or an expert id is
                out of range or twice a token's, or the router gave a `Routing` and ``token_mask``, ``expert_ids`` or
                ``cfg.rounding`` asks for another.
        """
        require_tensors({"x": x}, {"token_mask": token_mask, "expert_ids": expert_ids})
        if x.ndim == 0 or x.shape[-1] != self.cfg.hidden_size:
            raise ValueError(f"x must be (..., {self.cfg.hidden_size}) as cfg.hidden_size says, got {tuple(x.shape)}")
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"x must be bfloat16, float16, float32 or float64, got {x.dtype}")
        flat = x.reshape(-1, x.shape[-1])
        if token_mask is not None and token_mask.shape == x.shape[:-1]:  # `route` refuses other shapes
            token_mask = token_mask.flatten()
        if expert_ids is not None and expert_ids.ndim == x.ndim and expert_ids.shape[:-1] == x.shape[:-1]:
            expert_ids = expert_ids.reshape(flat.shape[0], expert_ids.shape[-1])
        out = checked_output(self.router(flat), flat, self.cfg, token_mask, expert_ids)
        if isinstance(out, Routing):
            routing, logits, x_of_experts = out, None, flat
        else:
            logits, x_of_experts = out
            routing = route(
                logits,
                self.cfg,
                training=self.training,
                generator=generator,
                selection_bias=self.selection_bias,
                token_mask=token_mask,
                group=self.group,
                expert_ids=expert_ids,
            )
        hidden = self.experts(x_of_experts, routing.plan, routing.scores)
        if self.shared is not None:
            hidden = hidden + self._shared_output(flat, self.shared)
        counts = routing.tokens_per_expert
        pairs = counts if routing.pairs_per_expert is None else routing.pairs_per_expert
        if x.ndim != 2:  # no view: an in-place change of one would take FSDP2's hook on the layer's output with it
            hidden = torch.ops.aten._unsafe_view.default(hidden, x.shape)
        return MoEOutput(hidden, routing.aux_loss, counts, logits, pairs, routing.expert_ids)

    def _shared_output(self, x: Tensor, shared: MLP) -> Tensor:
        """(T, d) of the shared expert, times the sigmoid of each token's gate where there is one."""
        out: Tensor = shared(x)
        if self.shared_gate is None:
            return out
        gate = self.shared_gate(x)
        wide = torch.promote_types(gate.dtype, torch.float32)
        return (out * torch.sigmoid(gate.to(wide))).to(out.dtype)

    def update_selection_bias(self, tokens_per_expert: Tensor, rate: float) -> None:
        """Move the selection bias by ``rate`` towards an even load; counts (E,), once per optimiser step.

        When torch.distributed is initialised the counts are summed over ``self.group``, whose ranks must all call it.

        Raises:
            ValueError: the router has no selection bias.
        """
        if self.selection_bias is None:
            raise ValueError("this layer has no selection bias; set router.selection_bias=True in its MoEConfig")
        require_tensor("tokens_per_expert", tokens_per_expert)
        update_selection_bias([self.selection_bias], tokens_per_expert[None], rate, self.group)

"""The mixture-of-experts layer: router, routed experts, and optionally a shared expert.

T tokens · d hidden_size · E experts · K experts per token
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from tilemoe.activations import activation_spec
from tilemoe.checks import require_type
from tilemoe.config import MoEConfig
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.layers.experts import Experts
from tilemoe.layers.mlp import MLP
from tilemoe.layers.router import Router, RouterOutput, checked_output
from tilemoe.routing.balance import check_group, update_selection_bias
from tilemoe.routing.topk import Routing, checked_mask, route
from tilemoe.runtime.random import normal_
from tilemoe.runtime.tensors import require_tensor, require_tensors


class MoEOutput(NamedTuple):
    """What `MoE` returns.

    Attributes:
        hidden: (..., d) in x's dtype, or autocast's under autocast
        aux_loss: fp32 scalar, coefficients applied; 0 when the router has no auxiliary loss
        tokens_per_expert: (E,) int32 number of rows that each expert computed
        router_logits: (T, E) fp32 or fp64, or in the dtype of a custom router; differentiable. None where a custom
            router returned a `Routing`
        pairs_per_expert: (E,) int32 number of each expert's pairs before token rounding
        expert_ids: (T, K) int32, each token's top-K experts before token rounding, or the replayed ones; the id E for
            tokens that the mask excludes. Pass them to `MoE.forward` to replay the routing. None if a custom router's
            `Routing` has none

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


class MoEOutputOfModel(NamedTuple):
    """`MoEOutput` if ``cfg.router.aux_loss_over`` is "model", with this layer's statistics for the loss of all layers.

    statistics: (2E + 1,), see `tilemoe.Routing`.
    """

    hidden: Tensor
    aux_loss: Tensor
    tokens_per_expert: Tensor
    router_logits: Tensor | None
    pairs_per_expert: Tensor
    expert_ids: Tensor | None
    statistics: Tensor


# So that torch.export.save can write a program that returns one.
_register_namedtuple(MoEOutput, serialized_type_name="tilemoe.MoEOutput")
_register_namedtuple(MoEOutputOfModel, serialized_type_name="tilemoe.MoEOutputOfModel")


class MoE(nn.Module):
    """A mixture-of-experts layer that replaces an MLP: each token uses ``cfg.num_experts_per_tok`` of its experts.

    Args:
        cfg: the layer's configuration.
        device: the parameters' device.
        dtype: the parameters' dtype: bf16, fp16, fp32 or fp64.
        recompute: "up_proj" saves no pre-activations for backward and repeats one GEMM there.
        kernels: a `Backend`, or the name of one; None chooses by device, dtype and shape.
        router: None for a linear router, or a module on the layer's device that is called with x (T, d). It returns
            logits (T, E) of a float dtype, which `tilemoe.route` routes as ``cfg.router`` says, or a `tilemoe.Routing`
            (`tilemoe.plan_topk` and `tilemoe.plan_pairs` make its plan). With ``cfg.router.selection_bias`` it must
            have an fp32 buffer ``selection_bias`` (E,).
        group: the process group over whose tokens the auxiliary loss and the selection bias are computed; the attribute
            may also be set later. None: all ranks. In training, if the configuration has an auxiliary loss, each
            forward makes one all_reduce over the group, as does each `update_selection_bias`; all its ranks must call
            this layer, or it hangs. If only some ranks call it, pass a group of those ranks, which all ranks create by
            ``torch.distributed.new_group``. A rank outside that group passes ``new_group``'s result there,
            ``torch.distributed.GroupMember.NON_GROUP_MEMBER``: it then uses its own tokens and calls no collective.
            Evaluation calls no collective.

    Parameters: ``router.weight`` (E, d) · ``experts.w1`` (E, 2n or n, d) · ``experts.w2`` (E, d, n) ·
    ``experts.b1``, ``experts.b2`` · ``shared.w1`` (2m or m, d), ``shared.w2`` (d, m), m the shared width, with the
    experts' activation and gate_up layout · ``shared_gate.weight`` (1, d). Weights start as normal(0,
    cfg.initializer_range), biases at 0.

    Raises:
        ValueError: an argument is invalid; the message names it.

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
            normal_(self.shared_gate.weight, cfg.initializer_range)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A deep copy that shares ``group``: a process group cannot be copied."""
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def selection_bias(self) -> Tensor | None:
        """The router's buffer (E,) fp32; None if it has none."""
        return getattr(self.router, "selection_bias", None)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise the weights again, for instance after ``to_empty`` moved the layer from the meta device.

        A custom router is not changed.
        """
        if isinstance(self.router, Router):
            self.router.reset_parameters(generator)
        self.experts.reset_parameters(generator)
        if self.shared is not None:
            self.shared.reset_parameters(generator)
        if self.shared_gate is not None:
            normal_(self.shared_gate.weight, self.cfg.initializer_range, generator)

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        expert_ids: Tensor | None = None,
    ) -> MoEOutput | MoEOutputOfModel:
        """Route x (..., d) and compute its experts.

        ``token_mask``: bool, or integers such as transformers' attention_mask, shaped like x without d, or (T,). False
        or 0 marks padding: it is not routed, its output is 0, and its x affects nothing, even if it is NaN.

        ``generator``: for the random modes of ``cfg.rounding``; None: the default generator of x's device. Activation
        checkpointing restores only the default one before it repeats a forward, so any other raises ValueError there.

        ``expert_ids``: int32 or int64, (T, K) or shaped like x with K in place of d; replays a routing, such as the
        ``expert_ids`` that a layer returned. These experts compute, with the scores that the router's present weights
        give them; the gradients flow through the scores to the router and x. Rows are then not rounded, and the
        auxiliary loss and ``tokens_per_expert`` count these experts.

        Raises:
            ValueError: a shape, dtype or device is wrong; (on CPU) the router's logits are not finite, or an expert id
                is out of range or repeated for a token; a custom router returned a `Routing`, which excludes
                ``token_mask``, ``expert_ids`` and ``cfg.rounding``; or the router is being trained but cannot learn.
        """
        require_tensors({"x": x}, {"token_mask": token_mask, "expert_ids": expert_ids})
        if x.ndim == 0 or x.shape[-1] != self.cfg.hidden_size:
            raise ValueError(f"x must be (..., {self.cfg.hidden_size}) as cfg.hidden_size says, got {tuple(x.shape)}")
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"x must be bfloat16, float16, float32 or float64, got {x.dtype}")
        flat, padding = x.reshape(-1, x.shape[-1]), None
        if token_mask is not None:
            shape = flat.shape[:1] if token_mask.ndim == 1 else x.shape[:-1]
            token_mask = checked_mask(token_mask, shape, x.device).flatten()
            padding = token_mask.unsqueeze(1).logical_not()
            flat = flat.masked_fill(padding, 0.0)  # before anything reads x: 0 times NaN is NaN
        if expert_ids is not None and expert_ids.ndim == x.ndim and expert_ids.shape[:-1] == x.shape[:-1]:
            expert_ids = expert_ids.reshape(flat.shape[0], expert_ids.shape[-1])
        out = self.router(flat)
        if not isinstance(out, RouterOutput):  # from a custom router
            out = checked_output(out, flat, self.cfg, token_mask, expert_ids)
        if isinstance(out, Routing):
            routing, logits, x_of_experts = out, None, flat
        else:
            logits, x_of_experts = out
            if (
                self.cfg.num_experts_per_tok == 1
                and self.training
                and torch.is_grad_enabled()
                and any(weight.requires_grad for weight in self.router.parameters())
            ):
                self.cfg.require_learnable_router()
            routing = route(
                logits,
                self.cfg,
                training=self.training,
                generator=generator,
                selection_bias=getattr(self.router, "selection_bias", None),
                token_mask=token_mask,
                group=self.group,
                expert_ids=expert_ids,
            )
        hidden = self.experts(x_of_experts, routing.plan, routing.scores)
        if self.shared is not None:
            hidden = hidden + self._shared_output(flat, self.shared)
        if padding is not None:
            hidden = hidden.masked_fill(padding, 0.0)  # so that backward drops padding's gradients, even NaN
        counts = routing.tokens_per_expert
        pairs = counts if routing.pairs_per_expert is None else routing.pairs_per_expert
        if x.ndim != 2:  # not a view: changing a view in place would drop FSDP2's hook on the layer's output
            hidden = torch.ops.aten._unsafe_view.default(hidden, x.shape)
        found = (hidden, routing.aux_loss, counts, logits, pairs, routing.expert_ids)
        return MoEOutput(*found) if routing.statistics is None else MoEOutputOfModel(*found, routing.statistics)

    def _shared_output(self, x: Tensor, shared: MLP) -> Tensor:
        """The shared expert's output (T, d), times the sigmoid of each token's gate if there is one."""
        out: Tensor = shared(x)
        if self.shared_gate is None:
            return out
        gate = self.shared_gate(x)
        wide = torch.promote_types(gate.dtype, torch.float32)
        return (out * torch.sigmoid(gate.to(wide))).to(out.dtype)

    def update_selection_bias(self, pairs_per_expert: Tensor, rate: float) -> None:
        """``bias += rate * sign(mean load - load)``, for loads ``pairs_per_expert`` (E,) int32 or int64.

        Pass the router's own counts: the bias cannot balance rows that are rounded to multiples of a tile.
        Call it once per optimiser step. When torch.distributed is initialised, the loads are summed over
        ``self.group``, whose ranks must all call it.

        Raises:
            ValueError: the router has no selection bias.
        """
        if self.selection_bias is None:
            raise ValueError("this layer has no selection bias; set router.selection_bias=True in its MoEConfig")
        require_tensor("pairs_per_expert", pairs_per_expert)
        update_selection_bias([self.selection_bias], pairs_per_expert[None], rate, self.group)

"""The routed experts: their stacked weights and their forward.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · w = 2n gated, n ungated
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tilemoe.checks import require_type
from tilemoe.config import MoEConfig
from tilemoe.dispatch.base import Capacity, Dispatcher, LocalDispatcher
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.kernels.experts.registry import check_kernels
from tilemoe.ops.moe import backend_for, cast_under_autocast, check_options, moe
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.random import normal_
from tilemoe.runtime.tensors import require_factory


class Experts(nn.Module):
    """Weights w1 (E, w, d) and w2 (E, d, n); biases b1 (E, w) and b2 (E, d), None without ``cfg.expert_bias``.

    ``dispatcher`` brings tokens to the experts: a `LocalDispatcher`, unless expert parallelism replaces it.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: str | None = None,
        kernels: str | Backend | None = None,
    ) -> None:
        super().__init__()
        require_type("cfg", cfg, MoEConfig)
        require_factory(device, dtype, FLOAT_DTYPES)
        check_options(cfg.gate_up, recompute, save=cfg.save)
        if kernels is not None:
            check_kernels(kernels)
        self.cfg, self.recompute, self.save, self.kernels = cfg, recompute, cfg.save, kernels
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.compute: Callable[..., Tensor] | None = None  # replaces `moe`, see `accumulate_grads`
        num, d, n, width = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size, cfg.up_rows
        self.w1 = nn.Parameter(torch.empty(num, width, d, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num, d, n, device=device, dtype=dtype))
        self.b1: nn.Parameter | None = None
        self.b2: nn.Parameter | None = None
        if cfg.expert_bias:
            self.b1 = nn.Parameter(torch.empty(num, width, device=device, dtype=dtype))
            self.b2 = nn.Parameter(torch.empty(num, d, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for weight in (self.w1, self.w2):
            normal_(weight, self.cfg.initializer_range, generator)
        for bias in (self.b1, self.b2):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Tensor:
        """x (T, d), scores (T, K) or (P,) as the plan needs -> (T, d) in x's dtype, or autocast's under autocast."""
        # Before the dispatch, so that backward sends the tokens' gradients before it returns the weights'.
        local = self.dispatcher.local_weight
        w1, w2 = local(self.w1), local(self.w2)
        b1 = None if self.b1 is None else local(self.b1)
        b2 = None if self.b2 is None else local(self.b2)
        here = self.dispatcher.dispatch(x, plan, scores)
        if self.cfg.invariance == "batch":
            self._require_invariance(here.x)
        o = (self.compute or moe)(
            here.x,
            w1,
            w2,
            here.plan,
            here.scores,
            activation=self.cfg.activation,
            activation_limit=self.cfg.activation_limit,
            activation_alpha=self.cfg.activation_alpha,
            gate_up=self.cfg.gate_up,
            b1=b1,
            b2=b2,
            recompute=self.recompute,
            kernels=self.kernels,
            precision=self.cfg.precision,
            save=self.save,
        )
        return self.dispatcher.combine(o, here)

    def precision_of(self, x: Tensor) -> str:
        """The precision, "bf16" or "fp8", in which the backend computes x (T, d), already cast to the compute dtype."""
        return self._backend_class(x).precision

    def _backend_class(self, x: Tensor) -> type[Backend]:
        """The backend's class: torch.compile treats its attributes, unlike an instance's, as constants."""
        widths = (self.cfg.hidden_size, self.cfg.intermediate_size)
        return type(backend_for(self.kernels, x, widths, self.cfg.precision))

    def _require_invariance(self, x: Tensor) -> None:
        """ValueError unless a row's result, computed from x (T, d), is known not to depend on the other rows."""
        (x,) = cast_under_autocast(x)
        backend = self._backend_class(x)
        if not backend.batch_invariance.startswith("yes"):
            raise ValueError(
                f"invariance='batch': kernels={backend.name!r} is not batch-invariant in {x.dtype} "
                f"({backend.batch_invariance}); pass kernels='triton' on a GPU, or set it to 'none' in the MoEConfig"
            )

    def extra_repr(self) -> str:
        cfg = self.cfg
        return f"{cfg.num_experts} x ({cfg.hidden_size} -> {cfg.intermediate_size}), {cfg.activation}, {cfg.gate_up}"


def capacity_of(module: nn.Module, device: torch.device) -> Capacity | None:
    """The `Capacity` for received rows, shared by all layers of ``module``; None: any number of rows fits. All
    processes that share the experts must call it together.
    """
    layers = (layer for layer in module.modules() if isinstance(layer, Experts))
    return next((found for layer in layers if (found := layer.dispatcher.capacity(device)) is not None), None)


def accumulate_grads(module: nn.Module) -> None:
    """Fuse gradient accumulation into the wgrad GEMMs of every MoE layer, for steps of several micro-batches.

    ``.grad`` of the weights w1 (E, w, d), w2 (E, d, n) becomes fp32 (fp64 for fp64 weights), and the wgrad kernels add
    to it directly; no gradient in the weights' dtype is written, widened and added. See ``accumulate`` of
    `tilemoe.moe`. torch.compile breaks the graph at the experts.

    Use it for weights in fp32, with or without autocast, alone or in DistributedDataParallel. For weights of another
    dtype the optimiser must accept gradients in fp32, which torch.optim's do not. FSDP2 with
    ``reduce_dtype=torch.float32`` supports weights of any dtype, if each step has at least two micro-batches and calls
    ``set_requires_gradient_sync(False)`` for all but the last: FSDP2 then reduces these sums.
    Experts divided by expert parallelism and experts with adapters are not changed.

    Raises:
        ValueError: ``module`` has no MoE layer.

    Examples:
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2), dtype=torch.bfloat16)
        >>> tilemoe.accumulate_grads(layer)
        >>> for _ in range(3):
        ...     layer(torch.randn(5, 16, dtype=torch.bfloat16)).hidden.sum().backward()
        >>> layer.experts.w1.grad.dtype
        torch.float32
    """
    from tilemoe.ops.accumulating_moe import accumulating_moe  # here, because it imports torch._dynamo

    require_type("module", module, nn.Module)
    layers = [layer for layer in module.modules() if isinstance(layer, Experts)]
    if not layers:
        raise ValueError(f"module ({type(module).__name__}) has no MoE layer whose gradients could be accumulated")
    for layer in layers:
        layer.compute = accumulating_moe

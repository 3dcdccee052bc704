"""Megatron Core's mixture-of-experts layers, computed by tilemoe; a layer spec chooses them, like Megatron's own.

    GPTModel(config, tilemoe_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=False)), ...)
    --spec tilemoe.integrations.megatron gpt_spec

T tokens and e experts of this process · E experts · K experts per token · d hidden_size · n expert width of this
process · w = 2n gated, n ungated · R rows, sorted by expert

Router, losses, shared experts, recomputation and process groups are Megatron's. Its dispatchers bring rows to
`TileMoEExperts`, unless this process has all experts: then `LocalTokenDispatcher` leaves the tokens where they are, and
the kernels gather them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

try:
    from megatron.core import parallel_state
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
except ImportError as error:
    raise ImportError(
        f"tilemoe's experts for Megatron are for Megatron Core 0.19: {error}; pip install 'megatron-core>=0.19,<0.20'"
    ) from error

from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_rows, plan_topk

# Settings that tilemoe lacks, and that change what experts compute, or how weights are laid out or sharded.
_REFUSED = ("fp8", "fp4", "quant_recipe", "moe_apply_probs_on_input", "moe_mlp_glu_interleave_size", "moe_paged_stash",
            "moe_ncclep_zero_copy")  # fmt: skip
_NOT_OFFLOADED = ("expert_fc1", "moe_act", "fused_group_mlp")  # parts of Transformer Engine's experts
_OF_MEGATRON = {
    "w1": "linear_fc1.weight", "w2": "linear_fc2.weight", "b1": "linear_fc1.bias", "b2": "linear_fc2.bias"
}  # fmt: skip


class TileMoEExperts(MegatronModule):
    """Replaces ``SequentialMLP``: w1 (e, w, d), rows [gate; up], and w2 (e, d, n), initialised as there.
    With ``add_bias_linear`` also b1 (e*w) and b2 (e*d): of one dimension, by which Megatron's optimisers know biases.

    Where Megatron's DistributedDataParallel has given w1 and w2 a ``main_grad``, their gradients go there. If it is
    fp32, the wgrad kernels accumulate into it, and no gradient in the weights' dtype is made.

    `state_dict` has the names of ``SequentialMLP``; those of ``TEGroupedMLP`` can be loaded, too. Distributed
    checkpoints are the same for all three.

    ValueError: the configuration asks for what tilemoe's experts do not compute.
    """

    w1: nn.Parameter
    w2: nn.Parameter
    b1: nn.Parameter | None
    b2: nn.Parameter | None

    def __init__(self, num_local_experts: int, config: Any, *, pg_collection: Any, name: str | None = None) -> None:
        super().__init__(config=config)
        for setting in _REFUSED:
            if value := getattr(config, setting):
                raise ValueError(f"{setting}={value!r} is not served by tilemoe's experts; unset it")
        if config.transformer_impl == "inference_optimized":
            raise ValueError(
                "transformer_impl='inference_optimized' has experts of its own; use another, or its experts"
            )
        offloaded = config.offload_modules or () if config.fine_grained_activation_offloading else ()
        if inside := [part for part in _NOT_OFFLOADED if part in offloaded]:
            raise ValueError(f"offload_modules has {inside[0]!r}, which tilemoe's experts do not have; leave it out")
        if config.expert_gtp_weight_remat_size > 1:
            raise ValueError("tilemoe's experts are not divided by expert_tensor_parallel_num_weight_shards; unset it")
        self.options: Mapping[str, Any] = _options_of(config)
        self.groups = pg_collection
        drawing = copy.copy(config)
        drawing.gradient_accumulation_fusion = False  # these layers only draw weights; it would ask for Apex
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = SequentialMLP(num_local_experts, drawing, linears, pg_collection=pg_collection).local_experts
        drawn = [dict(expert.named_parameters()) for expert in experts]
        for ours, theirs in _OF_MEGATRON.items():
            each = [parameters[theirs] for parameters in drawn if theirs in parameters]
            self.register_parameter(ours, _joined_parameter(each) if each else None)
        if self.options["save"] == "fp8" and (width := self.w1.shape[1]) % 128:
            raise ValueError(
                f"activation_func_fp8_input_store is for fc1 outputs of a multiple of 128, not {width}; unset it"
            )

    def forward(self, x: Tensor, tokens_per_expert: Tensor | RoutingPlan, probs: Tensor) -> tuple[Tensor, None]:
        """x (R, d) sorted by expert, tokens_per_expert (e), probs (R) -> (R, d), every row times its probability.

        With a `LocalTokenDispatcher`: x (T, d), a plan of its tokens, probs (T, K) -> (T, d), summed over the experts.
        """
        plan = tokens_per_expert
        if not isinstance(plan, RoutingPlan):
            plan, probs = plan_rows(plan.to(x.device, non_blocking=True), x.shape[0]), probs.unsqueeze(1)
        weights = [w for w in (self.w1, self.w2) if getattr(w, "main_grad", None) is not None]
        given: dict[str, Any] = {name: _by_expert(each, self.w1.shape[0]) for name, each in self._named()}
        o = moe(x, plan=plan, scores=probs, accumulate=bool(weights), **given, **self.options)
        return _IntoMainGrad.apply(o, weights) if weights else o, None

    def backward_dw(self) -> None:
        """Nothing is left to do: backward has computed the weights' gradients."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The shards of ``SequentialMLP``, each parameter a factory of them, which optimisers apply to their states.

        ValueError: ``metadata`` asks for a key per expert.
        """
        if (metadata or {}).get("singleton_local_shards", False):
            raise ValueError("singleton_local_shards must be False: tilemoe writes one key for all experts of a layer")
        groups, experts = self.groups, self.w1.shape[0]
        tp = (groups.expt_tp.rank(), groups.expt_tp.size())
        places = [
            (*sharded_offsets, (len(sharded_offsets), groups.ep.rank() * experts + i, groups.ep.size() * experts))
            for i in range(experts)
        ]
        sharded: dict[str, Any] = {}
        for ours, parameter in self._named():
            halves = 2 if ours in ("w1", "b1") and self.config.gated_linear_unit else 1
            sharded[f"{prefix}{ours}"] = ShardedTensorFactory(
                f"{prefix}experts.{_OF_MEGATRON[ours]}",
                parameter,
                partial(_shards_of_experts, places, int(ours == "w2"), halves, tp),
                _loaded,
                (0, 0, groups.expt_dp.rank()),
            )
        for theirs in ("linear_fc1", "linear_fc2"):
            for i, place in enumerate(places):  # an empty object; without it Megatron's experts refuse to load
                sharded[f"{prefix}local_experts.{i}.{theirs}._extra_state"] = make_sharded_object_for_checkpoint(
                    None, f"{prefix}experts.{theirs}._extra_state", place, (0, tp[0], groups.expt_dp.rank())
                )
        return sharded

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name in _OF_MEGATRON if (parameter := getattr(self, name)) is not None]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for ours, parameter in self._named():
            for i, each in enumerate(_by_expert(parameter if keep_vars else parameter.detach(), self.w1.shape[0])):
                destination[f"{prefix}local_experts.{i}.{_OF_MEGATRON[ours]}"] = each

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also accepts the names of ``SequentialMLP`` and ``TEGroupedMLP``; their ``_extra_state`` is dropped."""
        for key in [key for key in state_dict if key.startswith(prefix) and key.endswith("_extra_state")]:
            del state_dict[key]
        for ours, theirs in _OF_MEGATRON.items():
            for name in (f"{prefix}local_experts.{{}}.{theirs}", f"{prefix}{theirs}{{}}"):
                keys = [name.format(i) for i in range(self.w1.shape[0])]
                if all(key in state_dict for key in keys):
                    state_dict[f"{prefix}{ours}"] = _joined([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *args)


class LocalTokenDispatcher(MoETokenDispatcher):
    """Leaves tokens where they are, for a process that has all experts: the plan says who computes what."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cudagraph_attrs = ["routing_map"]  # a CUDA graph of dispatch_preprocess alone returns it

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (..., d), routing_map (T, E) bool, probs (T, E) -> tokens (T, d), probs."""
        self.shape = tokens.shape
        self.routing_map: Tensor | None = routing_map
        return tokens.flatten(0, -2), probs

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, probs

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, RoutingPlan, Tensor]:
        """tokens (T, d), their plan, and the experts' probabilities (T, K); a token may have fewer than K experts."""
        experts = probs.shape[1]
        assert self.routing_map is not None, "dispatch_preprocess comes first"
        if self.config.moe_pad_expert_input_to_capacity:
            self.routing_map = self.routing_map & (probs > 0)  # padding has weight 0, and may exceed K of a token
        chosen, ids = self.routing_map.byte().topk(self.config.moe_router_topk, dim=1)
        plan = plan_topk(ids.masked_fill(chosen == 0, experts), experts)
        self.routing_map = None
        return tokens, plan, probs.gather(1, ids)

    def combine_preprocess(self, output: Tensor) -> Tensor:
        return output

    def token_combine(self, output: Tensor) -> Tensor:
        return output

    def combine_postprocess(self, output: Tensor) -> Tensor:
        return output.view(self.shape)


class TileMoELayer(MoELayer):
    """Megatron's layer, with a `LocalTokenDispatcher` where no token has to move."""

    def __init__(
        self, config: Any, submodules: Any = None, *args: Any, pg_collection: Any = None, **named: Any
    ) -> None:
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, *args, pg_collection=groups, **named)
        moves = groups.ep.size() * groups.expt_tp.size() > 1
        if not (moves or config.moe_shared_expert_overlap):  # Megatron's dispatchers also start the shared experts
            self.token_dispatcher = LocalTokenDispatcher(config, groups)


def tilemoe_spec(spec: Any) -> Any:
    """A copy of a Megatron spec (of a layer, a block, a stack or their submodules) with tilemoe's MoE layers.

    Attention, norms, routers, shared experts and dense layers stay as the spec has them.

    Raises:
        ValueError: the spec has no MoE layer, and there are no other pipeline stages, which might have one.

    Examples:
        >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        >>> from tilemoe.integrations.megatron import tilemoe_spec
        >>> tilemoe_spec(get_gpt_layer_local_spec(num_experts=4)).submodules.mlp.func.__name__
        'TileMoELayer'
    """
    found = _with_our_layers(spec)
    is_initialized = parallel_state.model_parallel_is_initialized()
    stages = parallel_state.get_pipeline_model_parallel_world_size() if is_initialized else 1
    if found is spec and stages == 1:
        raise ValueError(
            f"spec ({type(spec).__name__}) has no MoE layer of Megatron's; is num_moe_experts set, or is it ours?"
        )
    return found


def gpt_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The decoder's spec for ``--spec tilemoe.integrations.megatron gpt_spec``; config: a model's or transformer's."""
    config = getattr(config, "transformer", config)
    return tilemoe_spec(
        get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=config.transformer_impl == "transformer_engine",
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    )


class _IntoMainGrad(torch.autograd.Function):
    """Identity whose backward sets the weights' ``.grad`` to ``main_grad``, just before the experts' backward.

    Not earlier, because the hook of Megatron's DistributedDataParallel resets ``.grad`` after every micro-batch, and
    pipelines run several forwards before that. ``grad_added_to_main_grad`` tells the hook that it has nothing to add.
    """

    @staticmethod
    def forward(ctx: Any, o: Tensor, weights: list[Any]) -> Tensor:
        ctx.weights = weights
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None]:
        for weight in ctx.weights:
            weight.grad_dtype = weight.main_grad.dtype
            weight.grad, weight.grad_added_to_main_grad = weight.main_grad, True
        return do, None


def _with_our_layers(spec: Any) -> Any:
    """A copy of ``spec`` with tilemoe's MoE layers, or ``spec`` itself if it has no MoE layer of Megatron's."""
    if isinstance(spec, partial) and spec.func is MoELayer:
        ours = replace(spec.keywords["submodules"], experts=TileMoEExperts)
        return partial(TileMoELayer, *spec.args, **{**spec.keywords, "submodules": ours})
    if isinstance(spec, ModuleSpec) and spec.module is MoELayer:
        return replace(spec, module=TileMoELayer, submodules=replace(spec.submodules, experts=TileMoEExperts))
    if isinstance(spec, list):
        found = [_with_our_layers(each) for each in spec]
        return found if any(new is not old for new, old in zip(found, spec, strict=True)) else spec
    if is_dataclass(spec) and not isinstance(spec, type):
        parts = {field.name: getattr(spec, field.name) for field in fields(spec)}
        changed = {name: new for name, old in parts.items() if (new := _with_our_layers(old)) is not old}
        return replace(spec, **changed) if changed else spec
    return spec


def _options_of(config: Any) -> dict[str, Any]:
    """The arguments of `tilemoe.moe` for a TransformerConfig's activation. ValueError: tilemoe lacks the activation."""
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    gated = {nn.functional.silu: "swiglu", nn.functional.gelu: "geglu"}
    ungated = {
        nn.functional.silu: "silu",
        nn.functional.gelu: "gelu",
        nn.functional.relu: "relu",
        squared_relu: "relu2",
    }
    options: dict[str, Any] = {"save": "fp8" if config.activation_func_fp8_input_store else "full"}
    function = config.activation_func
    if config.gated_linear_unit and function is quick_gelu and offset == 1.0 and limit:
        return options | {"activation": "swiglu_oai", "activation_limit": limit, "activation_alpha": 1.702}
    if config.gated_linear_unit and function is nn.functional.silu and offset == 0.0 and limit:
        if config.bias_activation_fusion:
            raise ValueError(
                f"activation_func_clamp_value={limit} is not heeded by Megatron's fused SwiGLU; unset one of it and "
                "bias_activation_fusion"
            )
        return options | {"activation": "swiglu_clamped", "activation_limit": limit}
    activation = (gated if config.gated_linear_unit else ungated).get(function)
    if activation is None or (config.gated_linear_unit and (offset or limit)):
        raise ValueError(
            f"activation_func={getattr(function, '__name__', function)} with gated_linear_unit="
            f"{config.gated_linear_unit}, glu_linear_offset={offset} and activation_func_clamp_value={limit} is not an "
            "activation of tilemoe; use Megatron's own experts"
        )
    return options | {"activation": activation}


def _joined(experts: list[Tensor]) -> Tensor:
    """(e, p, q) of e weights (p, q), or (e*p) of biases (p)."""
    return torch.stack(experts) if experts[0].ndim > 1 else torch.cat(experts)


def _by_expert(parameter: Tensor, experts: int) -> Tensor:
    return parameter if parameter.ndim > 1 else parameter.view(experts, -1)


def _joined_parameter(weights: list[nn.Parameter]) -> nn.Parameter:
    """One parameter, with the attributes that Megatron reads."""
    joined = nn.Parameter(_joined([weight.detach() for weight in weights]))
    marks = dict(vars(weights[0]))
    if marks.get("partition_dim", -1) >= 0 and joined.ndim > 1:
        marks["partition_dim"] += 1
    vars(joined).update(marks)
    return joined


def _shards_of_experts(
    places: list[tuple[Any, ...]],
    axis: int,
    halves: int,
    tp: tuple[int, int],
    key: str,
    weight: Tensor,
    replica_id: Any,
    flattened_range: slice | None,
) -> list[list[ShardedTensor]]:
    """The shards of a weight (e, p, q), or of biases (e*p): [expert][half], where halves are gate and up, or only one.

    places: each expert's offsets ahead of p and q. axis: p (0) or q (1), along which tensor parallelism splits each
    half. tp: rank and size of its group; with biases Megatron allows only size 1.
    """
    if flattened_range is not None:
        raise ValueError("the distributed optimiser's checkpoints must be fully_reshardable or dp_reshardable")
    rank, size = tp
    return [
        [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                *place,
                (len(place) + axis, rank + number * size, halves * size),
                replica_id=replica_id,
                prepend_axis_num=len(place),
            )
            for number, half in enumerate(expert.chunk(halves, dim=axis))
        ]
        for place, expert in zip(places, _by_expert(weight.detach(), len(places)), strict=True)
    ]


def _loaded(shards: list[list[Tensor]]) -> Tensor:
    """The weight or biases, assembled after loading from the shards of `_shards_of_experts`."""
    return _joined([torch.cat(halves) for halves in shards])

"""Configuration of the mixture-of-experts layer and of the decoder: frozen dataclasses, validated on construction.

Standard library only: configuring, planning and ``--help`` never import torch.

E experts · K experts per token · d hidden_size · n intermediate_size (of one expert)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tilemoe.activations import REGISTRY, validate_activation
from tilemoe.checks import find_named, require_choice, require_fields, require_int, shown

ACTIVATIONS = frozenset(REGISTRY)
GATED_ACTIVATIONS = frozenset(name for name in REGISTRY if REGISTRY[name].is_gated)
UNGATED_ACTIVATIONS = ACTIVATIONS - GATED_ACTIVATIONS

GateUp = Literal["concatenated", "interleaved"]
Precision = Literal["bf16", "fp8"]
Save = Literal["full", "fp8"]
Invariance = Literal["none", "batch"]
Checkpointing = Literal["none", "attention", "block"]
Exchange = Literal["auto", "collective", "symmetric"]
Kept = Literal["nothing", "weights", "weights_and_gradients"]
RoundingMode = Literal["nearest", "stochastic", "nearest_score", "balance", "up", "down"]
GATE_UP_LAYOUTS, PRECISIONS, CHECKPOINTING_MODES = get_args(GateUp), get_args(Precision), get_args(Checkpointing)
SAVES = get_args(Save)
EXCHANGES, KEPT_BETWEEN_MICRO_BATCHES, ROUNDING_MODES = get_args(Exchange), get_args(Kept), get_args(RoundingMode)
FP8_BLOCK = 128  # elements of a row that share a scale
# A weight gradient is faster with FP8 operands if both widths, and their product, are at least these: FP8 operands are
# copied transposed, in time proportional to the sum of the widths, while the GEMM's time grows with their product.
# Measured with 2048 rows and more per expert (docs/fp8.md).
FP8_WGRAD_WIDTH, FP8_WGRAD_ELEMENTS = 1024, 2048 * 2048


def quantizes_wgrad(by_token: int, by_row: int) -> bool:
    """Whether down_proj_wgrad or up_proj_wgrad reads FP8 operands. ``by_token``: the width of x or do; ``by_row``: the
    width of dh or a_scaled."""
    return min(by_token, by_row) >= FP8_WGRAD_WIDTH and by_token * by_row >= FP8_WGRAD_ELEMENTS


def require_save(save: Any, width: int) -> None:
    """ValueError unless pre-activations h of ``width`` columns can be saved in the format ``save``."""
    require_choice("save", save, SAVES)
    if save == "fp8" and width % FP8_BLOCK:
        raise ValueError(
            f"save='fp8' needs the width of h (n, or 2n if gated) to be a multiple of {FP8_BLOCK}, got {width}; change "
            "intermediate_size, or use save='full'"
        )


@dataclass(frozen=True)
class RouterConfig:
    """How router logits become K experts and their scores.

    Attributes:
        score: the score function: softmax over all experts, or one sigmoid per expert.
        softmax_after_topk: select on the logits, then take the softmax of the K selected ones (gpt-oss, Granite).
        normalize: divide the K selected scores by their sum (+ 1e-20).
        scale: factor by which the scores are multiplied last (DeepSeek's routed_scaling_factor).
        selection_bias: add a per-expert fp32 buffer to the scores for the selection only (aux-loss-free balancing).
        num_groups: number of contiguous groups that the experts are divided into.
        top_groups: number of groups whose experts may be selected: the groups with the largest sums of their two best
            biased scores (DeepSeek-V3).
        bias: the router's linear map has a trainable bias (gpt-oss).
        aux_loss_coef: coefficient of Switch's load-balancing loss (arXiv 2101.03961, equation 4); 0 disables it.
        z_loss_coef: coefficient of the router z-loss (arXiv 2202.08906, equation 5); 0 disables it.
        aux_loss_over: "layer": the sum of one balancing loss per layer; "model": one over all, as in transformers.
        add_aux_loss: whether `DecoderLM` given labels returns these losses, like transformers' output_router_logits.

    Raises:
        ValueError: a setting is out of range, or two contradict each other; the message names them.

    Examples:
        >>> tilemoe.RouterConfig.preset("qwen3_moe")  # doctest: +ELLIPSIS
        RouterConfig(score='softmax', softmax_after_topk=False, normalize=True, ...)
        >>> tilemoe.RouterConfig(score="sigmoid", selection_bias=True, num_groups=8, top_groups=4).top_groups
        4
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after_topk: bool = False
    normalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    bias: bool = False
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    aux_loss_over: Literal["layer", "model"] = "layer"
    add_aux_loss: bool = True

    def __post_init__(self) -> None:
        require_fields("router.", self, at_least={"num_groups": 1, "top_groups": 1}, positive=("scale",))
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"router.top_groups ({self.top_groups}) must not exceed router.num_groups ({self.num_groups})"
            )
        if self.softmax_after_topk and self.score != "softmax":
            raise ValueError("router.softmax_after_topk needs router.score='softmax'; unset one of the two")

    @classmethod
    def preset(cls, name: str) -> RouterConfig:
        """The router of a public architecture (``ROUTER_PRESETS``) or of one of its models (``ROUTER_OF_MODEL``)."""
        family = {model: ROUTER_PRESETS[router] for model, router in ROUTER_OF_MODEL.items()}
        return find_named("router preset", name, {**ROUTER_PRESETS, **family})


# Sources. Scores, normalisation and groups: each architecture's router class in transformers, with the settings of its
# released models. Loss coefficients: the defaults of its transformers configuration class, which a checkpoint's
# config.json may override (Mixtral-8x7B 0.02, gpt-oss 0.9); OLMoE's z-loss: arXiv 2409.02060. Scales: DeepSeek-V3's
# configuration class; the config.json of Kimi-K2, GLM-4.5 (2.5) and GLM-4.5-Air (1.0).
ROUTER_PRESETS: Mapping[str, RouterConfig] = MappingProxyType(
    {
        "mixtral": RouterConfig(aux_loss_coef=0.001),
        "olmoe": RouterConfig(normalize=False, aux_loss_coef=0.01, z_loss_coef=0.001),
        "qwen3_moe": RouterConfig(aux_loss_coef=0.001),
        "qwen3_next": RouterConfig(aux_loss_coef=0.001),
        "deepseek_v3": RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, num_groups=8, top_groups=4),
        "kimi_k2": RouterConfig(score="sigmoid", scale=2.827, selection_bias=True),
        "glm4_moe": RouterConfig(score="sigmoid", scale=2.5, selection_bias=True),
        "glm4_moe_air": RouterConfig(score="sigmoid", scale=1.0, selection_bias=True),
        "gpt_oss": RouterConfig(softmax_after_topk=True, bias=True, aux_loss_coef=0.001),
        "granite_moe": RouterConfig(softmax_after_topk=True, aux_loss_coef=0.001),
    }
)
ROUTER_OF_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "mixtral-8x7b": "mixtral",
        "olmoe-1b-7b": "olmoe",
        "qwen3-30b-a3b": "qwen3_moe",
        "qwen3-235b-a22b": "qwen3_moe",
        "qwen3-next-80b-a3b": "qwen3_next",
        "deepseek-v3": "deepseek_v3",
        "kimi-k2": "kimi_k2",
        "glm-4.5": "glm4_moe",
        "glm-4.5-air": "glm4_moe_air",
        "gpt-oss-20b": "gpt_oss",
        "gpt-oss-120b": "gpt_oss",
        "granite-3-1b-a400m": "granite_moe",
        "granite-3-3b-a800m": "granite_moe",
    }
)


@dataclass(frozen=True)
class TokenRounding:
    """Round each expert's number of rows to a multiple of ``tile`` in training, so that its GEMMs have no ragged tile.

    Rounding down drops the rows with the lowest scores among those that top-K gave the expert; rounding up adds the
    other tokens with the highest scores. The mode decides between the two: "nearest" takes the nearer multiple, the
    lower at a tie; "stochastic" goes up with probability remainder / tile; "nearest_score" goes up with probability
    dropped / (dropped + added), the sums of the scores that rounding down would drop and rounding up would add;
    "balance" keeps the total number of rows within half a tile of top-K's; "up" and "down" are fixed. ``tile`` is a
    power of two, 128 for GPUs.

    Source: arXiv 2512.14080, section 5.

    Raises:
        ValueError: the mode is unknown, or the tile is not a power of two >= 16.

    Examples:
        >>> rounding = tilemoe.TokenRounding("nearest", tile=16)
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2, rounding=rounding))
        >>> (layer(torch.randn(64, 32)).tokens_per_expert % 16).tolist()
        [0, 0, 0, 0]
    """

    # Drops an expert's lowest-scored tokens, or adds the highest-scored others, so that its GEMMs have no ragged tile.
    # For training wide experts with few tiles of rows each on a GPU. Setting any of these options turns rounding on.
    mode: RoundingMode = "nearest"
    tile: int = 128  # each expert's rows become a multiple of this power of two: 128 for GPUs

    def __post_init__(self) -> None:
        require_fields("rounding.", self, at_least={"tile": 16})
        if self.tile & (self.tile - 1):
            raise ValueError(f"rounding.tile must be a power of two >= 16, got {self.tile}")


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer: routed experts, optional shared expert, router.

    Attributes:
        activation: swiglu, geglu, geglu_tanh, reglu, swiglu_oai or swiglu_clamped, which are gated, or gelu, gelu_tanh,
            relu, relu2 or silu.
        activation_limit: clamp of swiglu_oai (None: 7.0) and swiglu_clamped (10.0).
        activation_alpha: of swiglu_oai (None: 1.702).
        gate_up: order of the rows of w1: "concatenated", all gates and then all ups, or "interleaved", in turn.
        expert_bias: the routed experts have trainable biases.
        shared_intermediate_size: width of the shared expert, 0 for none.
        shared_gate: multiply the shared expert's output by the sigmoid of a linear map of the token.
        initializer_range: standard deviation of the initial weights.
        precision: of the routed experts' GEMMs: "bf16" uses the operands' own dtype; "fp8" quantises the operands where
            the backend supports it (`tilemoe doctor` says where, and why not; docs/fp8.md explains how).
        save: how the routed experts' pre-activations are saved for backward: "full", in their own dtype, or "fp8", in
            e4m3, about half the memory of 16 bits. FP8 changes the gradients but not the output; it needs n, or 2n if
            gated, to be a multiple of 128.
        invariance: with "batch" a token's output has the same bits whatever other tokens are in its batch, in training
            and inference (docs/replay.md). It needs a GPU that runs the Triton kernels, and excludes a shared expert
            and rounding.

    Raises:
        ValueError: a size or a setting is out of range, or two contradict each other; the message names them.

    Examples:
        >>> cfg = tilemoe.MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, num_experts_per_tok=2)
        >>> cfg.is_gated, cfg.up_rows
        (True, 64)
        >>> tilemoe.MoEConfig(64, 32, num_experts=2, num_experts_per_tok=4)
        Traceback (most recent call last):
        ValueError: num_experts_per_tok (4) must not exceed num_experts (2)
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    activation: str = "swiglu"
    activation_limit: float | None = None
    activation_alpha: float | None = None
    gate_up: GateUp = "concatenated"
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router: RouterConfig = field(default_factory=RouterConfig)
    rounding: TokenRounding | None = None
    initializer_range: float = 0.02
    precision: Precision = "bf16"
    save: Save = "full"
    invariance: Invariance = "none"

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
        numbers = ("activation_limit", "activation_alpha")
        require_fields("", self, at_least=dict.fromkeys(sizes, 1), positive=numbers)
        validate_activation(self.activation, self.activation_limit, self.activation_alpha)
        require_save(self.save, self.up_rows)
        if not isinstance(self.router, RouterConfig):
            raise ValueError(f"router must be a RouterConfig, got {type(self.router).__name__}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must not exceed num_experts ({self.num_experts})"
            )
        if self.shared_gate and not self.shared_intermediate_size:
            raise ValueError("shared_gate needs a shared expert: set shared_intermediate_size > 0")
        if self.rounding is not None and not isinstance(self.rounding, TokenRounding):
            raise ValueError(f"rounding must be a TokenRounding or None, got {type(self.rounding).__name__}")
        if self.invariance == "batch" and (self.rounding is not None or self.shared_intermediate_size):
            other = "shared_intermediate_size is 0" if self.rounding is None else "rounding is None"
            raise ValueError(f"invariance='batch' is only for a layer whose {other}; change one of the two")
        self._validate_groups()

    def _validate_groups(self) -> None:
        groups, top = self.router.num_groups, self.router.top_groups
        if groups == 1:
            return
        if self.num_experts % groups or self.num_experts // groups < 2:
            raise ValueError(
                f"router.num_groups ({groups}) must divide num_experts ({self.num_experts}) into groups of at least 2"
            )
        eligible = top * (self.num_experts // groups)
        if self.num_experts_per_tok > eligible:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds the {eligible} experts of the "
                f"router.top_groups ({top}) eligible groups; raise router.top_groups"
            )

    @property
    def is_gated(self) -> bool:
        """Whether the activation is gated: h has 2n columns, gate and up, in place of n."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def up_rows(self) -> int:
        """Rows of one expert's w1: 2n when gated (gate and up), else n."""
        return self.intermediate_size * (2 if self.is_gated else 1)

    def require_learnable_router(self) -> None:
        """ValueError if each token's one score is the same for all logits: the router would get no gradient."""
        constant = [name for name in ("normalize", "softmax_after_topk") if getattr(self.router, name)]
        if self.num_experts_per_tok == 1 < self.num_experts and constant:
            raise ValueError(
                "router cannot learn: with num_experts_per_tok=1 a token's normalised score is always 1; set "
                f"{' and '.join(f'router.{name}=False' for name in constant)}, or freeze the router's weights"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder language model: pre-norm blocks of grouped-query attention and an MLP, MoE or dense.

    ``qk_norm`` selects the Hugging Face architecture to which the weights map one to one: queries and keys are
    normalised over each "head" (Qwen3-MoE), over all heads at once ("full", OLMoE), or not ("none", Mixtral).
    With ``moe=None`` every block is dense; otherwise the blocks whose indices are in ``dense_layers`` are. Dense blocks
    have the width ``dense_intermediate_size``.

    Raises:
        ValueError: a size is out of range, or two contradict each other; the message names them.

    Examples:
        >>> moe = tilemoe.MoEConfig(64, 32, num_experts=8, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(256, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        ...                              max_seq_len=128, moe=moe, dense_layers=(0,), dense_intermediate_size=128)
        >>> config.is_moe_layer(0), config.is_moe_layer(1)
        (False, True)
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    moe: MoEConfig | None = None
    dense_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    qk_norm: Literal["head", "full", "none"] = "head"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_seq_len")
        require_fields("model.", self, at_least=dict.fromkeys(sizes, 1), positive=("rope_theta", "norm_eps"))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model.num_kv_heads ({self.num_kv_heads}) must divide model.num_heads ({self.num_heads})")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even for rotary embeddings, got {self.head_dim}")
        self._validate_blocks()

    def _validate_blocks(self) -> None:
        if self.moe is not None and not isinstance(self.moe, MoEConfig):
            raise ValueError(f"model.moe must be a MoEConfig or None, got {type(self.moe).__name__}")
        if self.moe is not None and self.moe.hidden_size != self.hidden_size:
            raise ValueError(
                f"model.moe.hidden_size ({self.moe.hidden_size}) must equal model.hidden_size ({self.hidden_size})"
            )
        if not isinstance(self.dense_layers, tuple):
            raise ValueError(f"model.dense_layers must be a tuple of layer numbers, got {shown(self.dense_layers)}")
        for layer in self.dense_layers:
            require_int("model.dense_layers: each layer", layer, 0)
            if layer >= self.num_layers:
                raise ValueError(f"model.dense_layers names {layer}, but layers run from 0 to {self.num_layers - 1}")
        if self.num_dense_layers and not self.dense_intermediate_size:
            raise ValueError(
                "model.dense_intermediate_size must be > 0 when a block is dense (moe=None or dense_layers)"
            )

    @property
    def num_dense_layers(self) -> int:
        """The number of dense blocks; all of them without ``moe``."""
        return self.num_layers if self.moe is None else len(set(self.dense_layers))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the block with index ``layer``, counted from 0, has experts."""
        return self.moe is not None and layer not in self.dense_layers


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes of a job share one model: there are ``replicate * shard * expert``, each with its own tokens.

    Attributes:
        replicate: number of copies of the model (HSDP).
        shard: processes over which FSDP shards each copy; 0 means the number of processes / (replicate * expert).
        expert: number of expert-parallel processes that divide each layer's experts; their ranks are consecutive. All
            other parameters are sharded over these processes, too.
        param_dtype: dtype in which FSDP gathers parameters and blocks compute; None: the dtype of the parameters. The
            optimiser's parameters keep their own dtype in either case.
        reduce_dtype: dtype in which gradients are summed; None: ``param_dtype``.
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again in backward.
        between_micro_batches: what each process keeps unsharded between the micro-batches of a step: "nothing";
            "weights", which are then gathered once per step; or "weights_and_gradients": the gradients are also kept,
            in ``reduce_dtype``, and reduced once per step. Each process needs memory for all that it keeps; needs
            ``reshard_after_forward`` False.
        checkpointing: activation checkpointing: backward recomputes "none", each block's "attention", or each whole
            "block". With the first two, ``recompute="up_proj"`` also recomputes the experts' pre-activations; with
            "block" it would only repeat a GEMM once more, and is ignored.
        exchange: how tokens reach the experts of other processes: "collective", by ``all_to_all_single``; "symmetric",
            by reading the memory of the other GPUs of one host; or "auto", "symmetric" where it is possible. With
            "symmetric" a process has room for a fixed number of rows; a step that needs more is repeated with more.
        keep_received: with "symmetric", keep the received tokens until the backward, which otherwise pulls them from
            the other processes again.

    Raises:
        ValueError: a setting is out of range, or two contradict each other; the message names them.

    Examples:
        >>> model = tilemoe.model_preset("qwen3-30b-a3b")
        >>> tilemoe.ParallelConfig(expert=2).for_job(8, model).shard  # as many as the others leave
        4
    """

    replicate: int = 1
    shard: int = 0
    expert: int = 1
    param_dtype: Literal["bfloat16", "float32"] | None = "bfloat16"
    reduce_dtype: Literal["bfloat16", "float32"] | None = "float32"
    reshard_after_forward: bool = True
    between_micro_batches: Kept = "nothing"
    checkpointing: Checkpointing = "none"
    exchange: Exchange = "auto"
    keep_received: bool = False

    def __post_init__(self) -> None:
        require_fields("parallel.", self, at_least={"replicate": 1, "expert": 1})
        if self.between_micro_batches != "nothing" and self.reshard_after_forward:
            raise ValueError(
                f"parallel.between_micro_batches is {self.between_micro_batches!r}, which keeps weights gathered, but "
                "parallel.reshard_after_forward frees them; set the latter to False"
            )

    def for_job(self, world_size: int, model: Any) -> ParallelConfig:
        """A copy with ``shard`` filled in, for a job of ``world_size`` processes. ``model``: a config that has ``moe``.

        ValueError: the sizes' product cannot be ``world_size``, or ``expert`` does not divide the model's experts.
        """
        given = self.replicate * self.expert * max(1, self.shard)
        sizes = f"replicate {self.replicate} x shard {self.shard or 'any'} x expert {self.expert}"
        if given > world_size:
            raise ValueError(
                f"parallel: {sizes} needs {given} processes and the job has {world_size}; "
                f"start it with torchrun --nproc-per-node {given}, or lower one of them"
            )
        if world_size % given or (self.shard and given != world_size):
            raise ValueError(
                f"parallel: the job's {world_size} processes are not divided evenly by {sizes}; "
                "their product must be the number of processes (shard 0 takes what is left)"
            )
        if self.expert > 1:
            if model.moe is None:
                raise ValueError("parallel.expert must be 1: the model has no experts (model.moe is None)")
            if model.moe.num_experts % self.expert:
                raise ValueError(
                    f"parallel.expert ({self.expert}) must divide model.moe.num_experts ({model.moe.num_experts})"
                )
        return dataclasses.replace(self, shard=world_size // (self.replicate * self.expert))


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as nested dicts of JSON values; the inverse of ``from_dict``."""
    return dataclasses.asdict(
        config, dict_factory=lambda items: {k: list(v) if isinstance(v, tuple) else v for k, v in items}
    )


def from_dict(cls: type, data: Mapping[str, Any], where: str = "") -> Any:
    """Build the config dataclass ``cls`` from nested dicts; ValueError names a key that is unknown or missing."""
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{where.rstrip('.') or cls.__name__}: expected a table of settings, got {type(data).__name__}"
        )
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(f"{where}{unknown[0]}: no such setting of {cls.__name__}; it has {', '.join(known)}")
    if cls is ModelConfig and "hidden_size" in data and isinstance(data.get("moe"), Mapping):  # experts' default
        data = {**data, "moe": {"hidden_size": data["hidden_size"], **data["moe"]}}
    required = (f.name for f in known.values() if f.default is f.default_factory is dataclasses.MISSING)
    missing = [name for name in required if name not in data]
    if missing:
        raise ValueError(f"{where}{missing[0]}: required by {cls.__name__} and not given")
    hints = get_type_hints(cls)
    return cls(**{key: _typed(hints[key], value, f"{where}{key}.") for key, value in data.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    """``value`` converted to ``hint``: dicts to dataclasses, lists to tuples; the dataclasses validate the rest."""
    nested = [t for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)]
    if nested and (value is not None or type(None) not in get_args(hint)):
        names = set(value) if isinstance(value, Mapping) else set()  # of several, take the first that has all
        fitting = (t for t in nested if names <= {f.name for f in dataclasses.fields(t)})
        return from_dict(next(fitting, nested[0]), value, where)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and not isinstance(value, (list, tuple)):
        raise ValueError(f"{where.rstrip('.')}: expected a list, got {value!r}")
    if isinstance(value, float) and value.is_integer() and int in (hint, *get_args(hint)):
        return int(value)  # 1e3 is read as a float
    return tuple(value) if isinstance(value, list) else value

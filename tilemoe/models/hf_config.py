"""config.json of Hugging Face's Qwen3-MoE, OLMoE or Mixtral from a `ModelConfig`, and back. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from tilemoe.checks import shown
from tilemoe.config import ModelConfig, MoEConfig, RouterConfig

Number = TypeVar("Number", int, float)
_MOST_LAYERS = 100_000
IN_BF16 = "give the model in bf16, or as transformers dequantises it (model.dequantize()) and saves it"


@dataclass(frozen=True)
class Architecture:
    """One of Hugging Face's model classes: the ``qk_norm`` of its decoder, and what is specific to its files.

    ``mlp``, ``gate``, ``up`` and ``down`` are names of weights in the hub's checkpoints; ``expert_width`` and
    ``num_experts`` are settings of config.json. The rest are the class' defaults of settings that it may leave out.
    """

    model_type: str
    class_name: str
    qk_norm: Literal["head", "full", "none"]
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    expert_width: str = "intermediate_size"
    num_experts: str = "num_experts"
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    aux_loss_coef: float = 0.001


_QWEN3 = Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "head", expert_width="moe_intermediate_size", norm_eps=1e-6)
_OLMOE = Architecture("olmoe", "OlmoeForCausalLM", "full", aux_loss_coef=0.01)
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    "none",
    mlp="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    num_experts="num_local_experts",
    rope_theta=1_000_000.0,
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({a.qk_norm: a for a in (_QWEN3, _OLMOE, _MIXTRAL)})


def hf_config_dict(config: ModelConfig) -> dict[str, Any]:
    """The contents of config.json for ``config``: of Qwen3-MoE, OLMoE or Mixtral, as its ``qk_norm`` says.

    Raises:
        ValueError: that architecture has no place for a setting that changes what the model computes; the message
            names it.
    """
    architecture = ARCHITECTURES[config.qk_norm]
    # config.json needs sizes of experts even if no layer has any.
    moe = config.moe or MoEConfig(config.hidden_size, config.dense_intermediate_size, 1, 1)
    _require_expressible(architecture, config, moe)
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # Both spellings: transformers before 5 reads only the first, later releases write the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_dropout": 0.0,
        "use_cache": True,
        architecture.expert_width: moe.intermediate_size,
        architecture.num_experts: moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "router_aux_loss_coef": moe.router.aux_loss_coef,
        "output_router_logits": moe.router.add_aux_loss and moe.router.aux_loss_coef > 0,
        **_settings_of_its_own(architecture, config, moe),
    }


def _settings_of_its_own(architecture: Architecture, config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    if architecture.model_type == "mixtral":
        return {"sliding_window": None, "router_jitter_noise": 0.0}
    # A softmax over the kept logits is the softmax over all, divided by the kept ones' sum.
    settings: dict[str, Any] = {"attention_bias": False, "norm_topk_prob": _is_normalised(moe)}
    if architecture.model_type == "olmoe":
        return settings | {"clip_qkv": None}
    return settings | {
        "intermediate_size": config.dense_intermediate_size or moe.intermediate_size,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(set(config.dense_layers if config.moe else range(config.num_layers))),
    }


def _is_normalised(moe: MoEConfig) -> bool:
    return moe.router.normalize or moe.router.softmax_after_topk


class Unimplemented(ValueError):
    """A setting of config.json that `DecoderLM` does not implement, while transformers may."""


def config_from_hf(data: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Qwen3-MoE, OLMoE or Mixtral config.json, read into a dict.

    Raises:
        Unimplemented: `DecoderLM` does not implement the architecture or one of its settings.
        ValueError: a setting is missing or malformed.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"config.json must hold a table of settings, got {type(data).__name__}")
    known = {architecture.model_type: architecture for architecture in ARCHITECTURES.values()}
    architecture = known.get(str(data.get("model_type")))
    if architecture is None:
        names, kind = ", ".join(map(repr, known)), data.get("model_type")
        error = Unimplemented if isinstance(kind, str) else ValueError
        raise error(f"config.json: model_type must be one of {names}; got {kind!r}")
    if quantization := data.get("quantization_config"):
        method = quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
        raise ValueError(f"config.json: quantization_config is of {shown(method)}, not implemented; {IN_BF16}")
    rope = _rope(data)
    implemented = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "clip_qkv": None}
    if architecture.model_type == "mixtral":  # others may have a number here, which they do not use
        implemented |= {"sliding_window": None}
    for name, value in implemented.items():
        if data.get(name, value) != value:
            raise Unimplemented(f"config.json: {name} must be {value!r}, got {data[name]!r}; no other is implemented")
    _require_no_noise(data, architecture)
    layers = num_layers(data)
    dense = layers_without_experts(data, layers) if architecture.model_type == "qwen3_moe" else ()
    heads, width = number(data, "num_attention_heads", int), number(data, "hidden_size", int)
    std = number(data, "initializer_range", float, 0.02)
    return ModelConfig(
        vocab_size=number(data, "vocab_size", int),
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number(data, "num_key_value_heads", int, heads),
        head_dim=number(data, "head_dim", int, width // max(heads, 1)),
        max_seq_len=number(data, "max_position_embeddings", int),
        moe=None if len(dense) == layers else _moe_from_hf(data, architecture, width, std),
        dense_intermediate_size=number(data, "intermediate_size", int) if dense else 0,
        dense_layers=() if len(dense) == layers else dense,
        rope_theta=number(rope, "rope_theta", float, architecture.rope_theta),
        norm_eps=number(data, "rms_norm_eps", float, architecture.norm_eps),
        tie_embeddings=flag(data, "tie_word_embeddings"),
        initializer_range=std,
        qk_norm=architecture.qk_norm,
    )


def _require_no_noise(data: Mapping[str, Any], architecture: Architecture) -> None:
    """ValueError if a setting makes transformers' model draw random numbers in training.

    It must be 0 even for a model that is only evaluated, because reading does not know what the model is for.
    """
    for name in ("attention_dropout", *(("router_jitter_noise",) if architecture.model_type == "mixtral" else ())):
        amount = number(data, name, float, 0.0)
        if amount != 0:
            raise ValueError(
                f"config.json: {name} must be 0, got {amount}; it is not implemented, so set it to 0 in config.json"
            )


def _moe_from_hf(data: Mapping[str, Any], architecture: Architecture, width: int, std: float) -> MoEConfig:
    # Saved by some releases under the second name, which is an alias of the first.
    experts = "num_experts" if data.get("num_local_experts") is None else "num_local_experts"
    coefficient = number(data, "router_aux_loss_coef", float, architecture.aux_loss_coef)
    return MoEConfig(
        hidden_size=width,
        intermediate_size=number(data, architecture.expert_width, int),
        num_experts=number(data, experts, int),
        num_experts_per_tok=number(data, "num_experts_per_tok", int),
        router=RouterConfig(
            normalize=architecture.model_type == "mixtral" or flag(data, "norm_topk_prob"),
            aux_loss_coef=coefficient,
            aux_loss_over="model",
            add_aux_loss=flag(data, "output_router_logits") or coefficient == 0,
        ),
        initializer_range=std,
    )


def _rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in either spelling, as one table."""
    rope = {"rope_theta": data["rope_theta"]} if "rope_theta" in data else {}
    for name in ("rope_scaling", "rope_parameters"):
        more = data.get(name) or {}
        if not isinstance(more, Mapping):
            raise ValueError(f"config.json: {name} must be a table of settings or null, got {more!r}")
        rope |= more
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise Unimplemented(f"config.json: rope_type must be 'default', got {kind!r}; no other is implemented")
    return rope


def import_line(config: Any) -> str | None:
    """A note that training adds no auxiliary loss; None if it adds one, or if the model has none."""
    if config.moe is None or config.moe.router.add_aux_loss or not config.moe.router.aux_loss_coef:
        return None
    return (
        "training adds no auxiliary loss, as in transformers, whose output_router_logits is false for this model; set "
        f"moe.router.add_aux_loss (--model.moe.router.add-aux-loss) to add {config.moe.router.aux_loss_coef:g} times it"
    )


def export_line(config: ModelConfig) -> str | None:
    """A note on how transformers' auxiliary loss differs from the one in training here; None if it does not."""
    router = RouterConfig() if config.moe is None else config.moe.router
    summed = config.num_layers - config.num_dense_layers if router.aux_loss_over == "layer" else 1
    if not router.z_loss_coef and (summed == 1 or not router.aux_loss_coef):
        return None
    return (
        "transformers trains it otherwise: with one balancing loss of all layers, not their sum, and without z-loss; "
        f"router_aux_loss_coef {summed * router.aux_loss_coef:g} in config.json is about as strong"
    )


def num_layers(data: Mapping[str, Any]) -> int:
    """The number of layers. ValueError: none, or so many that a loop over them would take forever."""
    layers = number(data, "num_hidden_layers", int)
    if not 1 <= layers <= _MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers must be at most {_MOST_LAYERS} and at least 1")
    return layers


def layers_without_experts(data: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The dense layers of Qwen's families: those in mlp_only_layers, and those that decoder_sparse_step skips."""
    step, listed = number(data, "decoder_sparse_step", int, 1), layer_numbers(data, "mlp_only_layers")
    return tuple(layer for layer in range(layers) if layer in listed or step == 0 or (layer + 1) % step)


def layer_numbers(data: Mapping[str, Any], name: str) -> frozenset[int]:
    """The layers that the setting ``name`` lists; none if it is absent or null."""
    listed = [] if data.get(name) is None else data[name]
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ValueError(f"config.json: {name} must be a list of layers, got {shown(listed)}")
    return frozenset(listed)


def flag(data: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """The setting ``name``; ``default`` if it is absent or null."""
    value = default if data.get(name) is None else data[name]
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, got {shown(value)}")
    return value


def number(data: Mapping[str, Any], name: str, kind: Callable[[Any], Number], default: Number | None = None) -> Number:
    """The setting ``name``; ``default`` if it is absent or null, as transformers writes an unset one."""
    value = default if data.get(name) is None else data[name]
    if value is None:
        raise ValueError(f"config.json: {name} is missing")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < 1e308:  # NaN, infinity, an integer too large for a float
        raise ValueError(f"config.json: {name} must be a number, got {shown(value)}")
    if kind is int and value % 1:
        raise ValueError(f"config.json: {name} must be an integer, got {shown(value)}")
    return kind(value)


def _require_expressible(architecture: Architecture, config: ModelConfig, moe: MoEConfig) -> None:
    router = moe.router
    required = [
        ("moe.activation", moe.activation, "swiglu"),
        ("moe.expert_bias", moe.expert_bias, False),
        ("moe.shared_intermediate_size", moe.shared_intermediate_size, 0),
        ("moe.router.score", router.score, "softmax"),
        ("moe.router.scale", router.scale, 1.0),
        ("moe.router.selection_bias", router.selection_bias, False),
        ("moe.router.bias", router.bias, False),
        ("moe.router.num_groups", router.num_groups, 1),
    ]
    if architecture.model_type != "qwen3_moe":
        required.append(("the number of dense layers", config.num_dense_layers, 0))
    if architecture.model_type == "mixtral":
        required.append(("moe.router.normalize", _is_normalised(moe), True))
    if architecture.model_type == "olmoe":
        required.append(("head_dim", config.head_dim, config.hidden_size // config.num_heads))
    for name, value, wanted in required:
        if value != wanted:
            raise ValueError(
                f"{name}={value!r} has no place in {architecture.class_name}; only {wanted!r} can be exported"
            )


# Names of the experts' sizes in models of transformers; the first that is present is used.
_SPELLINGS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "hidden_size": ("hidden_size", "d_model"),
        "intermediate_size": (
            "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size",
        ),
        "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "num_experts_per_tok": (
            "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
        ),
    }
)  # fmt: skip


def layer_from_hf(data: Mapping[str, Any]) -> MoEConfig:
    """Sizes of the routed experts in any model's config.json; `DecoderLM` need not implement the model.

    If the model has several parts, the text model's. ValueError: there are no experts, or a size is missing or invalid.
    """
    text = data.get("text_config", data) if isinstance(data, Mapping) else data
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json must hold a table of settings, got {type(text).__name__}")
    if isinstance(text.get("ffn_config"), Mapping):  # DBRX's
        text = {**text["ffn_config"], "hidden_size": None, **text}
    if not any(text.get(name) for name in _SPELLINGS["num_experts"]):
        raise ValueError(f"config.json: no experts, which are one of {', '.join(_SPELLINGS['num_experts'])}")
    sizes: dict[str, Any] = {size: _first(text, names) for size, names in _SPELLINGS.items()}
    activation = text.get("mlp_hidden_act", text.get("hidden_act"))
    return MoEConfig(
        activation="relu2" if activation == "relu2" else "swiglu",  # only Nemotron's has no gate
        **sizes,
    )


def _first(data: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first of ``names`` that is present; of a list with a number per layer, the one that all layers share."""
    given = next((name for name in names if data.get(name) is not None), names[0])
    value = data.get(given)
    if isinstance(value, list) and value:
        if any(each != value[0] for each in value):
            raise ValueError(f"config.json: {given} differs from layer to layer, {shown(value)}; give the sizes of one")
        return number({given: value[0]}, given, int)
    return number(data, given, int)

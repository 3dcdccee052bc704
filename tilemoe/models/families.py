"""Sizes of whole models of transformers' mixture-of-experts families, from their config.json. Imports no torch.

`DecoderLM` implements fewer families. The number of parameters is that of each family's class in transformers, which
the tests build; like these classes, it leaves out layers for multi-token prediction.

d model width · H, H_kv heads · n intermediate_size · E experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.models.hf_config import flag, layer_from_hf, layer_numbers, layers_without_experts, num_layers, number
from tilemoe.models.sizes import Mixer, ModelSizes, attention_mixer

Settings = Mapping[str, Any]
_MOST = 1 << 31  # of any size
_DENSE_WIDTH = MappingProxyType({"llama4_text": "intermediate_size_mlp"})
_ONE_SHARED = ("hunyuan_v1_moe", "llama4_text")  # one shared expert, as wide as a routed one


def sizes_from_hf(data: Settings) -> ModelSizes:
    """The sizes of the model of a config.json, read into a dict; if it has several parts, the text model's.

    Raises:
        ValueError: another family, a missing setting, or one that transformers' class does not have.
    """
    text = data.get("text_config", data) if isinstance(data, Mapping) else data
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json must hold a table of settings, got {type(text).__name__}")
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None:
        names = ", ".join(map(repr, FAMILIES))
        raise ValueError(f"config.json: model_type must be one of {names}; got {text.get('model_type')!r}")
    layers = num_layers(text)
    dense = _dense_layers(text, layers)
    mixers = family(text, layers)
    return ModelSizes(
        vocab_size=_size(text, "vocab_size"),
        hidden_size=_size(text, "hidden_size"),
        max_seq_len=_size(text, "max_position_embeddings"),
        mixers=tuple((mixers.count(mixer), mixer) for mixer in dict.fromkeys(mixers)),
        moe=None if dense == layers else _experts(text),
        num_dense_layers=dense,
        dense_intermediate_size=_size(text, _DENSE_WIDTH.get(text["model_type"], "intermediate_size")) if dense else 0,
        tie_embeddings=flag(text, "tie_word_embeddings"),
        vectors=_vectors(text, layers - dense),
    )


def _experts(data: Settings) -> MoEConfig:
    layer, kind = layer_from_hf(data), data["model_type"]
    shared = data.get("shared_expert_intermediate_size") or data.get("shared_intermediate_size")
    many = "moe_num_shared_experts" if kind == "ernie4_5_moe" else "n_shared_experts"
    if kind in _ONE_SHARED or data.get(many):  # each of a routed expert's width
        shared = layer.intermediate_size * (1 if kind in _ONE_SHARED else _size(data, many))
    return replace(
        layer,
        shared_intermediate_size=_size({"shared": shared}, "shared") if shared else 0,
        shared_gate=bool(shared) and kind in ("qwen2_moe", "qwen3_next"),
        expert_bias=kind == "gpt_oss",
        router=RouterConfig(bias=kind == "gpt_oss"),
    )


def _vectors(data: Settings, moe_layers: int) -> int:
    """`ModelSizes.vectors`: Phi-MoE's last norm and head have biases; Ernie's balancing biases are parameters."""
    if data["model_type"] == "phimoe":
        return _size(data, "hidden_size") + (_size(data, "vocab_size") if flag(data, "lm_head_bias") else 0)
    return moe_layers * _size(data, "moe_num_experts") if data["model_type"] == "ernie4_5_moe" else 0


def _dense_layers(data: Settings, layers: int) -> int:
    """Number of layers with an MLP instead of experts: the first few, or those that are listed or that a step skips."""
    kind, kinds = data["model_type"], data.get("mlp_layer_types")
    if kinds is not None:
        return _of_names(data, "mlp_layer_types", layers, ("dense", "sparse")).count("dense")
    if kind == "llama4_text":
        step = _size(data, "interleave_moe_layer_step", 1)
        every = range(step - 1, layers, step)
        with_experts = every if data.get("moe_layers") is None else layer_numbers(data, "moe_layers")
        return sum(layer not in with_experts for layer in range(layers))
    if kind == "ernie4_5_moe":
        first, last = number(data, "moe_layer_start_index", int, 1), number(data, "moe_layer_end_index", int, -1)
        step = _size(data, "moe_layer_interval", 1)
        inside = range(max(0, first), layers if last < 0 else min(layers, last + 1))
        return layers - sum((layer + 1) % step == 0 for layer in inside)
    if "first_k_dense_replace" in data:
        if number(data, "moe_layer_freq", int, 1) != 1:
            raise ValueError(
                f"config.json: moe_layer_freq must be 1, got {data['moe_layer_freq']!r}; no other is planned"
            )
        return min(layers, max(0, number(data, "first_k_dense_replace", int)))
    return len(layers_without_experts(data, layers))


def _plain(data: Settings, layers: int, *, refused: str | None = None, **settings: Any) -> list[Mixer]:
    """Mixers of Mixtral and Granite. ``refused``: a flag that is not planned; ``settings`` go to `_softmax`."""
    if refused is not None and flag(data, refused):
        raise ValueError(f"config.json: {refused} must be False, got True; no other is planned")
    sliding = data.get("sliding_window") if data["model_type"] in ("mixtral", "phimoe") else None
    window = None if sliding is None else _size(data, "sliding_window")
    biased = flag(data, "attention_bias")
    return [_softmax(data, **{"qkv_bias": biased, "o_bias": biased, **settings}, window=window)] * layers


def _qwen2(data: Settings, layers: int) -> list[Mixer]:
    return _plain(data, layers, refused="use_sliding_window", qkv_bias=flag(data, "qkv_bias", True), o_bias=False)


def _phimoe(data: Settings, layers: int) -> list[Mixer]:
    """Phi-MoE's norms have biases."""
    return _plain(data, layers, more=2 * _size(data, "hidden_size"))


def _llama4(data: Settings, layers: int) -> list[Mixer]:
    """Every fourth layer sees all keys; the others see a chunk's, and normalise queries and keys without weights."""
    every = _size(data, "no_rope_layer_interval", 4)
    names = ("chunked_attention", "full_attention")
    kinds = _layer_types(data, layers, names, lambda layer: (layer + 1) % every == 0)
    full = _plain(data, 1)[0]
    normed = _softmax(data, qkv_bias=False, o_bias=False, norms="head").kept if flag(data, "use_qk_norm", True) else 0
    chunked = replace(full, kept=max(full.kept, normed), chunk=_size(data, "attention_chunk_size", 8192))
    return [full if kind == "full_attention" else chunked for kind in kinds]


def _glm4(data: Settings, layers: int) -> list[Mixer]:
    return _plain(data, layers, norms="head" if flag(data, "use_qk_norm") else "none", o_bias=False)


def _gpt_oss(data: Settings, layers: int) -> list[Mixer]:
    """Every other layer, the first among them, sees a window of keys. Each head has a logit for attending to no key."""
    kinds = _layer_types(data, layers, ("sliding_attention", "full_attention"), lambda layer: layer % 2)
    biased = flag(data, "attention_bias", True)
    heads = _size(data, "num_attention_heads")
    full = replace(_softmax(data, qkv_bias=biased, o_bias=biased, more=heads), scores=heads)
    return [full if kind == "full_attention" else replace(full, window=_size(data, "sliding_window")) for kind in kinds]


def _qwen3_next(data: Settings, layers: int) -> list[Mixer]:
    """Every fourth layer is attention, whose queries have a gate as wide as they are; the others are a delta rule."""
    every = _size(data, "full_attention_interval", 4)
    names = ("linear_attention", "full_attention")
    kinds = _layer_types(data, layers, names, lambda layer: (layer + 1) % every == 0)
    biased = flag(data, "attention_bias")
    full = _softmax(data, qkv_bias=biased, o_bias=biased, norms="head")
    gate = _size(data, "num_attention_heads") * _head_dim(data)
    full = replace(
        full,
        matrices=full.matrices + _size(data, "hidden_size") * gate,
        vectors=full.vectors + (gate if biased else 0),
        kept=full.kept + 2 * gate,  # the gate, and the output before it is gated
    )
    linear = _delta_rule(data) if "linear_attention" in kinds else full
    return [full if kind == "full_attention" else linear for kind in kinds]


def _softmax(
    data: Settings, *, qkv_bias: bool, o_bias: bool, norms: str = "none", more: int = 0, window: int | None = None
) -> Mixer:
    """Attention of H heads on H_kv; ``norms`` of queries and keys: per "head", over all heads ("full"), or "none"."""
    d, heads = _size(data, "hidden_size"), _size(data, "num_attention_heads")
    kv_heads, width = _size(data, "num_key_value_heads", heads), _head_dim(data)
    biases = (heads + 2 * kv_heads) * width * qkv_bias + d * o_bias
    normed = {"head": 2, "full": heads + kv_heads, "none": 0}[norms] * width
    return attention_mixer(
        d, heads, kv_heads, width, vectors=biases + normed + more, normed=norms != "none", window=window
    )


def _latent(data: Settings, layers: int) -> list[Mixer]:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): a narrow latent gives keys and values, and another
    may give the queries.

    Saved are the latents before and after their norms, and every head's queries, keys, values and output, the output
    both before and after the heads are transposed.
    """
    d, heads, rope = (_size(data, name) for name in ("hidden_size", "num_attention_heads", "qk_rope_head_dim"))
    qk, values = _size(data, "qk_nope_head_dim") + rope, _size(data, "v_head_dim")
    latent, queries = _size(data, "kv_lora_rank"), data.get("q_lora_rank")
    q_latent = 0 if queries is None else _size(data, "q_lora_rank")
    to_queries = (d + heads * qk) * q_latent if q_latent else d * heads * qk
    to_values = d * (latent + rope) + latent * heads * (qk - rope + values)
    biases = (q_latent + latent + rope + d) if flag(data, "attention_bias") else 0
    mixer = Mixer(
        matrices=to_queries + to_values + heads * values * d,
        vectors=q_latent + latent + biases,
        products=heads * (qk + values),
        kept=2 * q_latent + 2 * latent + rope + heads * (2 * qk + 3 * values),
        kept_fp32=heads,
    )
    return [mixer] * layers


def _delta_rule(data: Settings) -> Mixer:
    """The gated delta rule (arXiv 2412.06464) after a short convolution, with a state of d_k x d_v for each head.

    A token decays and reads the state, adds to it, and reads it again. Saved are the projected, the convolved and the
    normalised tensors, and the output before and after its gate; the kernels recompute the states.
    """
    d = _size(data, "hidden_size")
    key_width, value_width = _size(data, "linear_key_head_dim", 128), _size(data, "linear_value_head_dim", 128)
    key_heads, heads = _size(data, "linear_num_key_heads", 16), _size(data, "linear_num_value_heads", 32)
    keys, values = key_heads * key_width, heads * value_width
    convolved, taps = 2 * keys + values, _size(data, "linear_conv_kernel_dim", 4)
    return Mixer(
        matrices=d * (2 * keys + 2 * values + 2 * heads) + values * d,
        vectors=convolved * taps + 2 * heads + value_width,
        products=0,
        kept=2 * keys + 2 * values + convolved + 2 * heads * key_width + 2 * values,
        kept_fp32=2 * heads,
        per_token=convolved * taps + 3 * heads * key_width * value_width,
    )


FAMILIES: Mapping[str, Callable[[Settings, int], list[Mixer]]] = MappingProxyType(
    {
        "qwen2_moe": _qwen2,
        "qwen3_moe": partial(_plain, refused="use_sliding_window", norms="head"),
        "qwen3_next": _qwen3_next,
        "mixtral": _plain,
        "olmoe": partial(_plain, norms="full"),
        "deepseek_v2": _latent,
        "deepseek_v3": _latent,
        "kimi_k2": _latent,  # DeepSeek-V3's class, other sizes
        "glm4_moe": _glm4,
        "glm4_moe_lite": _latent,
        "gpt_oss": _gpt_oss,
        "granitemoe": _plain,
        "granitemoeshared": _plain,
        "phimoe": _phimoe,
        "ernie4_5_moe": partial(_plain, refused="use_bias", qkv_bias=False, o_bias=False),
        "hunyuan_v1_moe": partial(_plain, norms="head"),
        "minimax_m2": partial(_plain, norms="full", qkv_bias=False, o_bias=False),
        "llama4_text": _llama4,
    }
)


def _layer_types(
    data: Settings, layers: int, names: Sequence[str], is_second: Callable[[int], bool | int]
) -> list[str]:
    """Each layer's type: as config.json lists them, or else names[1] where ``is_second(layer)``, elsewhere names[0]."""
    if data.get("layer_types") is None:
        return [names[1] if is_second(layer) else names[0] for layer in range(layers)]
    return _of_names(data, "layer_types", layers, names)


def _of_names(data: Settings, setting: str, layers: int, names: Sequence[str]) -> list[str]:
    kinds = data[setting]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in names for kind in kinds):
        raise ValueError(f"config.json: {setting} must be a list of {layers} of {', '.join(map(repr, names))}")
    return kinds


def _head_dim(data: Settings) -> int:
    default = _size(data, "hidden_size") // _size(data, "num_attention_heads")
    return _size(data, "head_dim", 256 if data["model_type"] == "qwen3_next" else default)


def _size(data: Settings, name: str, default: int | None = None) -> int:
    value = number(data, name, int, default)
    if not 1 <= value < _MOST:
        raise ValueError(f"config.json: {name} must be >= 1 and below 2**31, got {value}")
    return value

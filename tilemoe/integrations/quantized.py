"""transformers' quantizer "tilemoe": `from_pretrained` quantises experts to 4 bit while reading, or reads 4-bit ones.

E experts · p, q the last two dimensions of a weight, as its module has it

Each layer's weights are merged by transformers' own converters, quantised, and freed before the next layer is read.
A folder stores a weight ``down_proj`` in NF4 as the tensors ``down_proj_codes`` and ``down_proj_absmax``, and in MXFP4
as ``down_proj_blocks`` and ``down_proj_scales``. So do gpt-oss's own folders, which are read without dequantising.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.integrations.bitsandbytes import Bnb4bitDeserialize
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import Mxfp4Config, QuantizationConfigMixin

from tilemoe.checks import require_choice, require_type, shown
from tilemoe.integrations.quantized_weight import (
    UNCOMPILED,
    FrozenWeight,
    check_quantizable,
    loaded,
    make_dense,
    quantize_weight,
    saved,
    saved_names,
    weight_names,
)
from tilemoe.integrations.transformers import NAME, experts_modules, hf_models, is_experts_module, use
from tilemoe.kernels.experts.formats.mxfp4 import Mxfp4Weight
from tilemoe.kernels.experts.table import STORAGES

_END = r"(?!\w)"  # regular expression: a name ends here
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel looks


class TilemoeConfig(QuantizationConfigMixin):
    """``quantization_config=`` of `from_pretrained`: experts in 4 bit, computed by tilemoe.

    ``experts``: "nf4"; "nf4_double", whose scales are quantised, too; or "mxfp4", which also reads gpt-oss's own
    folders. ``linear``: transformers' BitsAndBytesConfig(load_in_4bit=True, ...), or its dict, for the linear layers
    beside the experts (attention, dense and shared experts); None leaves them as they are. The head and the routers
    always stay as they are. The constructor registers the quantizer.

    Raises:
        ValueError: ``experts`` is none of these, ``linear`` is another kind of setting, or another argument is given.

    Examples:
        >>> from tilemoe.integrations.quantized import TilemoeConfig
        >>> TilemoeConfig("nf4").to_dict()
        {'quant_method': 'tilemoe', 'experts': 'nf4', 'linear': None}
    """

    def __new__(cls, experts: str = "nf4", *_: Any, **__: Any) -> TilemoeConfig:
        return super().__new__(_OfMxfp4 if experts == Mxfp4Weight.name else cls)

    def __init__(self, experts: str = "nf4", linear: Any = None, **more: Any) -> None:
        more.pop("quant_method", None)  # a saved config has it
        if more:
            raise ValueError(f"TilemoeConfig takes experts and linear, got {shown(next(iter(more)))} too; leave it out")
        require_choice("experts", experts, tuple(STORAGES))
        if isinstance(linear, dict):
            linear = BitsAndBytesConfig.from_dict(linear)
        if linear is not None and not (isinstance(linear, BitsAndBytesConfig) and linear.load_in_4bit):
            raise ValueError(f"linear must be None or BitsAndBytesConfig(load_in_4bit=True), got {shown(linear)}")
        self.quant_method, self.experts, self.linear = NAME, experts, linear
        register_quantizer()

    def to_dict(self) -> dict[str, Any]:
        linear = self.linear and self.linear.to_dict()
        return {"quant_method": self.quant_method, "experts": self.experts, "linear": linear}


class _OfMxfp4(TilemoeConfig, Mxfp4Config):
    """A `TilemoeConfig` for gpt-oss's own folders, whose config.json says MXFP4. transformers compares the class names
    of the given and the stored configuration, so this class takes the name Mxfp4Config. transformers then copies the
    attributes below, and our quantizer reads the weights.
    """

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "experts": self.experts, "linear": self.linear}


_OfMxfp4.__name__ = Mxfp4Config.__name__


def register_quantizer() -> None:
    """Let transformers load folders of experts in 4 bit, until `unregister`. Idempotent.

    Examples:
        >>> from tilemoe.integrations.quantized import register_quantizer
        >>> register_quantizer()
    """
    AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = TilemoeConfig
    AUTO_QUANTIZER_MAPPING[NAME] = TilemoeQuantizer


def quantize_experts(model: nn.Module, storage: str = "nf4") -> int:
    """Store the experts of ``model`` in 4 bit, in place and frozen; returns the number of its MoE layers.

    ``model`` is a transformers model, bare or wrapped by PEFT, on any device. From then on tilemoe computes its experts
    (`tilemoe.integrations.transformers.use`). Weights are quantised one at a time, so that memory holds at most one
    besides the model. The model then saves and loads like one that `from_pretrained` quantised.

    Raises:
        ValueError: as for `use`; or ``storage`` is no format, or the experts have widths or a dtype (fp64) that it does
            not take, are in 4 bit already, are sharded, or are trained in full. The model is then unchanged.

    Examples:
        >>> from tilemoe.integrations.quantized import quantize_experts
        >>> from transformers import AutoModelForCausalLM, OlmoeConfig
        >>> config = OlmoeConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
        >>> quantize_experts(AutoModelForCausalLM.from_config(config))
        2
    """
    require_type("model", model, nn.Module)
    require_choice("storage", storage, tuple(STORAGES))
    modules = dict(experts_modules(model))
    for name, module in modules.items():
        check_quantizable(module, storage)
        if ".modules_to_save." in name:
            raise ValueError(
                f"PEFT trains a copy of {name} in full, which cannot be in 4 bit; leave it out of modules_to_save"
            )
    layers = use(model)
    for module in modules.values():
        module.requires_grad_(False)
        for name in weight_names(module):
            is_transposed: Any = module.is_transposed
            setattr(module, name, quantize_weight(module.get_parameter(name), storage, is_transposed))
    _mark_quantized(model, storage)
    return layers


def dequantize_experts(model: nn.Module) -> int:
    """Turn the 4-bit experts of ``model`` back into plain parameters of their dtype, in place.

    They stay frozen. Returns the number of weights. PEFT's adapters stay as they are, and
    ``model.merge_and_unload()`` can then merge them.

    Examples:
        >>> from tilemoe.integrations.quantized import dequantize_experts, quantize_experts
        >>> from transformers import AutoModelForCausalLM, OlmoeConfig
        >>> config = OlmoeConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
        >>> model = AutoModelForCausalLM.from_config(config)
        >>> layers = quantize_experts(model)
        >>> dequantize_experts(model)
        2
    """
    count = make_dense(model)
    _mark_dequantized(model)
    return count


class TilemoeQuantizer(HfQuantizer):
    """Quantises experts, and through bitsandbytes linear layers, as a `TilemoeConfig` says."""

    quantization_config: TilemoeConfig

    def __init__(self, quantization_config: TilemoeConfig, **kwargs: Any) -> None:
        linear = copy.deepcopy(quantization_config.linear)  # each model adds its own modules to skip
        super().__init__(TilemoeConfig(quantization_config.experts, linear), **kwargs)
        self.linear = None if linear is None else Bnb4BitHfQuantizer(linear, **kwargs)
        # gpt-oss's own folders have 4-bit experts, but plain linear layers; those are quantised after loading.
        self.linear_at_once = self.linear if isinstance(quantization_config, TilemoeConfig) else None
        self.serialized_names: dict[str, list[str]] = {}  # of the experts' weights; filled before weights are loaded

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        devices = kwargs.get("device_map")
        if isinstance(devices, dict) and "disk" in devices.values():
            raise ValueError("experts in 4 bit cannot be offloaded to disk; leave 'disk' out of device_map")
        if self.linear is not None:
            self.linear.validate_environment(*args, **kwargs)

    def update_device_map(self, device_map: Any) -> Any:
        return device_map if self.linear is None else self.linear.update_device_map(device_map)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        if _is_of_experts(model, param_name):
            return True
        linear = self.linear_at_once
        return linear is not None and linear.param_needs_quantization(model, param_name, **kwargs)

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        if _is_of_experts(model, param_name):
            return 0.5625  # bytes: NF4's 4 bits, and a 4-byte scale for 64 values; the other formats take less
        linear = self.linear_at_once
        return param.element_size() if linear is None else linear.param_element_size(model, param_name, param)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        storage = self.quantization_config.experts
        for _, module in experts_modules(model):
            check_quantizable(module, storage)
            for name in weight_names(module):
                self.serialized_names[name] = [f"{name}_{part}" for part in saved_names(storage)]
        use(model)
        if self.linear is not None:
            settings = self.linear.quantization_config
            given = settings.llm_int8_skip_modules
            skipped = self.get_modules_to_not_convert(model, given, add_default_skips=True)
            settings.llm_int8_skip_modules = sorted({*skipped, *_routers(model)})
        if self.linear_at_once is not None:
            self.linear_at_once._process_model_before_weight_loading(model, **kwargs)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """The converters that read a model saved in 4 bit; none for another model."""
        if not self.pre_quantized:
            return []
        ours = [WeightConverter(names, param, [_Join(self)]) for param, names in self.serialized_names.items()]
        return ours + ([] if self.linear_at_once is None else self.linear_at_once.get_weight_conversions())

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for name, module in experts_modules(model):
            module.requires_grad_(False)
            vars(module)[UNCOMPILED] = True
            for weight in weight_names(module):
                if not isinstance(getattr(module, weight), FrozenWeight):
                    raise ValueError(f"the folder has no weights {name}.{weight}; save or download it again")
        if self.linear is not None and self.linear_at_once is None:
            _quantize_linear(model, self.linear)
        vars(model)[_IGNORED] = _left_out_of_ddp(model)
        vars(model)["is_loaded_in_4bit"] = self.linear is not None  # by bitsandbytes: transformers imports it then

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        _fit_converters(model)
        state, names = model.state_dict(), saved_names(self.quantization_config.experts)
        for name in [name for name, value in state.items() if isinstance(value, FrozenWeight)]:
            weight: Any = state.pop(name)
            if weight.is_meta:
                weight = load_offloaded_parameter(model, name)
            for part, tensor in zip(names, saved(weight), strict=True):
                state[f"{name}_{part}"] = tensor
        return state, {}

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        make_dense(model)
        _fit_converters(model)
        return model if self.linear is None else self.linear._dequantize(model, dtype=dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Quantises an expert weight (E, p, q) after merging, and passes other weights to bitsandbytes."""

    def __init__(self, quantizer: TilemoeQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        model = kwargs["model"]
        if not all(_is_of_experts(model, name) for name in input_dict):
            assert self.hf_quantizer.linear is not None, "`param_needs_quantization` asked it"
            return self.hf_quantizer.linear.get_quantize_ops().convert(input_dict, **kwargs)
        storage = self.hf_quantizer.quantization_config.experts
        found = {}
        for name, value in input_dict.items():
            module, _ = get_module_from_name(model, name)
            found[name] = quantize_weight(value[0] if isinstance(value, list) else value, storage, module.is_transposed)
        return found


class _Join(ConversionOps):
    """Assembles a 4-bit weight from the tensors that it was saved as."""

    def __init__(self, quantizer: TilemoeQuantizer) -> None:
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        name, storage = kwargs["full_layer_name"], self.hf_quantizer.quantization_config.experts
        parts = {key.rpartition("_")[2]: value[0] for key, value in input_dict.items()}
        names = saved_names(storage)
        if missing := [part for part in names if part not in parts]:
            raise ValueError(f"the folder has no {name}_{missing[0]}; save or download it again")
        module, key = get_module_from_name(kwargs["model"], name)
        dtype = module.get_parameter(key).dtype
        return {name: loaded([parts[part] for part in names], storage, dtype, module.is_transposed)}


def _is_of_experts(model: nn.Module, name: str) -> bool:
    """Whether the parameter is a weight of an experts module."""
    module, key = get_module_from_name(model, name)
    return is_experts_module(module) and key in weight_names(module)


def _fit_converters(model: Any) -> None:
    """Have saving reverse none of the converters that read 4 bit. In releases of transformers whose converters of
    ``down_proj`` would also take ``down_proj_codes`` apart, let them match whole names, as in later ones.
    """
    conversions = getattr(model, "_weight_conversions", None)
    usual = get_model_conversion_mapping(model, add_legacy=False)
    if conversions is not None:  # made in loading
        model._weight_conversions = [each for each in conversions if not _reads_4_bit(each)]
        if len(model._weight_conversions) < len(conversions):  # there were no plain experts, so no converters of them
            model._weight_conversions += [each for each in usual if isinstance(each, WeightConverter)]
    if WeightRenaming("w", "v").compiled_sources.search("w_codes") is None:
        return
    if conversions is None:  # saving would make them
        model._weight_conversions = [each for each in usual if type(each).__name__ != "PrefixChange"]
    for each in model._weight_conversions:
        if isinstance(each, WeightConverter):
            names = each._original_target_patterns
            each._original_target_patterns = [name.removesuffix(_END) + _END for name in names]


def _routers(model: nn.Module) -> set[str]:
    """The names of the routers: the linear layers in the experts' blocks that have one output per expert."""
    found = set()
    for name, module in experts_modules(model):
        block, experts = name.rpartition(".")[0], module.get_parameter(weight_names(module)[1]).shape[0]
        for beside, each in model.get_submodule(block).named_modules():
            if isinstance(each, nn.Linear) and each.out_features == experts:
                found.add(f"{block}.{beside}")
    return found


def _left_out_of_ddp(model: nn.Module) -> list[str]:
    """The names of the 4-bit weights, bare and wrapped by PEFT, which DistributedDataParallel must not broadcast."""
    found = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, FrozenWeight):
            module, _, key = name.rpartition(".")
            wrapped = (f"{module}{'.base_layer' * wrappers}.{key}" for wrappers in range(3))
            found += [f"{prefix}{each}" for each in wrapped for prefix in ("", "base_model.model.")]
    return found


def _quantize_linear(model: nn.Module, quantizer: Bnb4BitHfQuantizer) -> None:
    """Have bitsandbytes quantise the linear layers of a model whose weights are loaded already."""
    plain = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    quantizer._process_model_before_weight_loading(model, device_map=None)
    for name, module in plain.items():
        found = model.get_submodule(name)
        if found is not module:
            weight, quantize = f"{name}.weight", quantizer.get_quantize_ops()
            found.weight = quantize.convert({weight: [module.weight.data]}, model=model, full_layer_name=weight)[weight]
            found.bias = module.bias


def _mark_quantized(model: nn.Module, storage: str) -> None:
    """Mark the transformers models in ``model`` as loaded by this quantizer, so that they save and train as such."""
    for owner in hf_models(model):
        kind = getattr(vars(owner).get("hf_quantizer"), "quantization_config", None)
        quantizer = TilemoeQuantizer(TilemoeConfig(storage, kind if isinstance(kind, BitsAndBytesConfig) else None))
        vars(owner).update(hf_quantizer=quantizer, is_quantized=True, quantization_method=NAME)
        quantizer.postprocess_model(owner)


def _mark_dequantized(model: nn.Module) -> None:
    """Undo `_mark_quantized`: only bitsandbytes' layers are left in 4 bit, and experts are saved under plain names."""
    for owner in hf_models(model):
        _fit_converters(owner)
        quantizer = vars(owner).get("hf_quantizer")
        if not isinstance(quantizer, TilemoeQuantizer):
            continue
        quantizer.remove_quantization_config(owner)
        linear = quantizer.linear
        vars(owner)["is_loaded_in_4bit"] = linear is not None
        if linear is not None:
            method = linear.quantization_config.quant_method
            vars(owner).update(hf_quantizer=linear, is_quantized=True, quantization_method=method)
            linear.postprocess_model(owner)


def _reads_4_bit(conversion: Any) -> bool:
    kinds = (_Join, Mxfp4Dequantize, Bnb4bitDeserialize)
    return any(isinstance(operation, kinds) for operation in getattr(conversion, "operations", ()))

"""Load a model of transformers' own class from a folder that is not trusted.

transformers is given settings and tensors, and opens no file itself. From a folder it would also load adapters, pickles
and files outside of it, and run attention code that the folder names on the hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tilemoe.checks import shown, told
from tilemoe.integrations import transformers as integration
from tilemoe.integrations.peft import require_peft
from tilemoe.integrations.quantized_weight import FrozenWeight
from tilemoe.kernels.experts.formats.mxfp4 import Mxfp4Weight
from tilemoe.models.folder import CONFIG_FILE, read_settings
from tilemoe.models.hf_base import HFBase
from tilemoe.models.huggingface import FLOATS, opened
from tilemoe.runtime.tensors import is_finite

DENSE = "dense"
_GENERATION_FILE = "generation_config.json"
_MOST = 1000  # layers, or entries of a list in config.json
_CALLS_PER_TENSOR, _MORE_CALLS = 20, 1000  # most calls of torch's functions to build a model; 5 per tensor were found
_VALUES_PER_BYTE, _MORE_VALUES = 2, 1 << 28  # of 4-bit weights; in buffers, which no file has
_NO_SETTINGS = (
    "attn_implementation",
    "experts_implementation",
    "transformers_weights",
    "fusion_config",
    "distributed_config",
)


@contextmanager
def readable(base: HFBase, what: str = "it cannot be loaded") -> Iterator[None]:
    """Turn what transformers raises about the folder into a ValueError of one line, except a lack of memory."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # settings of any type and size reach its classes
        raise ValueError(f"{base.folder}: {what} ({told(error)[:300]})") from error


def config_of(base: HFBase) -> Any:
    """transformers' config object. ValueError: transformers does not know the class, or a setting is not a model's."""
    require_peft()
    from transformers import CONFIG_MAPPING

    settings = read_settings(Path(base.folder) / CONFIG_FILE)
    with readable(base, "transformers does not know it"):
        if settings["model_type"] != base.model_type:
            raise ValueError(f"config.json: model_type is {shown(settings['model_type'])}, not {base.model_type!r}")
        _check(settings)
        return CONFIG_MAPPING[base.model_type].from_dict(settings)


def _check(settings: Mapping[str, Any], inside: str = "") -> None:
    """ValueError if a setting is not a model's, or counts more layers or entries than any model has."""
    for name, value in settings.items():
        if name.lstrip("_") in _NO_SETTINGS or (inside and name == "quantization_config"):
            raise ValueError(f"config.json: {inside}{name} is no setting of a model; remove it")
        is_count = isinstance(value, int) and name.endswith(("layer", "layers"))
        count = len(value) if isinstance(value, list) else value if is_count else 0
        if count > _MOST:
            raise ValueError(f"config.json: {inside}{name} counts {count:,}, more than {_MOST:,}; correct it")
        if isinstance(value, dict):
            _check(value, f"{inside}{name}.")


def class_of(base: HFBase, config: Any) -> Any:
    """transformers' causal language model class for ``config``. ValueError: there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{base.folder}: transformers has no causal language model of {base.model_type!r}")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


class _Counted(TorchFunctionMode):
    """Raises ValueError once torch's functions have been called more than ``most`` times."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("config.json: the model has many more weights than the files")
        return func(*args, **(kwargs or {}))


def planned(base: HFBase, config: Any, dtype: torch.dtype, num_tensors: int) -> Any:
    """The model on the meta device. ValueError: the files are too small for it, found before memory is taken."""
    kind, folder = class_of(base, config), Path(base.folder)
    most = _MORE_CALLS + _CALLS_PER_TENSOR * num_tensors
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with readable(base), torch.device("meta"), _Counted(most):
        model = kind._from_config(config, dtype=dtype)
    values = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if values > _VALUES_PER_BYTE * size + _MORE_VALUES:
        raise ValueError(f"{folder}: config.json claims {values:,} values, and the files have {size:,} bytes")
    return model


def slices_of(base: HFBase) -> dict[str, Any]:
    """Tensors by name, which are read when sliced and keep the files open. ValueError: as for `opened`.

    Only where config.json says that weights are quantised may there be bytes beside floats: codes and scales.
    """
    folder = Path(base.folder)
    is_dense = read_settings(folder / CONFIG_FILE).get("quantization_config") is None
    with opened(folder, FLOATS if is_dense else (*FLOATS, "U8")) as file_of:
        return {name: file.get_slice(name) for name, file in file_of.items()}


def dtype_of(base: HFBase) -> torch.dtype:
    """The weights' dtype in config.json; if it has none, bf16 if any tensor of the files is bf16, else fp32."""
    if (stated := config_of(base).dtype) is not None:
        return stated
    return torch.bfloat16 if any(each.get_dtype() == "BF16" for each in slices_of(base).values()) else torch.float32


def loaded(base: HFBase, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """The model with the folder's weights. ValueError: as for `planned`, or a weight is missing, of another shape or
    not finite.
    """
    folder, config = Path(base.folder), config_of(base)
    kind, slices = class_of(base, config), slices_of(base)
    planned(base, config, dtype, len(slices))
    integration.register()
    if (folder / _GENERATION_FILE).exists():
        from transformers import GenerationConfig

        settings = read_settings(folder / _GENERATION_FILE)
        with readable(base, f"{_GENERATION_FILE} is none"):
            options = options | {"generation_config": GenerationConfig.from_dict(settings)}
    with readable(base):
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=slices,
            dtype=dtype,
            experts_implementation=integration.NAME,
            output_loading_info=True,
            **options,
        )
    model.config.name_or_path = model.name_or_path = base.folder
    wrong = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"], *found["unexpected_keys"]]))
    if wrong:
        raise ValueError(
            f"{base.folder}: the weights and {kind.__name__} differ in {wrong[0]}; save or download it again"
        )
    _require_finite(model, base)
    return model


def options_of(base: HFBase, storage: str, linear: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` for this storage. ValueError: the folder stores its weights in another format."""
    require_peft()
    from transformers import BitsAndBytesConfig, Mxfp4Config

    from tilemoe.integrations.quantized import TilemoeConfig, register_quantizer

    register_quantizer()
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    beside = None if linear == DENSE else BitsAndBytesConfig(**four, bnb_4bit_compute_dtype=torch.bfloat16)
    stored = read_settings(Path(base.folder) / CONFIG_FILE).get("quantization_config")
    if stored is None:
        return {} if storage == DENSE else {"quantization_config": TilemoeConfig(storage, beside)}
    settings = stored if isinstance(stored, dict) else {"quant_method": stored}
    method = settings.get("quant_method")
    kind = settings.get("experts") if method == integration.NAME else method
    if kind == storage and method == kind:
        return {"quantization_config": TilemoeConfig(storage, beside)}
    if kind == storage and (settings.get("linear") is None) == (beside is None):
        return {}
    if method == Mxfp4Weight.name and storage == DENSE:
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    raise ValueError(
        f"{base.folder}: config.json: quantization_config is of {shown(kind)}, which lora.storage {storage!r} with "
        f"lora.linear {linear!r} does not read; give the model in bf16, or, of a format of --lora.storage, that"
    )


@torch.no_grad()
def _require_finite(model: nn.Module, base: HFBase) -> None:
    """ValueError if a weight, or a scale of a 4-bit weight, has a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        for tensor in parameter.tensors() if isinstance(parameter, FrozenWeight) else [parameter]:
            if tensor.is_floating_point() and not is_finite(tensor):
                raise ValueError(f"{base.folder}: {name} is not finite; save or download the model again")

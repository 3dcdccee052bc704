"""A model's adapters as a folder that ``peft.PeftModel.from_pretrained`` loads on transformers' model of the same base.

d hidden_size · n intermediate_size · E experts · r rank · w = 2n

PEFT's `ParamWrapper` adapts a stacked parameter (E, o, i) by ``lora_A`` (E r, i), whose rows lie expert by expert, and
``lora_B`` (o, r E), whose columns lie rank by rank, the experts of each in a row.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tilemoe.layers.lora import LoRAExperts
from tilemoe.layers.lora_linear import LoRALinear
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.hf_config import hf_config_dict
from tilemoe.models.huggingface import Piece, pieces

WEIGHTS_FILE = "adapter_model.safetensors"
_ADAPTER = "default"  # PEFT's name of an adapter that has none
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Of a router and of the norms; the last are those whose names end so.
_ROUTER, _NORMS = ["mlp.gate"], ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm"]
_INSTALL = "pip install 'tilemoe[lora]'"


def require_peft() -> ModuleType:
    """The package. ValueError: it, or transformers, is not installed."""
    try:
        import peft
        import transformers  # noqa: F401  (which PEFT brings along, unless somebody took it away)
    except ImportError as error:
        raise ValueError(f"PEFT's format needs peft and transformers ({error}); {_INSTALL}") from error
    return peft


def save_adapter(model: DecoderLM, folder: Path, *, base: str | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors into ``folder``, which is there.

    PEFT's own code names the tensors, on transformers' model without memory. Routers and norms that want gradients are
    written whole, as its ``modules_to_save``. ``base``: what adapter_config.json calls the model that the adapters go
    with, None where it has no name.

    Raises:
        ValueError: peft is not installed, the model has no adapters, or (as `hf_config_dict`) transformers has no place
            for it.
    """
    peft = require_peft()
    from transformers import AutoConfig, AutoModelForCausalLM

    config = _lora_config(model, peft)
    settings = {**hf_config_dict(model.config), "eos_token_id": None}  # or else transformers takes that of its preset
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        theirs = peft.get_peft_model(whole, config)
    _fill(theirs, model)
    tensors = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    assert not missing, f"PEFT adapts what has no adapter here: {missing}"
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it its owner's alone
    config.base_model_name_or_path = base  # PEFT has put the name of the model without memory there
    config.save_pretrained(folder)


def _lora_config(model: DecoderLM, peft: ModuleType) -> Any:
    """PEFT's settings of the adapters that ``model`` has."""
    adapted = [module for module in model.modules() if isinstance(module, (LoRAExperts, LoRALinear))]
    if not adapted:
        raise ValueError("the model has no adapters; write its weights instead")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    also = [name for name in _ROUTER if any(".router." in name for name in trained)]
    also += [name for name in _NORMS if any("norm." in name for name in trained)]
    alpha = adapted[0].alpha
    return peft.LoraConfig(
        r=adapted[0].rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=_PROJECTIONS if any(isinstance(module, LoRALinear) for module in adapted) else [],
        target_parameters=_PARAMETERS if any(isinstance(module, LoRAExperts) for module in adapted) else None,
        modules_to_save=also or None,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def _fill(theirs: nn.Module, model: DecoderLM) -> None:
    """Put our adapters, and what else is trained, in the places that PEFT has for them."""
    layers = range(model.config.num_layers)
    stacked = {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in layers}  # as transformers has them
    pieces_of: dict[str, list[Piece]] = {}
    for piece in pieces(model.config, stacked):
        pieces_of.setdefault(piece.ours, []).append(piece)
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            place = _place(theirs, pieces_of[f"{name}.weight"][0].theirs.removesuffix(".weight"))
            _set_pair(place, module.lora_a, module.lora_b)
        elif isinstance(module, LoRAExperts):
            for weight, a, b in (("w1", module.up_a, module.up_b), ("w2", module.down_a, module.down_b)):
                of_weight = pieces_of[f"{name}.{weight}"]
                path, _, stack = of_weight[0].theirs.rpartition(".")
                wrapper = _wrapper(_place(theirs, path), stack)
                _set_pair(wrapper, a.flatten(0, 1), _stacked_b(b, of_weight))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name in pieces_of:
            path = pieces_of[name][0].theirs.removesuffix(".weight")
            _place(theirs, path).modules_to_save[_ADAPTER].weight = nn.Parameter(parameter.detach())


def _place(theirs: nn.Module, path: str) -> Any:
    return theirs.get_submodule(f"base_model.model.{path}")


def _wrapper(outermost: Any, parameter: str) -> Any:
    """Of wrappers around one another, each for one parameter of the same module, that of ``parameter``."""
    while outermost.parameter_name != parameter:
        outermost = outermost.base_layer
    return outermost


def _stacked_b(b: Tensor, of_weight: list[Piece]) -> Tensor:
    """b (E, o, r) -> (o, r E), the rows o in their order: gate first, then up."""
    rows = torch.empty_like(b)
    for piece in of_weight:
        piece.of_theirs(rows).copy_(piece.of_ours(b.detach()))
    return rows.permute(1, 2, 0).flatten(1)


def _set_pair(place: Any, a: Tensor, b: Tensor) -> None:
    for linear, tensor in ((place.lora_A[_ADAPTER], a), (place.lora_B[_ADAPTER], b)):
        assert linear.weight.shape == tensor.shape, (linear.weight.shape, tensor.shape)
        linear.weight = nn.Parameter(tensor.detach())

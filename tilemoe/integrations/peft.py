"""Save and load a model's adapters in PEFT's format, under the names that transformers' model of the same base has.

d hidden_size · n intermediate_size · E experts · r rank · w = 2n

PEFT's `ParamWrapper` adapts a stacked parameter (E, o, i) by ``lora_A`` (E r, i), whose rows are ordered by expert, and
``lora_B`` (o, r E), whose columns are ordered by rank, and within a rank by expert. Each such parameter has a wrapper:
down_proj's encloses gate_up_proj's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tilemoe.checks import require_finite, require_path, require_text, require_type, shown
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.layers.lora import ATTENTION, EXPERTS, LoRAExperts, adapted_modules, add_lora
from tilemoe.layers.lora_linear import LoRALinear
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.folder import read_settings
from tilemoe.models.hf_config import hf_config_dict
from tilemoe.models.huggingface import Piece, pieces
from tilemoe.models.sums import checked
from tilemoe.runtime.tensors import is_finite

SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every name in PEFT's file
# Experts' adapters: our name, our name of the weight, and the path of PEFT's wrapper of that weight.
_OF_EXPERTS = (("up", "w1", ".base_layer"), ("down", "w2", ""))
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# PEFT's modules_to_save for the router, and for the norms: a module is meant if its name ends so.
_ROUTER, _NORMS = ["mlp.gate"], ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm"]
# Settings of adapter_config.json that are read, and those that change no result (dropout acts only as PEFT trains).
_READ = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "modules_to_save",
    "init_lora_weights",
})  # fmt: skip
_UNREAD = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout",
})  # fmt: skip
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # the other initialisations change the base, too
_PATTERN = re.compile(r"(?!(.*\*){3})\^?(([\w.]|\\[.dw])\*?){1,200}")  # regular expressions that are quick to match
_MOST_PATTERNS = 256
_INSTALL = "pip install 'tilemoe[lora]'"


def require_peft() -> ModuleType:
    """The package ``peft``. ValueError: peft or transformers is not installed."""
    try:
        import peft
        import transformers  # noqa: F401  (which PEFT brings along, unless somebody took it away)
    except ImportError as error:
        raise ValueError(f"PEFT's format needs peft and transformers ({error}); {_INSTALL}") from error
    return peft


def lora_ranks(rank: int, alpha: float, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Arguments of PEFT's LoraConfig: ``ranks`` by module, ``rank`` for the others, all scaled by ``alpha / rank``."""

    def number(value: float) -> float:
        return int(value) if value == int(value) else value

    others = {name: each for name, each in ranks.items() if each != rank}
    alphas = {name: number(alpha * each / rank) for name, each in others.items()}
    return {"r": rank, "lora_alpha": number(alpha), "rank_pattern": others, "alpha_pattern": alphas}


def save_adapter(model: DecoderLM, folder: str | Path, *, base: str | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors into the existing ``folder``.

    Routers and norms that require gradients are written whole, as PEFT's ``modules_to_save``. ``base``: the name that
    adapter_config.json gives for the base model; None: no name.

    Raises:
        ValueError: peft is not installed, there is no such folder, the model has no adapters, or no model of
            transformers can express it (see `hf_config_dict`).

    Examples:
        >>> from tilemoe.integrations.peft import save_adapter
        >>> from tilemoe.layers.lora import add_lora
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> model = tilemoe.DecoderLM(config)
        >>> adapters = add_lora(model, rank=2, alpha=4.0)
        >>> Path("adapter").mkdir()
        >>> save_adapter(model, "adapter")
        >>> sorted(path.name for path in Path("adapter").iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    require_type("model", model, DecoderLM)
    path = require_path("folder", folder)
    if not path.is_dir():
        raise ValueError(f"folder {path} is not there; make it first")
    if base is not None:
        require_text("base", base)
    settings = _settings(model, require_peft())
    settings.base_model_name_or_path = base
    tensors = {link.theirs: link.in_their_order(model.get_parameter(link.ours).detach()) for link in _links(model)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS_FILE, {"format": "pt"})
    (path / WEIGHTS_FILE).chmod(0o644)  # safetensors creates it for its owner only
    settings.save_pretrained(path)


def load_adapter(model: DecoderLM, folder: str | Path) -> None:
    """Load the adapters of ``folder``, saved by PEFT on transformers' model of the same base or by `save_adapter`.

    A model without adapters is frozen and gets them, in the folder's dtype. If it has adapters already, for example on
    experts in NF4, their modules, ranks and alpha must be the same. Routers and norms that the folder has whole replace
    the model's and become trainable. The name of the base and ``lora_dropout`` are ignored. Weights are read only from
    safetensors, and the files of an export are compared to its checksums.

    Raises:
        ValueError: peft is not installed, a file is missing or damaged, no model of transformers can express the model,
            the model does not take adapters of this kind, rank or shape or on these modules, or it is on the meta
            device or sharded. The model is then unchanged.

    Examples:
        >>> from tilemoe.integrations.peft import load_adapter, save_adapter
        >>> from tilemoe.layers.lora import add_lora
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> model, other = tilemoe.DecoderLM(config), tilemoe.DecoderLM(config)
        >>> adapters = add_lora(model, rank=2, alpha=4.0)
        >>> Path("adapter").mkdir()
        >>> save_adapter(model, "adapter")
        >>> load_adapter(other, "adapter")
        >>> torch.equal(other.blocks[0].mlp.experts.up_a, model.blocks[0].mlp.experts.up_a)
        True
    """
    require_type("model", model, DecoderLM)
    path = require_path("folder", folder)
    if any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model is without memory or shared by processes; load adapters before tilemoe.parallelize")
    with checked(path):
        asked = _asked(path / SETTINGS_FILE, model, require_peft())
        links = {link.theirs: link for link in _links(asked)}
        shapes = {name: link.in_their_order(asked.get_parameter(link.ours)).shape for name, link in links.items()}
        tensors = _read_tensors(path / WEIGHTS_FILE, shapes)
    if not adapted_modules(model):
        dtype = next(tensor.dtype for name, tensor in tensors.items() if ".lora_" in name)
        add_lora(model, **_sizes(asked), dtype=dtype, modules=_kinds(asked))
    elif _described(model) != _described(asked):
        raise ValueError(
            f"model has adapters {_described(model)}, and {path} has them {_described(asked)}; "
            "load it into a model without adapters"
        )
    with torch.no_grad():
        for name, link in links.items():
            parameter = model.get_parameter(link.ours).requires_grad_(True)
            parameter.copy_(link.in_our_order(tensors[name], parameter.shape))


def _kinds(model: DecoderLM) -> list[str]:
    """Which kinds of module have adapters, by their names in `add_lora`."""
    kinds = {EXPERTS: LoRAExperts, ATTENTION: LoRALinear}
    return [
        name for name, kind in kinds.items() if any(isinstance(each, kind) for each in adapted_modules(model).values())
    ]


def _sizes(model: DecoderLM) -> dict[str, Any]:
    """The ranks and alpha that `add_lora` was given."""
    adapted = sorted(adapted_modules(model).values(), key=lambda each: isinstance(each, LoRALinear))
    of_attention = adapted[-1].rank if isinstance(adapted[-1], LoRALinear) else None
    return {"rank": adapted[0].rank, "attention_rank": of_attention, "alpha": adapted[0].alpha}


def _described(model: DecoderLM) -> str:
    sizes = sorted({f"of rank {each.rank} and alpha {each.alpha:g}" for each in adapted_modules(model).values()})
    return f"{', '.join(sizes)} on {' and '.join(_kinds(model))}"


def _settings(model: DecoderLM, peft: ModuleType) -> Any:
    """PEFT's LoraConfig for the adapters of ``model``. ValueError: it has none."""
    if not adapted_modules(model):
        raise ValueError("the model has no adapters; write its weights instead")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    also = [name for name in _ROUTER if any(".router." in name for name in trained)]
    also += [name for name in _NORMS if any("norm." in name for name in trained)]
    sizes, projections = _sizes(model), _PROJECTIONS if ATTENTION in _kinds(model) else []
    return peft.LoraConfig(
        **lora_ranks(sizes["rank"], sizes["alpha"], dict.fromkeys(projections, sizes["attention_rank"])),
        target_modules=projections,
        target_parameters=_PARAMETERS if EXPERTS in _kinds(model) else None,
        modules_to_save=also or None,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def _asked(path: Path, model: DecoderLM, peft: ModuleType) -> DecoderLM:
    """A model like ``model`` on the meta device, with the adapters and whole modules that the file at ``path`` names.

    ValueError: the file cannot be read, or asks for adapters of another kind; the message names the setting.
    """
    settings = _read_settings(path, peft)
    parameters = settings["target_parameters"]
    if isinstance(parameters, list):  # PEFT also accepts the end of a name
        ends = {name.split(".", cut)[cut]: name for name in _PARAMETERS for cut in range(3)}
        settings["target_parameters"] = [ends.get(each, each) if isinstance(each, str) else each for each in parameters]
    modules = [ATTENTION] if _named(path, settings, "target_modules", [_PROJECTIONS]) else []
    modules += [EXPERTS] if _named(path, settings, "target_parameters", [_PARAMETERS]) else []
    also = _named(path, settings, "modules_to_save", [_ROUTER, _NORMS])
    if not modules:
        raise ValueError(f"{path}: neither target_modules nor target_parameters says what has adapters")
    asked = DecoderLM(model.config, device="meta")
    try:
        sizes = {kind: _size_of(settings, kind, model) for kind in modules}
        rank, alpha = sizes[modules[-1]]
        attention_rank, attention_alpha = sizes.get(ATTENTION, (None, None))
        add_lora(asked, rank, alpha, attention_rank=attention_rank, modules=modules)
        if attention_rank is not None and not math.isclose(attention_alpha * rank, alpha * attention_rank):
            raise ValueError(
                f"lora_alpha / r is {alpha / rank:g} on experts and {attention_alpha / attention_rank:g} on attention, "
                "and here it is one; train with an alpha_pattern that makes them equal"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for name, parameter in asked.named_parameters():
        parameter.requires_grad_(
            parameter.requires_grad
            or (".router." in name and also.issuperset(_ROUTER))
            or ("norm." in name and also.issuperset(_NORMS))
        )
    return asked


def _size_of(settings: dict[str, Any], kind: str, model: DecoderLM) -> tuple[Any, Any]:
    """(rank, alpha) in the settings for modules of this `add_lora` kind. ValueError: they differ, or are invalid."""
    from peft.utils.other import get_pattern_key

    ends = _PARAMETERS if kind == EXPERTS else [f"self_attn.{name}" for name in _PROJECTIONS]
    names = [f"model.layers.{layer}.{end}" for layer in range(model.config.num_layers) for end in ends]
    found = []
    for ours, usual, setting in (("rank", "r", "rank_pattern"), ("alpha", "lora_alpha", "alpha_pattern")):
        others = settings[setting] or {}
        known = isinstance(others, dict) and len(others) <= _MOST_PATTERNS
        if not known or not all(map(_PATTERN.fullmatch, others)):
            raise ValueError(
                f"{setting} is {shown(others)}, which is no table of patterns: of {_MOST_PATTERNS} names at most, each "
                "with two '*' at most and no other operator"
            )
        sizes = [others.get(get_pattern_key(others, name), settings[usual]) for name in names]
        if sizes.count(sizes[0]) != len(sizes):
            raise ValueError(f"{setting} is {shown(others)}, which gives {kind} several; here all of them have one")
        require_finite(ours, sizes[0], positive=True)
        found.append(sizes[0])
    return found[0], found[1]


def _read_settings(path: Path, peft: ModuleType) -> dict[str, Any]:
    """The settings in an adapter_config.json, with PEFT's defaults for missing ones. ValueError: as for `_asked`."""
    found = read_settings(path, "a folder that PEFT saved")
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a table of settings, got {shown(found)}; give a folder that PEFT saved")
    usual = peft.LoraConfig().to_dict()
    settings = {**usual, **found}
    if settings["init_lora_weights"] not in _INITIAL:
        way = shown(settings["init_lora_weights"])
        raise ValueError(f"{path}: init_lora_weights {way} changes the base, too; let PEFT convert it as it saves")
    for name in sorted(settings.keys() - _READ - _UNREAD):
        if settings[name] != usual.get(name) and (settings[name] or usual.get(name)):
            raise ValueError(
                f"{path}: {name} is {shown(settings[name])}, which adapters here have not; train without it"
            )
    return settings


def _named(path: Path, settings: dict[str, Any], name: str, groups: list[list[str]]) -> set[str]:
    """The names that the setting lists. ValueError: they are not all names of none, some or all ``groups``."""
    value = [] if settings[name] is None else settings[name]
    found = set(map(str, value)) if isinstance(value, list) else {None}
    whole = [group for group in groups if found.issuperset(group)]
    if found != {each for group in whole for each in group}:
        known = ", or ".join(", ".join(group) for group in groups)
        raise ValueError(f"{path}: {name} is {shown(value)}; here it may be none or all of {known}")
    return {each for group in whole for each in group}


def _read_tensors(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The file's tensors. ValueError: they have other names or ``shapes``, are not finite, or cannot be read."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; let PEFT save safetensors, nothing else is read")
    try:
        with safe_open(path, "pt") as file:
            for name in sorted(shapes.keys() ^ file.keys()):  # before a tensor is read
                what = "is missing" if name in shapes else f"is of no adapter that {SETTINGS_FILE} and the model have"
                raise ValueError(f"{path}: {name} {what}; save it from a model of the same base and settings")
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); save or download it again") from error
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise ValueError(f"{path}: {name} must be {tuple(shapes[name])} for the model, got {tuple(tensor.shape)}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{path}: {name} must be of a floating dtype, got {tensor.dtype}")
        if not is_finite(tensor):
            raise ValueError(f"{path}: {name} is not finite; take adapters from before it was")
    return tensors


class _Link(NamedTuple):
    """The names of one of our parameters and of the tensor in PEFT's file that has its values in another order."""

    ours: str
    theirs: str
    of_weight: list[Piece] | None = None  # for b (E, o, r) of experts alone: how the weight orders the rows o

    def in_their_order(self, ours: Tensor) -> Tensor:
        """``ours`` for PEFT: a matrix as is, a (E, r, i) -> (E r, i), b (E, o, r) -> (o, r E), gate before up rows."""
        if self.of_weight is None:
            return ours.flatten(0, -2) if ours.ndim == 3 else ours
        rows = torch.empty_like(ours)
        for piece in self.of_weight:
            piece.of_theirs(rows).copy_(piece.of_ours(ours))
        return rows.permute(1, 2, 0).flatten(1)

    def in_our_order(self, theirs: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `in_their_order`, to ``shape``."""
        if self.of_weight is None:
            return theirs.view(shape)
        experts, rows, rank = shape
        lying = theirs.view(rows, rank, experts).permute(2, 0, 1)
        ours = torch.empty_like(lying)
        for piece in self.of_weight:
            piece.of_ours(ours).copy_(piece.of_theirs(lying))
        return ours


def _links(model: DecoderLM) -> Iterator[_Link]:
    """The links of all adapters and other trained parameters. ValueError: as for `hf_config_dict`."""
    hf_config_dict(model.config)
    stacked = {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(model.config.num_layers)}
    pieces_of: dict[str, list[Piece]] = {}
    for piece in pieces(model.config, stacked):
        pieces_of.setdefault(piece.ours, []).append(piece)
    for name, module in adapted_modules(model).items():
        if isinstance(module, LoRALinear):
            path = _PREFIX + pieces_of[f"{name}.weight"][0].theirs.removesuffix(".weight")
            yield _Link(f"{name}.lora_a", f"{path}.lora_A.weight")
            yield _Link(f"{name}.lora_b", f"{path}.lora_B.weight")
            continue
        for adapter, weight, wrapper in _OF_EXPERTS:
            of_weight = pieces_of[f"{name}.{weight}"]
            path = _PREFIX + of_weight[0].theirs.rpartition(".")[0] + wrapper
            yield _Link(f"{name}.{adapter}_a", f"{path}.lora_A.weight")
            yield _Link(f"{name}.{adapter}_b", f"{path}.lora_B.weight", of_weight)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name in pieces_of:
            yield _Link(name, _PREFIX + pieces_of[name][0].theirs)

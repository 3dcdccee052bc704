"""``tilemoe plan``: FLOPs, bytes, memory and time of a layer of any size, or of training a model. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tilemoe import plots
from tilemoe.checks import expand_user, shown, spelled
from tilemoe.cli.batch import options_lacking, sequences_of
from tilemoe.cli.parsing import parse
from tilemoe.cli.plan_tables import adapter_lines, exchange_lines, layer_lines, other_lines, training_lines
from tilemoe.config import CHECKPOINTING_MODES, MoEConfig, RouterConfig, Save, require_save
from tilemoe.models.families import sizes_from_hf
from tilemoe.models.folder import CONFIG_FILE, find_folder, is_hf, read_settings
from tilemoe.models.hf_config import layer_from_hf
from tilemoe.models.preset_sizes import SIZES_PRESETS
from tilemoe.models.presets import MOE_PRESETS, preset_named
from tilemoe.models.sizes import ModelSizes
from tilemoe.perf.adapters import BITS, Attention, tuning_plan
from tilemoe.perf.exchange import LINK_SHARE, Hosts, exchange_plan
from tilemoe.perf.hardware import DTYPE_BYTES, GPUS, Gpu, find_gpu
from tilemoe.perf.layer import layer_plan
from tilemoe.perf.proposal import Choices, proposal_rows, ways_to_share
from tilemoe.perf.training import Setup, precision_on, training_plan
from tilemoe.shape import MoEShape
from tilemoe.train.checkpoints.names import read_recipe
from tilemoe.train.config import Recipe, Storage, load_recipe

_PRESET = "olmoe-1b-7b"
_SIZES = ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
_NOT_OF_LORA = ("mfu", "gpus", "expert_parallel", "global_batch", "tokens_per_day")
_OF_TRAIN = ("seq_len", "checkpointing", "lora", *_NOT_OF_LORA)
_OF_LORA = ("experts", "optim", "attention", "attention_rank")
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_SEQ_LEN, _MFU = 4096, 0.35
_MOST = 1 << 31  # the plan's indices are int32


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``tilemoe plan``. Sizes override those of the preset or the checkpoint."""

    preset: str | None = None  # public model, by its name or the beginning of it; default: olmoe-1b-7b
    checkpoint: str | None = None  # config.json or folder of transformers, a name on the hub, a run or a step_* folder
    recipe: str | None = None  # the trainer's, by its name or as a .json file
    tokens: int = 32768  # per call, on one GPU
    hidden_size: int | None = None
    intermediate_size: int | None = None  # of one expert
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    dtype: str = "bf16"  # bf16, fp16, fp8, tf32 or fp32
    save: Save | None = None  # how pre-activations (h) are saved for backward; default: the checkpoint's, or full
    gpu: str = "H200"  # its name, in upper or lower case
    others: bool = False  # also show each step of ScatterMoE- and grouped_mm-style layers
    train: bool = False  # also plan training of the whole model
    seq_len: int | None = None  # of --train; default: 4096, or the model's longest
    mfu: float | None = None  # of --train: share of the GPU's stated bf16 rate that is reached; default: 0.35
    gpus: int | None = None  # of --train; default: the fewest that hold the model in each setup, a power of two
    expert_parallel: int | None = None  # of --train: GPUs sharing a layer's experts, shown beside 1; default: up to 8
    checkpointing: Literal["cheapest", "none", "attention", "block"] = "cheapest"
    """of --train: what is recomputed, like the trainer's --parallel.checkpointing; cheapest: the cheapest that fits"""
    global_batch: int | None = None
    """of --train: sequences of a step of all GPUs, for which settings are proposed; default: a recipe's on --gpus"""
    tokens_per_day: float | None = None  # of --train: also show how many GPUs this takes
    lora: int | None = None  # of --train: plan one GPU that trains adapters of this rank instead of all weights
    attention_rank: int | None = None  # of --lora: of attention's adapters; default: the same
    experts: Storage | None = None  # of --lora: format of the frozen experts; default: each
    optim: Literal["adamw", "adamw8bit"] = "adamw"  # of --lora
    attention: Attention = "fused"
    """of --lora; fused: SDPA or flex attention, as the trainer attends; eager: transformers' of gpt-oss, with scores"""
    hosts: int | None = None  # also show the layer with its experts shared by GPUs of so many hosts
    gpus_per_host: int = 8  # of --hosts
    network_gbps: float | None = None  # of --hosts: GB/s between them that a GPU reaches, one way
    json: bool = False  # print JSON
    plot: Path | None = None  # draw the steps' times beside their rooflines: .png, .svg or .pdf


@dataclass(frozen=True)
class Source:
    """Where sizes come from: its name, its layer, and its whole model or the reason why that cannot be planned."""

    name: str
    layer: MoEConfig
    model: ModelSizes | None
    why_no_model: str = ""
    recipe: Recipe | None = None


def run(arguments: Sequence[str]) -> None:
    names = f"Presets: {', '.join(MOE_PRESETS)}. GPUs: {', '.join(GPUS)}. Dtypes: {', '.join(DTYPE_BYTES)}."
    description = f"What a layer costs, by arithmetic; --train: a whole model. {names}"
    options = parse(PlanOptions, arguments, prog="tilemoe plan", description=description)
    _check(options)
    gpu, source = find_gpu(options.gpu), source_of(options)
    shape, overridden = shape_of(options, source.layer)
    if shape.save == "fp8" and not gpu.fp8_tflops:
        raise ValueError(f"--save fp8: the {gpu.name} has no FP8; give --save full, or choose another --gpu")
    plan: dict[str, Any] = {"source": source.name, "overridden": overridden, **layer_plan(shape, gpu, options.dtype)}
    if options.hosts is not None:
        plan["exchange"] = _exchange(options, source.layer, shape, gpu)
    if options.train:
        plan["train"] = _training(options, source, gpu, overridden)
    if options.plot is not None:
        _draw(plan, options.plot)
    if options.json:
        print(json.dumps(plan, indent=2, allow_nan=False))
    else:
        lines_of = training_lines if options.lora is None else adapter_lines
        lines = [*layer_lines(plan), *(other_lines(plan) if options.others else ())]
        lines += ["", *exchange_lines(plan["exchange"])] if "exchange" in plan else []
        lines += ["", *lines_of(plan["train"])] if options.train else []
        print("\n".join(lines))
    if options.train and not any(setup["micro_batch"] for setup in plan["train"]["setups"]):
        more = "raise --gpus" if options.lora is None else "lower --lora"
        raise ValueError(f"--train: {source.name} does not fit; {more}, lower --seq-len, or choose another --gpu")


def _draw(plan: dict[str, Any], path: Path) -> None:
    """Write the figure; ValueError: another kind of file, no such folder, or matplotlib is not installed."""
    if path.suffix not in _PLOT_SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(_PLOT_SUFFIXES)}; got {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: no such folder {path.absolute().parent}")
    try:
        plots.save(plots.plan_figure(plan), path)
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'tilemoe[plot]'") from error


def source_of(options: PlanOptions) -> Source:
    """The preset or the checkpoint that the options name. ValueError: there is none, or it has no experts."""
    if sum(given is not None for given in (options.checkpoint, options.preset, options.recipe)) > 1:
        raise ValueError("--checkpoint, --preset and --recipe name a layer each; leave one of them out")
    if options.recipe is not None:
        recipe = load_recipe(options.recipe)
        model = recipe.sizes()
        return Source(recipe.name, _experts("--recipe", options.recipe, model), model, recipe=recipe)
    if options.checkpoint is None:
        name = preset_named("--preset", options.preset or _PRESET)
        return Source(name, MOE_PRESETS[name], SIZES_PRESETS[name])
    file = expand_user(options.checkpoint)
    if file.is_file():
        return _from_hf(file.name, file)
    folder = find_folder("--checkpoint", options.checkpoint, files=(CONFIG_FILE,))
    if is_hf(folder):
        return _from_hf(options.checkpoint, folder / CONFIG_FILE)
    model = read_recipe(folder).sizes()
    return Source(options.checkpoint, _experts("--checkpoint", options.checkpoint, model), model)


def shape_of(options: PlanOptions, cfg: MoEConfig) -> tuple[MoEShape, dict[str, list[int]]]:
    """The layer's shape from the options, else from ``cfg``, and [before, after] of each size that the options change.

    ValueError: an option is invalid; the message names it.
    """
    if options.dtype not in DTYPE_BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}; got {options.dtype!r}")
    if options.tokens < 1:
        raise ValueError(f"--tokens must be >= 1, got {options.tokens}")
    given = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    sizes = {name: getattr(cfg, name) for name in _SIZES} | given
    shape = MoEShape(
        num_tokens=options.tokens,
        **sizes,
        is_gated=cfg.is_gated,
        element_bytes=DTYPE_BYTES[options.dtype],
        save=options.save or cfg.save,
    )
    require_save(shape.save, shape.width)
    if shape.num_rows >= _MOST or max(sizes.values()) >= _MOST:
        raise ValueError("--tokens x --num-experts-per-tok and every size must be below 2**31; lower them")
    was = {name: getattr(cfg, name) for name in given}
    return shape, {name: [was[name], value] for name, value in given.items() if was[name] != value}


def _from_hf(name: str, file: Path) -> Source:
    """The source in a config.json: the whole model of a family that `sizes_from_hf` knows, else the layer alone."""
    data = read_settings(file)
    try:
        model = sizes_from_hf(data)
    except ValueError as error:
        return Source(name, layer_from_hf(data), None, str(error))
    return Source(name, _experts("--checkpoint", name, model), model)


def _experts(option: str, name: str, model: ModelSizes) -> MoEConfig:
    if model.moe is None:
        raise ValueError(f"{option} {name}: this model is dense; give one that has experts")
    return model.moe


def _check(options: PlanOptions) -> None:
    """ValueError if an option of --train, --lora or --hosts is invalid, or given without it."""
    if options.hosts is None and (
        options.gpus_per_host != PlanOptions.gpus_per_host or options.network_gbps is not None
    ):
        raise ValueError("--gpus-per-host and --network-gbps are for --hosts; give --hosts, too")
    for names, is_wanted, rule in (
        (_OF_TRAIN, options.train, "is for a whole model in training; give --train, too"),
        (_OF_LORA, options.lora is not None, "is for adapters on a whole model; give --train --lora RANK, too"),
        (_NOT_OF_LORA, options.lora is None, "is not for --lora, which plans the memory of one GPU"),
    ):
        for name in names:
            if getattr(options, name) != getattr(PlanOptions, name) and not is_wanted:
                raise ValueError(f"--{spelled(name)} {rule}")
    for name in ("seq_len", "gpus", "expert_parallel", "lora", "attention_rank"):
        value = getattr(options, name)
        if value is not None and not 1 <= value < _MOST:
            raise ValueError(f"--{spelled(name)} must be >= 1 and below 2**31, got {shown(value)}")
    if options.mfu is not None and not 0 < options.mfu <= 1:
        raise ValueError(f"--mfu must be above 0 and at most 1, got {options.mfu}")
    if options.tokens_per_day is not None and not 0 < options.tokens_per_day < 1e30:
        raise ValueError(f"--tokens-per-day must be above 0 and below 1e30, got {options.tokens_per_day}")


def _exchange(options: PlanOptions, layer: MoEConfig, shape: MoEShape, gpu: Gpu) -> Mapping[str, Any]:
    """The plan for --hosts. ValueError: an option of --hosts is invalid, or its GPUs cannot divide the experts."""
    network, gpus = options.network_gbps, (options.hosts or 0) * options.gpus_per_host
    if network is None or not 0 < network < 1e6:
        raise ValueError(f"--hosts needs --network-gbps, what a GPU reaches between hosts in GB/s; got {network}")
    if gpus < 1 or options.gpus_per_host < 1 or shape.num_experts % gpus:
        raise ValueError(
            f"--hosts x --gpus-per-host must be at least 1 and divide the {shape.num_experts} experts, got {gpus}"
        )
    if shape.num_experts % layer.router.num_groups:
        layer = replace(layer, router=RouterConfig())  # its groups do not divide the number of experts in the options
    sizes: dict[str, Any] = {name: getattr(shape, name) for name in (*_SIZES, "save")}
    hosts = Hosts(options.hosts or 0, options.gpus_per_host, LINK_SHARE * gpu.link_gbps, network)
    return exchange_plan(replace(layer, **sizes), shape.num_tokens, gpu, hosts, options.dtype)


def _training(options: PlanOptions, source: Source, gpu: Gpu, overridden: dict[str, list[int]]) -> dict[str, Any]:
    """The plan for --train. ValueError: no whole model, options change its sizes, or the GPUs do not divide experts."""
    if source.model is None:
        raise ValueError(
            f"--train needs a whole model, and of {source.name} the layer alone is known ({source.why_no_model}); take "
            "a preset, a run, or --checkpoint with a config.json of those"
        )
    if overridden:
        raise ValueError(f"--train plans {source.name} as it is; leave out {', '.join(overridden)}")
    recipe, moe = source.recipe, replace(source.layer, save=options.save or source.layer.save)
    seq_len = options.seq_len or (min(_SEQ_LEN, source.model.max_seq_len) if recipe is None else recipe.data.seq_len)
    mode = None if options.checkpointing == "cheapest" else options.checkpointing
    if options.lora is not None:
        if options.attention == "eager" and not any(mixer.scores for _, mixer in source.model.mixers):
            raise ValueError(f"--attention eager is for gpt-oss, and {source.name} has SDPA; leave it out")
        given = (_storages(options.experts, source.layer), options.optim, mode, options.attention)
        ranks = (options.lora, options.attention_rank or options.lora)
        return tuning_plan(source.model, gpu, seq_len, ranks, *given)
    shared = options.expert_parallel or ways_to_share(moe, options.gpus)[-1]
    if moe.num_experts % shared or (options.gpus or 0) % shared:
        raise ValueError(f"--expert-parallel must divide the {moe.num_experts} experts and the GPUs, got {shared}")
    model, mfu = replace(source.model, moe=moe), _MFU if options.mfu is None else options.mfu
    plan = training_plan(model, gpu, seq_len, mfu, options.gpus, shared, options.tokens_per_day, mode)
    setup = Setup(model, gpu, plan["gpus"], 1, seq_len, precision_on(gpu, moe))
    choices = Choices((1, shared), CHECKPOINTING_MODES if mode is None else (mode,))
    return plan | _proposed(options.global_batch, recipe, setup, choices)


def _storages(experts: Storage | None, layer: MoEConfig) -> list[str]:
    """The formats that the frozen experts of such a layer can have. ValueError: not the one that is given."""
    from tilemoe.kernels.experts.table import STORAGES  # imports PyTorch, which no other plan needs

    widths = layer.hidden_size, layer.intermediate_size
    reasons = {name: STORAGES[name].weight.why_not(*widths) if name in STORAGES else None for name in BITS}
    if experts is not None and reasons[experts] is not None:
        raise ValueError(f"--experts {experts}: {reasons[experts]}")
    return [name for name, why in reasons.items() if experts in (None, name) and why is None]


def _proposed(global_batch: int | None, recipe: Recipe | None, setup: Setup, choices: Choices) -> dict[str, Any]:
    """Proposals for a step of given sequences, and the options that use them; {} if only a recipe of adapters has them.

    ValueError: the GPUs do not divide the sequences evenly.
    """
    if global_batch is not None:
        sequences = sequences_of(global_batch, setup.gpus)
    elif recipe is not None and recipe.lora is None:
        sequences = recipe.sequences_per_step
    else:
        return {}
    lacking = [] if recipe is None else options_lacking(recipe, setup.gpus)
    taken_by = " ".join(("--data.batch-size auto", *lacking))
    return {"sequences": sequences, "taken_by": taken_by, "proposals": proposal_rows(setup, sequences, choices)}

"""Builds the model of a recipe or a checkpoint on a device, and loads its tokenizer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilemoe.data import Tokenizer, load_tokenizer
from tilemoe.data.tokenizer import PLAIN
from tilemoe.integrations.hf_decoder import HFDecoder, load_decoder
from tilemoe.integrations.hf_folder import dtype_of
from tilemoe.layers.experts import Experts
from tilemoe.layers.float8 import quantize_projections
from tilemoe.layers.lora import add_lora
from tilemoe.layers.mlp import MLP
from tilemoe.layers.norm import RMSNorm
from tilemoe.layers.router import Router
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.folder import hf_tokenizer, is_hf, read_config
from tilemoe.models.hf_base import HFBase
from tilemoe.models.huggingface import read_model
from tilemoe.models.sums import checked
from tilemoe.parallel.mesh import build_meshes
from tilemoe.parallel.model import parallelize, shard_adapted
from tilemoe.runtime.device import has_fast_gemm
from tilemoe.train.checkpoints.folder import Checkpoint, resolve_checkpoint
from tilemoe.train.checkpoints.names import read_newest
from tilemoe.train.config import Recipe
from tilemoe.train.job.processes import ALONE, Job


def select_device(name: str, job: Job = ALONE) -> torch.device:
    """The device for ``name``; ``auto``: a CUDA GPU if there is one, else the CPU. Each process has its own GPU.

    ValueError: ``cuda`` without a usable GPU, or more processes than GPUs.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device cuda: torch sees no CUDA GPU here; use cpu or auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    if job.is_alone:
        return torch.device("cuda")
    if job.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"device {name}: this machine has {torch.cuda.device_count()} CUDA GPUs, too few for one per process; "
            "lower torchrun's --nproc-per-node, or use --train.device cpu"
        )
    return torch.device("cuda", job.local_rank)


def frozen_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype of frozen weights. bf16, in which autocast multiplies them anyway: beside 4-bit experts, in models of
    transformers' own classes, and if ``lora.base_dtype`` says so. Else, under train.precision fp32 or without fast
    bf16: fp32.
    """
    lora = recipe.lora
    is_narrow = lora is not None and (lora.storage != "dense" or lora.base_dtype == "bfloat16")
    in_bf16 = (
        (is_narrow or isinstance(recipe.model, HFBase))
        and recipe.train.precision == "bf16"
        and has_fast_gemm(device.type, torch.bfloat16)
    )
    return torch.bfloat16 if in_bf16 else torch.float32


def merged_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of weights with merged adapters: the base's, or fp32 if it is not known or not bf16 throughout."""
    if isinstance(recipe.model, HFBase):
        return dtype_of(recipe.model)
    is_narrow = recipe.lora is not None and recipe.lora.base_dtype == "bfloat16"
    return torch.bfloat16 if is_narrow else torch.float32


def make_decoder(
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    recompute: str | None = None,
    frozen: torch.dtype = torch.float32,
) -> DecoderLM:
    """The recipe's model with its adapters, if any. Trained weights are fp32, and only they have ``requires_grad``.

    Its memory is not initialised. ``frozen``: the dtype of frozen weights under adapters; with dense experts it is that
    of frozen matrices only, so that norms and routers still compute in fp32. ``recompute``: see `DecoderLM`.
    """
    lora = recipe.lora
    assert not isinstance(recipe.model, HFBase), "it were `make_adapted`'s"
    is_dense = lora is None or lora.storage == "dense"
    model = DecoderLM(recipe.model, device="meta", dtype=None if is_dense else frozen, recompute=recompute)
    if lora is not None:
        ranks: dict[str, Any] = {"rank": lora.rank, "attention_rank": lora.attention_rank, "alpha": lora.alpha}
        add_lora(model, **ranks, dtype=torch.float32, modules=lora.modules, storage=lora.storage)
        for module in model.modules():
            if (lora.train_router and isinstance(module, Router)) or (lora.train_norms and isinstance(module, RMSNorm)):
                module.float().requires_grad_(True)
            if is_dense and isinstance(module, (Experts, MLP, nn.Linear)):
                for name, weight in module.named_parameters(recurse=False):
                    if not weight.requires_grad:
                        setattr(module, name, nn.Parameter(weight.to(frozen), requires_grad=False))
    return model.to_empty(device=device)


def make_adapted(
    recipe: Recipe, device: torch.device, home: torch.device, frozen: torch.dtype | None = None
) -> HFDecoder:
    """The recipe's base of transformers' own class with its adapters, to compute on ``device``. Its memory is on
    ``home``; on the meta device it is not read. ``frozen``: the base's dtype; default: `frozen_dtype`.

    ValueError: the base is not supported.
    """
    base, lora = recipe.model, recipe.lora
    assert isinstance(base, HFBase), "else it were `make_decoder`'s"
    assert lora is not None, "`Recipe.require_trainable` asked"
    settings: dict[str, Any] = {"rank": lora.rank, "attention_rank": lora.attention_rank, "alpha": lora.alpha}
    settings |= {"modules": lora.modules, "storage": lora.storage, "linear": lora.linear}
    settings["dtype"] = frozen or frozen_dtype(recipe, device)
    generator = torch.Generator().manual_seed(recipe.train.seed)
    decoder = load_decoder(base, **settings, device=device, home=home, generator=generator)
    if home.type == "meta":
        return decoder
    decoder.set_checkpointing(recipe.parallel.checkpointing)
    if recipe.data.format == "chat" and recipe.data.packing == "best_fit":
        decoder.require_documents_apart()
    return decoder


def build_model(recipe: Recipe, device: torch.device) -> DecoderLM | HFDecoder:
    """The recipe's model with initial weights, equal on every device; `load_initial` fills a frozen `DecoderLM`."""
    if isinstance(recipe.model, HFBase):
        return make_adapted(recipe, device, device)
    model = _make_trained(recipe, device, device)
    _draw_trained(model, recipe.train.seed)
    model.set_checkpointing(recipe.parallel.checkpointing)
    backend = compile_backend(recipe)
    if backend is not None:
        model.compile_blocks(backend)
    return model


def _draw_trained(model: DecoderLM, seed: int) -> None:
    """Draw the trained parameters, with the values they get if all are drawn; frozen ones are not touched."""
    owned = [(module, *each) for module in model.modules() for each in module.named_parameters(recurse=False)]
    held = [each for each in owned if not each[-1].requires_grad]
    for module, name, parameter in held:
        setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    model.reset_parameters(torch.Generator().manual_seed(seed))
    for module, name, parameter in held:
        setattr(module, name, parameter)


def _make_trained(recipe: Recipe, device: torch.device, home: torch.device) -> DecoderLM:
    """The recipe's model for training on ``device``; its memory is on ``home`` and not initialised."""
    frozen = frozen_dtype(recipe, device)
    model = make_decoder(recipe, device=home, recompute=recipe.train.recompute, frozen=frozen)
    if recipe.train.dense_precision == "fp8":  # before the model is compiled or sharded
        quantize_projections(model, device)
    return model


def compile_backend(recipe: Recipe) -> str | None:
    """The torch.compile backend for the blocks; None: they are not compiled."""
    return "inductor" if recipe.train.compile == "blocks" else None


def build_shared_model(recipe: Recipe, device: torch.device, job: Job) -> DecoderLM | HFDecoder:
    """The model of `build_model`, with the same weights, sharded over the job's processes by ``recipe.parallel``.

    A process never holds more than its shards, with two exceptions: it reads all of a base of transformers' own class
    into host memory, and one layer's experts while they are converted to 4 bits. All processes must call it.
    """
    if isinstance(recipe.model, HFBase):
        adapted = make_adapted(recipe, device, torch.device("cpu"))
        shard_adapted(adapted, build_meshes(recipe.parallel_for(job.world_size), recipe.model, device.type))
        return adapted
    model = _make_trained(recipe, device, torch.device("meta"))
    meshes = build_meshes(recipe.parallel_for(job.world_size), recipe.model, device.type)
    parallelize(model, meshes, compile_backend=compile_backend(recipe))
    _draw_trained(model.to_empty(device=device), recipe.train.seed)
    return model


@dataclass(frozen=True)
class Restored:
    """A trained model, ready to use."""

    checkpoint: Checkpoint
    model: DecoderLM | HFDecoder
    tokenizer: Tokenizer


def restore_model(path: Path, device_name: str) -> tuple[DecoderLM | HFDecoder, Tokenizer]:
    """Model, in eval mode, and tokenizer: of a checkpoint by `restore`, or of transformers' folder, in fp32.

    ValueError: there is no model, it is damaged, or `DecoderLM` does not have its architecture.
    """
    if not is_hf(path):
        restored = restore(path, device_name)
        return restored.model, restored.tokenizer
    with checked(path):
        tokenizer, limit = load_tokenizer(hf_tokenizer(path)), read_config(path).vocab_size
        if tokenizer.vocab_size > limit:
            raise ValueError(
                f"{tokenizer.name} has {tokenizer.vocab_size} ids and the model's vocab_size is {limit}; "
                "save the model's own tokenizer there"
            )
        model = read_model(path, select_device(device_name), torch.float32)
    model.eval()
    return model, tokenizer


def autocast_of(model: nn.Module) -> AbstractContextManager[object]:
    """bf16 autocast, enabled if a restored model has fp32 embeddings and bf16 frozen matrices (``lora.base_dtype``)."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    is_mixed = isinstance(model, DecoderLM) and model.embed.weight.dtype == torch.float32 and torch.bfloat16 in dtypes
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=is_mixed)


def restore(path: Path, device_name: str, precision: str | None = None) -> Restored:
    """The model and the tokenizer of a run's newest checkpoint, or of one step's folder.

    ``precision`` of frozen weights: "fp32"; "merged": `merged_dtype`; None: `frozen_dtype`, as in training.
    CheckpointError: there is no checkpoint, or it is damaged.
    """
    return read_newest(path, lambda: _restore(path, device_name, precision))


def _restore(path: Path, device_name: str, precision: str | None) -> Restored:
    checkpoint = resolve_checkpoint(path)
    checkpoint.require_bytes()
    device, recipe = select_device(device_name), checkpoint.state.recipe
    if isinstance(recipe.model, HFBase):
        recipe.model.require_unchanged()
    frozen = merged_dtype(recipe) if precision == "merged" else frozen_dtype(recipe, device)
    model: DecoderLM | HFDecoder
    if isinstance(recipe.model, HFBase):
        model = make_adapted(recipe, device, device, frozen)
    else:
        model = make_decoder(recipe, device=device, frozen=torch.float32 if precision == "fp32" else frozen)
    checkpoint.load_model(model)
    model.eval()
    tokenizer = load_tokenizer(checkpoint.tokenizer_spec)
    if checkpoint.state.recipe.data.format == "chat":
        tokenizer.chat_template = tokenizer.chat_template or PLAIN
    return Restored(checkpoint, model, tokenizer)

"""From a recipe or a checkpoint to a model on a device, with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tilemoe.data import Tokenizer, load_tokenizer
from tilemoe.models.decoder import DecoderLM
from tilemoe.train.checkpoint import Checkpoint, resolve_checkpoint
from tilemoe.train.config import Recipe


def select_device(name: str) -> torch.device:
    """``auto`` is a CUDA GPU if there is one, else the CPU.

    Raises:
        ValueError: ``cuda`` without a usable GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device cuda: torch sees no CUDA GPU here; use cpu or auto")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def build_model(recipe: Recipe, device: torch.device) -> DecoderLM:
    """The recipe's model with its initial weights: drawn on the CPU, so the same on every device."""
    model = DecoderLM(recipe.model, recompute=recipe.train.recompute)
    model.reset_parameters(torch.Generator().manual_seed(recipe.train.seed))
    model.to(device)
    if recipe.train.compile == "blocks":
        for block in model.blocks:
            block.compile()
    return model


@dataclass(frozen=True)
class Restored:
    """A trained model, ready to use."""

    checkpoint: Checkpoint
    model: DecoderLM
    tokenizer: Tokenizer
    device: torch.device


def restore(path: Path, device_name: str) -> Restored:
    """The model and the tokenizer of a run's newest checkpoint, or of one step's folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoint = resolve_checkpoint(path)
    device = select_device(device_name)
    model = DecoderLM(checkpoint.state.recipe.model)
    checkpoint.load_model(model)
    model.to(device).eval()
    return Restored(checkpoint, model, load_tokenizer(checkpoint.tokenizer_spec), device)

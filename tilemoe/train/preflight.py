"""What can be known to fail before a corpus is read, which may take hours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tilemoe.data.tokenizer import load_tokenizer
from tilemoe.models.flops import count_parameters
from tilemoe.train.config import Recipe
from tilemoe.train.job.processes import Job

_CHECKPOINT_BYTES = 12  # of a parameter: itself and AdamW's two moments, fp32; Muon has one


def require_ready(recipe: Recipe, job: Job, *, is_new: bool) -> None:
    """ValueError: train.out_dir cannot be written or has no room for a checkpoint, or a new run's vocabulary is too
    small.
    """
    if is_new:
        _require_vocabulary(recipe)
    if job.is_first:  # it alone writes there, or is the first to
        _require_folder(recipe)


def _require_folder(recipe: Recipe) -> None:
    folder = Path(recipe.train.out_dir).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"train.out_dir {folder}: {there} is a file; choose another --train.out-dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"train.out_dir {folder}: {there} cannot be written; correct its permissions, or choose another "
            "--train.out-dir"
        )
    needed, free = _CHECKPOINT_BYTES * count_parameters(recipe.model), shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"train.out_dir {folder}: a checkpoint takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; make "
            "room, or choose another --train.out-dir"
        )


def _require_vocabulary(recipe: Recipe) -> None:
    """A BPE that is yet to be trained may have as many ids as it is asked for."""
    spec, limit = recipe.data.tokenizer, recipe.model.vocab_size
    size = spec.removeprefix("bpe:")
    most = int(size) if size != spec and size.isdecimal() else load_tokenizer(spec).vocab_size
    if most > limit:
        raise ValueError(
            f"model.vocab_size ({limit}) is below the {most} ids of tokenizer {spec!r}; set --model.vocab-size {most}"
        )

"""Checks before a corpus is read (which may take hours) or a step is trained, so that a run fails early."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

from tilemoe.checks import expand_user
from tilemoe.data.corpus import leaves_out
from tilemoe.data.tokenizer import Tokenizer, load_tokenizer
from tilemoe.files import open_regular
from tilemoe.layers.float8 import require_torchao
from tilemoe.models.flops import count_parameters
from tilemoe.models.hf_base import HFBase
from tilemoe.train import optim
from tilemoe.train.checkpoints.folder import own_files
from tilemoe.train.checkpoints.names import STATE_FILE, is_step_dir, list_checkpoints
from tilemoe.train.checkpoints.restore import frozen_dtype, make_adapted, make_decoder, select_device
from tilemoe.train.config import Recipe
from tilemoe.train.job.processes import Job
from tilemoe.train.metrics import METRICS_FILE, TENSORBOARD_DIR, WANDB_DIR
from tilemoe.train.sample import prompt_ids

RESULT_FILE, PLOT_FILE = "result.json", "plot.png"
_HEAD_BYTES = 200
_BEGINNINGS = {  # of our files; metrics may be one line cut short, which is checked when it is read
    METRICS_FILE: rb'\{"kind": "(train", "step": \d+, "tokens": |eval", "step": \d+, "nats_per_token": )|[^\n]{,50}\Z',
    RESULT_FILE: rb'\{\n  "heldout_nats_per_byte": ',
    # In earlier releases matplotlib wrote the plot, with 2 to 4 panels of 550 x 420 pixels.
    PLOT_FILE: rb"\x89PNG(.*Software\0tilemoe|.{12}\0\0(\x04L|\x06r|\x08\x98)\0\0\x01\xa4.*Software\0Matplotlib)",
    STATE_FILE: rb'\{"data_fingerprint":"',
}
_WEIGHT_BYTES = 4  # per parameter in a checkpoint: fp32
_STATE_BYTES = {"adamw": 8, "muon": 8, "adamw8bit": 2}  # per parameter: two moments; Muon's matrices have one


def require_ready(recipe: Recipe, job: Job, *, is_new: bool, init_from: Path | None = None) -> None:
    """ValueError: a package is missing, the router could not learn, train.out_dir cannot be written or has no room for
    a checkpoint, a new run's vocabulary is too small, or its train.sample_prompt is too long for the model (checked
    here unless the tokenizer must be trained first). ``init_from``: the folder whose weights a new run starts from.
    """
    if recipe.train.dense_precision == "fp8":
        require_torchao()
    if recipe.optim.name == "adamw8bit":
        optim.require_torchao()
    if recipe.lora is not None and recipe.lora.linear != "dense":
        if find_spec("bitsandbytes") is None:
            raise ValueError("lora.linear 'nf4' needs bitsandbytes: pip install bitsandbytes, or leave it out")
        if not job.is_alone:
            raise ValueError("lora.linear 'nf4' works in one process only; leave it out")
    if recipe.model.moe is not None and (recipe.lora is None or recipe.lora.train_router):
        recipe.model.moe.require_learnable_router()
    if is_new:
        _require_tokenizer(recipe, init_from)
    if job.is_first:  # only rank 0 writes there, or it writes first
        _require_folder(recipe)


def require_own(recipe: Recipe, step: int) -> None:
    """ValueError: train.out_dir holds something that is not ours under a name that a run from ``step`` on writes."""
    run_dir, train = recipe.train.out_path, recipe.train
    newer = [path.name for path in list_checkpoints(run_dir, after=step)]
    plot = [PLOT_FILE] * train.plot
    folders = [TENSORBOARD_DIR] * train.tensorboard + [WANDB_DIR] * train.wandb
    for name in (METRICS_FILE, RESULT_FILE, *plot, *folders, *newer):
        path = run_dir / name
        if path.is_symlink() or (path.exists() and not _is_own(path)):
            what = "is a link, which tilemoe never writes to" if path.is_symlink() else "was not written by tilemoe"
            raise ValueError(f"train.out_dir: {path} {what}; move it away, or choose another --train.out-dir")


def _is_own(path: Path) -> bool:
    """Whether a file begins like ours, a checkpoint is ours, or a tracker's ``path`` is a folder."""
    if path.name in (TENSORBOARD_DIR, WANDB_DIR):
        return path.is_dir()
    if is_step_dir(path):
        return bool(own_files(path)) or _is_own(path / STATE_FILE)  # the manifest may be damaged
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return re.match(_BEGINNINGS[path.name], file.read(_HEAD_BYTES), re.DOTALL) is not None


def require_prompt(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """ValueError: the model cannot continue train.sample_prompt, which it has to at the end of the run."""
    if recipe.train.sample_tokens:
        prompt_ids(tokenizer, recipe.train.sample_prompt, recipe.model.max_seq_len, "train.sample_prompt")


def _require_folder(recipe: Recipe) -> None:
    folder = recipe.train.out_path.absolute()
    for corpus, _ in recipe.data.weight_of_corpus:
        root, inside = expand_user(corpus).resolve(), folder.resolve()
        # metrics.jsonl would become part of the text, and the run could never go on.
        if inside.is_relative_to(root) and not any(map(leaves_out, inside.relative_to(root).parts)):
            raise ValueError(f"train.out_dir {folder} lies in corpus {corpus!r}; choose another --train.out-dir")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"train.out_dir {folder}: {there} is a file; choose another --train.out-dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"train.out_dir {folder}: {there} cannot be written; correct its permissions, or choose another "
            "--train.out-dir"
        )
    needed, free = _checkpoint_bytes(recipe), shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"train.out_dir {folder}: a checkpoint takes {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free; "
            "make room, or choose another --train.out-dir"
        )


def _checkpoint_bytes(recipe: Recipe) -> int:
    if isinstance(recipe.model, HFBase):  # the base stays in its own folder
        adapters = make_adapted(recipe, torch.device("cpu"), torch.device("meta")).state_dict().values()
        return (_WEIGHT_BYTES + _STATE_BYTES[recipe.optim.name]) * sum(each.numel() for each in adapters)
    if recipe.lora is None:
        return (_WEIGHT_BYTES + _STATE_BYTES[recipe.optim.name]) * count_parameters(recipe.model)
    frozen = frozen_dtype(recipe, select_device(recipe.train.device))
    parameters = list(make_decoder(recipe, device="meta", frozen=frozen).parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return sum(parameter.nbytes for parameter in parameters) + _STATE_BYTES[recipe.optim.name] * trained


def _require_tokenizer(recipe: Recipe, init_from: Path | None) -> None:
    """Check vocabulary and prompt. A BPE that is not trained yet may get as many ids as ``bpe:N`` asks for."""
    spec, limit = recipe.data.tokenizer, recipe.model.vocab_size
    size = spec.removeprefix("bpe:")
    is_trained = size != spec and size.isdecimal()
    tokenizer = None if is_trained else load_tokenizer(spec)
    most = int(size) if tokenizer is None else tokenizer.vocab_size
    if most > limit:
        if init_from is not None:  # its embeddings have a fixed size
            raise ValueError(
                f"tokenizer {spec!r} has {most} ids, more than the {limit} of the model in {init_from}; resize the "
                "model's embeddings, or give another --data.tokenizer"
            )
        raise ValueError(
            f"model.vocab_size ({limit}) is below the {most} ids of tokenizer {spec!r}; set --model.vocab-size {most}"
        )
    if tokenizer is not None:
        require_prompt(recipe, tokenizer)

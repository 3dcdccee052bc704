"""A run that starts from a model that exists: its weights, architecture and tokenizer, and nothing else of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import read_config, whole_parameters
from tilemoe.train.checkpoints.folder import resolve_checkpoint
from tilemoe.train.checkpoints.restore import hf_tokenizer, is_hf
from tilemoe.train.checkpoints.sharded_state import copy_part
from tilemoe.train.config import Recipe

_HUB_NAME = r"[\w.-]+/[\w.-]+"
_HUB_FILES = ["*.json", "*.safetensors"]


def find_initial(name: str) -> Path:
    """The folder that ``--init-from NAME`` means: one that is there, or a model of the hub, downloaded or in its cache.

    Raises:
        ValueError: there is no such folder, and no such model can be had.
    """
    folder = Path(name).expanduser().resolve()  # it goes into the recipe, which may be resumed from elsewhere
    if folder.is_dir():
        return folder
    if re.fullmatch(_HUB_NAME, name) is None:
        raise ValueError(f"--init-from {name}: no such folder; give a run, a step_* folder, or transformers' folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"--init-from {name}: no such folder; for a model of the hub: pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:  # the library's own errors are among them
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"--init-from {name}: no such folder, and the hub does not give it ({reason})") from error


def adopt(recipe: Recipe, folder: Path) -> Recipe:
    """``recipe`` with the architecture and the tokenizer of ``folder``: of transformers, or a checkpoint of ours.

    Its sequences are at most as long as the model's.
    """
    if is_hf(folder):
        model, spec = read_config(folder), hf_tokenizer(folder)
    else:
        checkpoint = resolve_checkpoint(folder, verify=False)  # `load_initial` verifies
        model, spec = checkpoint.state.recipe.model, checkpoint.tokenizer_spec
    data = replace(recipe.data, tokenizer=spec, seq_len=min(recipe.data.seq_len, model.max_seq_len))
    return replace(recipe, model=model, data=data)


@torch.no_grad()
def load_initial(model: DecoderLM, folder: Path) -> None:
    """Copy the weights into ``model``, which processes may share: then all call it, and each reads its part.

    Of transformers' folder one parameter at a time is whole in memory. The selection biases of routers, which are not
    in it, stay as they are.
    """
    if not is_hf(folder):
        resolve_checkpoint(folder).load_model(model)
        return
    parameters = model.state_dict()
    for name, whole in whole_parameters(folder, model.config):
        target = parameters[name]
        if isinstance(target, DTensor):
            copy_part(target, whole.__getitem__)
        else:
            target.copy_(whole)

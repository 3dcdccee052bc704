"""Start a run from an existing model: take its weights, architecture and tokenizer, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tilemoe.config import ModelConfig
from tilemoe.integrations.hf_decoder import mixes_documents
from tilemoe.layers.lora import packed_weights
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.folder import hf_tokenizer, is_hf, read_config
from tilemoe.models.hf_base import HFBase, read_base, why_base
from tilemoe.models.huggingface import require_weights, whole_parameters
from tilemoe.models.sums import checked, require_settings
from tilemoe.train.checkpoints.folder import resolve_checkpoint
from tilemoe.train.checkpoints.names import read_newest
from tilemoe.train.checkpoints.sharded_state import copy_part
from tilemoe.train.config import Recipe


def adopt(recipe: Recipe, folder: Path) -> Recipe:
    """``recipe`` with the architecture and the tokenizer of ``folder``: transformers' folder, or a checkpoint of ours.

    seq_len is cut to the model's limit. With a base of transformers' own class, settings of our blocks (compile,
    recompute) are dropped, and documents are not packed if the base would mix them.
    """
    if is_hf(folder):
        require_settings(folder)  # `load_initial` compares the weights' content
        model, spec = _read_config(folder), hf_tokenizer(folder)
    else:
        checkpoint = read_newest(folder, lambda: resolve_checkpoint(folder))
        if checkpoint.state.recipe.lora is not None:
            raise ValueError(
                f"--init-from {folder} holds adapters, from which no run can start; merge them with tilemoe export "
                f"--checkpoint {folder} --out FOLDER, and give that folder"
            )
        model, spec = checkpoint.state.recipe.model, checkpoint.tokenizer_spec
    data = replace(recipe.data, tokenizer=spec, seq_len=min(recipe.data.seq_len, model.max_seq_len))
    if not isinstance(model, HFBase):
        return replace(recipe, model=model, data=data)
    if mixes_documents(model):
        data = replace(data, packing="one_document")
    return replace(recipe, model=model, data=data, train=replace(recipe.train, compile="none", recompute=None))


def _read_config(folder: Path) -> ModelConfig | HFBase:
    """The config of transformers' folder; where it is a `DecoderLM`'s, the folder's weights must fit it."""
    if why_base(folder) is not None:
        return read_base(folder)
    model = read_config(folder)
    try:
        require_weights(folder, model)
    except ValueError:
        with checked(folder):  # if a file has changed, this error names it instead
            raise
    return model


@torch.no_grad()
def load_initial(model: DecoderLM, folder: Path) -> None:
    """Copy the weights of ``folder`` into ``model``. If processes share it, all must call this; each keeps its shards.

    From transformers' folder, one parameter at a time is whole in memory. Adapters, and selection biases of routers,
    which are not in that folder, keep their values.
    """
    if not is_hf(folder):
        read_newest(folder, lambda: resolve_checkpoint(folder).load_model(model))
        return
    parameters, packed = model.state_dict(), packed_weights(model)
    with checked(folder):
        # Assemble and check parameters on the model's device: a host took 24 s or more for 4 layers of Qwen3-30B-A3B.
        for name, whole in whole_parameters(folder, model.config, model.embed.weight.device):
            if name in packed:
                packed[name][0].pack(name.rpartition(".")[2], whole)
                continue
            target = parameters[name]
            if isinstance(target, DTensor):
                copy_part(target, whole.__getitem__)
            else:
                target.copy_(whole)

"""A run that starts from a model that exists: its weights, architecture and tokenizer, and nothing else of it."""

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
from tilemoe.models.hf_base import HFBase, is_base, read_base
from tilemoe.models.huggingface import require_weights, whole_parameters
from tilemoe.models.sums import checked, require_settings
from tilemoe.train.checkpoints.folder import resolve_checkpoint
from tilemoe.train.checkpoints.names import read_newest
from tilemoe.train.checkpoints.sharded_state import copy_part
from tilemoe.train.config import Recipe


def adopt(recipe: Recipe, folder: Path) -> Recipe:
    """``recipe`` with the architecture and the tokenizer of ``folder``: of transformers, or a checkpoint of ours.

    Its sequences are at most as long as the model's. With a base of transformers' own class, what a recipe says of our
    blocks is left out, and documents are not packed if it cannot keep them apart.
    """
    if is_hf(folder):
        require_settings(folder)  # of the weights `load_initial` compares the content
        model, spec = _read_config(folder), hf_tokenizer(folder)
    else:
        checkpoint = read_newest(folder, lambda: resolve_checkpoint(folder))
        if checkpoint.state.recipe.lora is not None:
            raise ValueError(
                f"--init-from {folder} holds adapters, with which no other run begins; merge them by tilemoe export "
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
    """Of transformers' folder, the weights of which are looked at where `DecoderLM` is to hold them."""
    if is_base(folder):
        return read_base(folder)
    model = read_config(folder)
    try:
        require_weights(folder, model)
    except ValueError:
        with checked(folder):  # which names the file that has changed, if one has
            raise
    return model


@torch.no_grad()
def load_initial(model: DecoderLM, folder: Path) -> None:
    """Copy the weights into ``model``, which processes may share: then all call it, and each reads its part.

    Of transformers' folder one parameter at a time is whole in memory. The selection biases of routers, which are not
    in it, and adapters stay as they are.
    """
    if not is_hf(folder):
        read_newest(folder, lambda: resolve_checkpoint(folder).load_model(model))
        return
    parameters, packed = model.state_dict(), packed_weights(model)
    with checked(folder):
        # Put together and checked where the model is: a host took 24 s and more for four layers of Qwen3-30B-A3B.
        for name, whole in whole_parameters(folder, model.config, model.embed.weight.device):
            if name in packed:
                packed[name][0].pack(name.rpartition(".")[2], whole)
                continue
            target = parameters[name]
            if isinstance(target, DTensor):
                copy_part(target, whole.__getitem__)
            else:
                target.copy_(whole)

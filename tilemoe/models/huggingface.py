"""Conversion between `DecoderLM` and Hugging Face's Qwen3MoeForCausalLM: weights by name, and folders on disk.

d model width · n expert width · E experts

Every weight has one counterpart. Expert e's rows of ``w1`` (E, 2n, d) are its ``gate_proj`` and ``up_proj`` (n, d) in
either gate_up layout, and ``w2[e]`` (d, n) is its ``down_proj``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilemoe.config import ModelConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.hf_config import config_from_hf, hf_config_dict

__all__ = [
    "config_from_hf",
    "from_hf_state_dict",
    "hf_config_dict",
    "iter_from_hf",
    "load_hf",
    "save_hf",
    "to_hf_state_dict",
]

# Within a block and within a layer, for what is the same tensor under two names.
_BLOCK_NAMES = (
    ("attention_norm", "input_layernorm"),
    ("attention.q_proj", "self_attn.q_proj"),
    ("attention.k_proj", "self_attn.k_proj"),
    ("attention.v_proj", "self_attn.v_proj"),
    ("attention.o_proj", "self_attn.o_proj"),
    ("attention.q_norm", "self_attn.q_norm"),
    ("attention.k_norm", "self_attn.k_norm"),
    ("mlp_norm", "post_attention_layernorm"),
)


def to_hf_state_dict(model: DecoderLM) -> dict[str, Tensor]:
    """The weights under the names of checkpoints on the hub, one tensor per expert; views, detached, not copied.

    Raises:
        ValueError: as `hf_config_dict`.
    """
    config = model.config
    hf_config_dict(config)
    state = model.state_dict()
    tensors = {theirs: state[ours] for ours, theirs in _plain_names(config)}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
        if config.moe is None or not config.is_moe_layer(layer):
            gate, up = _split_gate_up(state[f"{ours}.w1"], "concatenated")
            tensors |= _mlp_tensors(theirs, gate, up, state[f"{ours}.w2"])
            continue
        w1, w2 = state[f"{ours}.experts.w1"], state[f"{ours}.experts.w2"]
        for expert in range(config.moe.num_experts):
            gate, up = _split_gate_up(w1[expert], config.moe.gate_up)
            tensors |= _mlp_tensors(f"{theirs}.experts.{expert}", gate, up, w2[expert])
    return tensors


def from_hf_state_dict(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of ``DecoderLM(config)`` from hub-named tensors, or from experts stacked as in transformers 5.

    ``tensors`` may read lazily: each is asked for once.

    Raises:
        ValueError: a tensor is missing, unknown, or of the wrong shape; the message names it.
    """
    return dict(iter_from_hf(config, tensors))


def iter_from_hf(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`from_hf_state_dict` one parameter at a time, so that a large model need not be in memory twice."""
    hf_config_dict(config)
    expected = {name: tuple(t.shape) for name, t in DecoderLM(config, device="meta").state_dict().items()}
    taken: set[str] = set()

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"{name}: this tensor is missing from the checkpoint; is it of this configuration?")
        taken.add(name)
        return tensors[name]

    for ours, tensor in _parameters(config, take, tensors):
        if tuple(tensor.shape) != expected[ours]:
            raise ValueError(
                f"{ours} must be {expected[ours]} as the configuration says, but the checkpoint gives "
                f"{tuple(tensor.shape)}"
            )
        yield ours, tensor
    unknown = sorted(set(tensors) - taken - ({"lm_head.weight"} if config.tie_embeddings else set()))
    if unknown:
        raise ValueError(f"{unknown[0]}: the configuration has no such tensor")


def _parameters(
    config: ModelConfig, take: Callable[[str], Tensor], names: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor), each built from what ``take(their name)`` gives."""
    for ours, theirs in _plain_names(config):
        yield ours, take(theirs)
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
        if config.moe is None or not config.is_moe_layer(layer):
            yield f"{ours}.w1", torch.cat([take(f"{theirs}.gate_proj.weight"), take(f"{theirs}.up_proj.weight")])
            yield f"{ours}.w2", take(f"{theirs}.down_proj.weight")
            continue
        experts = [f"{theirs}.experts.{expert}" for expert in range(config.moe.num_experts)]
        if f"{theirs}.experts.gate_up_proj" in names:
            gate, up = take(f"{theirs}.experts.gate_up_proj").chunk(2, dim=1)
            w2 = take(f"{theirs}.experts.down_proj")
        else:
            gate, up, w2 = (
                torch.stack([take(f"{expert}.{name}.weight") for expert in experts])
                for name in ("gate_proj", "up_proj", "down_proj")
            )
        yield f"{ours}.experts.w1", _join_gate_up(gate, up, config.moe.gate_up)
        yield f"{ours}.experts.w2", w2


def _plain_names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(our name, their name) of every tensor that is the same on both sides."""
    yield "embed.weight", "model.embed_tokens.weight"
    for layer in range(config.num_layers):
        for ours, theirs in _BLOCK_NAMES:
            yield f"blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight"
        if config.is_moe_layer(layer):
            yield f"blocks.{layer}.mlp.router.weight", f"model.layers.{layer}.mlp.gate.weight"
    yield "norm.weight", "model.norm.weight"
    if not config.tie_embeddings:
        yield "head.weight", "lm_head.weight"


def _mlp_tensors(prefix: str, gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    parts = (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
    return {f"{prefix}.{name}.weight": tensor for name, tensor in parts}


def _split_gate_up(w1: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Views of the gate and up rows, (n, d) each, of w1 (2n, d)."""
    if layout == "interleaved":
        return w1[0::2], w1[1::2]
    n = w1.shape[0] // 2
    return w1[:n], w1[n:]


def _join_gate_up(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """w1 (E, 2n, d) of gate and up (E, n, d)."""
    return torch.stack([gate, up], dim=2).flatten(1, 2) if layout == "interleaved" else torch.cat([gate, up], dim=1)


# ----------------------------------------------------------------------------------------------------------- folders


def save_hf(model: DecoderLM, folder: str | Path, *, max_shard_bytes: int = 4 << 30) -> None:
    """Write config.json, generation_config.json and safetensors that ``AutoModelForCausalLM.from_pretrained`` loads.

    Weights keep their dtype; more than ``max_shard_bytes`` of them go to several files with an index. The folder,
    which must not exist or be empty, appears when all is written and synced, or not at all.

    Raises:
        ValueError: the folder is in use, or Qwen3-MoE cannot express the configuration.
    """
    out = Path(folder).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"folder {out} exists and is not an empty folder; choose another")
    tensors = to_hf_state_dict(model)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    config = {**hf_config_dict(model.config), "torch_dtype": dtype}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", {"do_sample": True})
        _write_shards(partial, tensors, max_shard_bytes)
        _sync(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync(out.parent)


def load_hf(
    folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> DecoderLM:
    """The model of a folder that ``save_hf`` or transformers wrote, or that was downloaded from the hub.

    ``dtype`` None keeps the default floating dtype of torch. One shard's tensors are read at a time.

    Raises:
        ValueError: a file is missing or damaged, or the checkpoint is not a Qwen3-MoE that `DecoderLM` implements.
    """
    path = Path(folder).expanduser()
    try:
        data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path / 'config.json'} cannot be read ({error}); give a folder with a model in it"
        ) from error
    config = config_from_hf(data)
    model = DecoderLM(config, device="meta", dtype=dtype).to_empty(device=device or "cpu")
    parameters = model.state_dict()
    with _SafetensorsFolder(path) as tensors, torch.no_grad():
        for name, tensor in iter_from_hf(config, tensors):
            parameters[name].copy_(tensor)
    return model


class _SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise ValueError(f"{folder} holds no model*.safetensors; give a folder with a model in it")
        for file in files:
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read ({error}); download or export it again") from error
            self._file_of |= dict.fromkeys(handle.keys(), handle)

    def __enter__(self) -> _SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _write_shards(folder: Path, tensors: dict[str, Tensor], max_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", tensors, shards[0])
        return
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, tensors, names)
        file_of |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": file_of})


def _write_shard(path: Path, tensors: dict[str, Tensor], names: list[str]) -> None:
    # transformers asks for this note of the framework.
    save_file({name: tensors[name].contiguous() for name in names}, path, metadata={"format": "pt"})
    _sync(path)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Have the file or folder on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Conversion between `DecoderLM` and Hugging Face's Qwen3-MoE, OLMoE and Mixtral: weights by name, folders on disk.

d model width · n expert width · E experts

``w1[e]`` (2n, d) holds the rows of expert e's gate and up matrices (n, d) in either gate_up layout, and ``w2[e]``
(d, n) is its down matrix.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilemoe.checks import parse_json, require_path
from tilemoe.config import ModelConfig
from tilemoe.files import read_text, staged_folder
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.layers.lora import has_lora
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.folder import CONFIG_FILE, find_folder, read_config
from tilemoe.models.hf_config import ARCHITECTURES, IN_BF16, Architecture, export_line, hf_config_dict, import_line
from tilemoe.models.sums import SHARD_BYTES, checked, sums_line
from tilemoe.runtime.tensors import is_finite, require_factory

MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_SHARD_NAME = r"[^/\\]+\.safetensors"  # a file in the folder itself: it has no system's path separator
_MOST_TENSORS = 1 << 18  # in a model, because each is looked at; DeepSeek-V3 has 91,991
_ALL = slice(None)
FLOATS = ("F64", "F32", "F16", "BF16")
_TABLE = ".tid2eid"  # DeepSeek-V4's experts of each token id, integers

# (our name within a block, their name within a layer) of tensors that differ only in name.
_BLOCK_NAMES = (
    ("attention_norm", "input_layernorm"),
    ("attention.q_proj", "self_attn.q_proj"),
    ("attention.k_proj", "self_attn.k_proj"),
    ("attention.v_proj", "self_attn.v_proj"),
    ("attention.o_proj", "self_attn.o_proj"),
    ("mlp_norm", "post_attention_layernorm"),
)
_QK_NORM_NAMES = (("attention.q_norm", "self_attn.q_norm"), ("attention.k_norm", "self_attn.k_norm"))


def to_hf_state_dict(model: DecoderLM) -> dict[str, Tensor]:
    """The weights under the names of checkpoints on the hub, one tensor per expert; views, detached, not copied.

    Raises:
        ValueError: as for `hf_config_dict`, or the model has adapters.
    """
    hf_config_dict(model.config)
    if has_lora(model):
        raise ValueError("the model has adapters, which these weights would lack; call merge_lora first")
    state = model.state_dict()
    return {piece.theirs: piece.of_ours(state[piece.ours]) for piece in pieces(model.config)}


def _require_shapes(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """ValueError if a checkpoint's tensor is missing, unknown, or of the wrong shape; the message names it.

    ``shapes``: by the hub's names; stacked experts by their names in transformers 5.
    """
    hf_config_dict(config)
    taken: set[str] = set()
    for piece in pieces(config, shapes):  # before a model is built of as many layers as config.json claims
        if piece.theirs not in shapes:
            raise ValueError(
                f"{piece.theirs}: this tensor is missing from the checkpoint; is it of this configuration?"
            )
        taken.add(piece.theirs)
    parameters = _meta_state(config)
    for piece in pieces(config, shapes):
        found = piece.of_theirs(torch.empty(shapes[piece.theirs], device="meta")).shape
        expected = piece.of_ours(parameters[piece.ours]).shape
        if found != expected:
            raise ValueError(
                f"{piece.theirs} must be {tuple(expected)} as the configuration says, but the checkpoint gives "
                f"{tuple(found)}"
            )
    unknown = sorted(shapes.keys() - taken - ({"lm_head.weight"} if config.tie_embeddings else set()))
    if unknown:
        raise ValueError(f"{unknown[0]}: the configuration has no such tensor")


def _tensor(file_of: dict[str, Any], name: str, device: torch.device | str) -> Tensor:
    """The tensor ``name``, on ``device``. ValueError: it has a NaN or an infinity."""
    tensor: Tensor = file_of[name].get_tensor(name).to(device)
    if not is_finite(tensor):
        raise ValueError(f"{name} is not finite; take the model from before it was, such as an earlier checkpoint")
    return tensor


def _meta_state(config: ModelConfig) -> dict[str, Tensor]:
    return DecoderLM(config, device="meta").state_dict()


def save_hf(
    model: DecoderLM,
    folder: str | Path,
    *,
    eos_token_id: int | list[int] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json and safetensors that ``AutoModelForCausalLM.from_pretrained`` loads.

    Weights keep their dtype. More than ``max_shard_bytes`` of them go to several files with an index. Contiguous CPU
    weights are written without a copy; others (on a GPU, or with gate and up interleaved) are copied first, one file's
    worth at a time. The folder must be empty or not exist yet; it appears when everything is written and synced, or not
    at all. ``eos_token_id``: the token or tokens at which generation ends; None: there is none.

    Raises:
        ValueError: the folder is in use, the architecture cannot express the configuration, or the model has adapters.

    Examples:
        >>> from tilemoe.models.huggingface import save_hf
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> save_hf(tilemoe.DecoderLM(config), "exported")
        >>> sorted(path.name for path in Path("exported").iterdir())
        ['config.json', 'generation_config.json', 'model.safetensors']
    """
    out = require_path("folder", folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"folder {out} exists and is not an empty folder; choose another")
    if line := export_line(model.config):
        warnings.warn(line, stacklevel=2)
    with staged_folder(out) as partial:
        write_hf(model, partial, eos_token_id=eos_token_id, max_shard_bytes=max_shard_bytes)


def write_hf(
    model: DecoderLM, folder: Path, *, eos_token_id: int | list[int] | None = None, max_shard_bytes: int = SHARD_BYTES
) -> None:
    """`save_hf` into an existing folder, without syncing. ValueError: as for `to_hf_state_dict`."""
    tensors = to_hf_state_dict(model)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    config = {**hf_config_dict(model.config), "eos_token_id": eos_token_id, "torch_dtype": dtype}
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": eos_token_id})
    _write_shards(folder, tensors, max_shard_bytes)


def load_hf(
    folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> DecoderLM:
    """The model in a folder that ``save_hf`` or transformers wrote, or by its name on the hub, as with ``--init-from``.

    ``dtype`` None: torch's default floating dtype. Memory holds at most one of the folder's tensors besides the model:
    each is copied into its parameter as it is read. Meanwhile the files of an export are compared to its checksums.
    Warns if there are no checksums, and if training adds no auxiliary loss, as in transformers.

    Raises:
        ValueError: a file is missing or damaged, a weight is not finite, or `DecoderLM` does not implement the model.

    Examples:
        >>> from tilemoe.models.huggingface import save_hf
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> save_hf(tilemoe.DecoderLM(config), "folder")
        >>> tilemoe.load_hf("folder", dtype=torch.bfloat16).embed.weight.shape
        torch.Size([64, 32])
    """
    require_factory(device, dtype, FLOAT_DTYPES)
    path = find_folder("folder", str(require_path("folder", folder)))
    with checked(path):
        model = read_model(path, device, dtype)
    for line in filter(None, (import_line(model.config), sums_line(path))):
        warnings.warn(line, stacklevel=2)
    return model


def read_model(path: Path, device: torch.device | str | None, dtype: torch.dtype | None) -> DecoderLM:
    """`load_hf` of a folder, without its warnings and without checksums."""
    config = read_config(path)
    with opened(path) as file_of, torch.no_grad():
        _require_shapes(config, _shapes(file_of))
        model = DecoderLM(config, device="meta", dtype=dtype).to_empty(device=device or "cpu")
        parameters = model.state_dict()
        for piece in pieces(config, file_of):
            tensor = _tensor(file_of, piece.theirs, device or "cpu")
            piece.of_ours(parameters[piece.ours]).copy_(piece.of_theirs(tensor))
    return model


def require_weights(folder: Path, config: ModelConfig) -> None:
    """ValueError as in `_require_shapes`; for use before memory is allocated for the sizes that config.json claims."""
    with opened(folder) as file_of:
        _require_shapes(config, _shapes(file_of))


def is_in_bf16(folder: Path) -> bool:
    """Whether every weight in transformers' ``folder`` is bf16."""
    with opened(folder) as file_of:
        return all(file.get_slice(name).get_dtype() == "BF16" for name, file in file_of.items())


def _shapes(file_of: dict[str, Any]) -> dict[str, list[int]]:
    return {name: file.get_slice(name).get_shape() for name, file in file_of.items()}


def whole_parameters(
    folder: Path, config: ModelConfig, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Each of our parameters by name, assembled on ``device`` from the folder's tensors; memory holds one at a time.

    Raises:
        ValueError: as for `_require_shapes`, or a file is missing or damaged.
    """
    name, whole = "", torch.empty(0)
    with opened(folder) as file_of:
        _require_shapes(config, _shapes(file_of))
        shapes = _meta_state(config)
        for piece in pieces(config, file_of):
            tensor = _tensor(file_of, piece.theirs, device)
            if piece.ours != name:  # the pieces of a parameter are consecutive
                if name:
                    yield name, whole
                name, whole = piece.ours, tensor.new_empty(shapes[piece.ours].shape)
            piece.of_ours(whole).copy_(piece.of_theirs(tensor))
    yield name, whole


@contextmanager
def opened(folder: Path, dtypes: Collection[str] | None = FLOATS) -> Iterator[dict[str, Any]]:
    """Tensor name -> the open safetensors file that holds it, for every tensor of the folder's model.

    The index says which file holds a tensor; without an index it is model.safetensors, or else any of the shards.

    Raises:
        ValueError: a file or a tensor is missing or damaged, or a tensor is in two files or of a dtype that is not in
            ``dtypes`` (None: any); the message names it.
    """
    has_index = (folder / INDEX_FILE).exists()
    listed = _read_index(folder / INDEX_FILE) if has_index else {}
    alone = [folder / MODEL_FILE] if (folder / MODEL_FILE).exists() else sorted(folder.glob("model*.safetensors"))
    files = [folder / name for name in sorted(listed)] if has_index else alone
    if not files:
        raise ValueError(f"{folder} holds no model*.safetensors; give a folder with a model in it")
    file_of: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file} is missing, which {INDEX_FILE} lists; download or export the model again")
            _require_inside(file)
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read ({error}); download or export it again") from error
            held = set(handle.keys())
            names = listed[file.name] if has_index else held
            if len(file_of) + len(held) > _MOST_TENSORS:
                raise ValueError(f"{file}: more than {_MOST_TENSORS:,} tensors, which no model has; take its own files")
            for name in sorted(names - held):
                raise ValueError(f"{file} lacks {name}, which {INDEX_FILE} says it has; download or export it again")
            for name in sorted(names & file_of.keys()):
                raise ValueError(f"{file} has {name}, which another file has, too; keep the model's own files alone")
            for name in sorted(names):
                dtype = handle.get_slice(name).get_dtype()
                if dtypes is not None and dtype not in dtypes and not name.endswith(_TABLE):
                    raise ValueError(f"{file} has {name} in {dtype}, which are no floats to compute with; {IN_BF16}")
            file_of |= dict.fromkeys(names, handle)
        try:
            yield file_of
        except ValueError as error:  # about a tensor; the message lacks the folder
            raise ValueError(f"{folder}: {error}") from error


def _require_inside(file: Path) -> None:
    """ValueError if ``file`` is a link out of its folder, unless it leads into the hub's cache."""
    target = file.resolve()
    is_of_hub = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
    if target.parent != file.parent.resolve() and not is_of_hub:
        raise ValueError(f"{file} is a link to {target}, out of the folder; put the file itself there")


def _read_index(path: Path) -> dict[str, set[str]]:
    """File name -> names of its tensors. ValueError: the index is damaged, or a file's name leads out of the folder."""
    fix = "download or export the model again"
    try:
        listed = parse_json(read_text(path))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {fix}") from error
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{path}: weight_map must be a table of tensors and files; {fix}")
    tensors_of: dict[str, set[str]] = {}
    for tensor, name in listed.items():
        if not isinstance(name, str) or re.fullmatch(_SHARD_NAME, name) is None:
            raise ValueError(f"{path}: the file of {tensor}, {name!r}, is no .safetensors file of this folder; {fix}")
        tensors_of.setdefault(name, set()).add(tensor)
    return tensors_of


def _write_shards(folder: Path, tensors: dict[str, Tensor], max_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = MODEL_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # transformers requires this metadata.
        save_file({name: tensors[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors creates it for its owner only
        file_of |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": file_of})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


class Piece(NamedTuple):
    """Rows of our parameter ``ours`` (of one expert, if given) that equal ``their_rows`` of the tensor ``theirs``."""

    ours: str
    theirs: str
    expert: int | None = None
    rows: slice = _ALL
    their_rows: slice = _ALL

    def of_ours(self, parameter: Tensor) -> Tensor:
        """These rows of our parameter, as a view."""
        part = parameter if self.expert is None else parameter[self.expert]
        return part if self.rows == _ALL else part[..., self.rows, :]

    def of_theirs(self, tensor: Tensor) -> Tensor:
        """These rows of the checkpoint's tensor, as a view."""
        return tensor if self.their_rows == _ALL else tensor[..., self.their_rows, :]


def pieces(config: ModelConfig, present: Container[str] = ()) -> Iterator[Piece]:
    """The pieces of every parameter; those of one parameter are consecutive and cover it.

    Names are those of checkpoints on the hub, with one tensor per expert's matrix. ``present``: the checkpoint's names.
    Where these have a layer's experts stacked, as transformers 5 holds them in memory, the names are the stacked ones.
    """
    architecture = ARCHITECTURES[config.qk_norm]
    yield Piece("embed.weight", "model.embed_tokens.weight")
    block_names = _BLOCK_NAMES + (() if config.qk_norm == "none" else _QK_NORM_NAMES)
    for layer in range(config.num_layers):
        for ours, theirs in block_names:
            yield Piece(f"blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight")
        if config.is_moe_layer(layer):
            yield from _moe_pieces(config, architecture, layer, present)
        else:
            ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
            n = config.dense_intermediate_size
            yield Piece(f"{ours}.w1", f"{theirs}.gate_proj.weight", rows=slice(0, n))
            yield Piece(f"{ours}.w1", f"{theirs}.up_proj.weight", rows=slice(n, 2 * n))
            yield Piece(f"{ours}.w2", f"{theirs}.down_proj.weight")
    yield Piece("norm.weight", "model.norm.weight")
    if not config.tie_embeddings:
        yield Piece("head.weight", "lm_head.weight")


def _moe_pieces(
    config: ModelConfig, architecture: Architecture, layer: int, present: Container[str]
) -> Iterator[Piece]:
    assert config.moe is not None
    n = config.moe.intermediate_size
    concatenated = slice(0, n), slice(n, 2 * n)
    gate, up = concatenated if config.moe.gate_up == "concatenated" else (slice(0, None, 2), slice(1, None, 2))
    ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
    if f"{theirs}.experts.gate_up_proj" in present:
        yield Piece(f"{ours}.router.weight", f"{theirs}.gate.weight")
        for rows, their_rows in zip((gate, up), concatenated, strict=True):
            yield Piece(f"{ours}.experts.w1", f"{theirs}.experts.gate_up_proj", rows=rows, their_rows=their_rows)
        yield Piece(f"{ours}.experts.w2", f"{theirs}.experts.down_proj")
        return
    theirs = f"model.layers.{layer}.{architecture.mlp}"
    yield Piece(f"{ours}.router.weight", f"{theirs}.gate.weight")
    for expert in range(config.moe.num_experts):
        name = f"{theirs}.experts.{expert}"
        yield Piece(f"{ours}.experts.w1", f"{name}.{architecture.gate}.weight", expert, gate)
        yield Piece(f"{ours}.experts.w1", f"{name}.{architecture.up}.weight", expert, up)
    for expert in range(config.moe.num_experts):
        yield Piece(f"{ours}.experts.w2", f"{theirs}.experts.{expert}.{architecture.down}.weight", expert)

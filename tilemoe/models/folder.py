"""Model folders: find the one that a name means, and read transformers' config.json. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilemoe.checks import expand_user, parse_json, told
from tilemoe.config import ModelConfig
from tilemoe.files import read_text
from tilemoe.models.flops import count_parameters
from tilemoe.models.hf_config import config_from_hf
from tilemoe.models.sums import SUMS_FILE

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
_HUB_NAME = r"[\w.-]+/[\w.-]+"
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def find_folder(option: str, name: str, files: Sequence[str] = _HUB_FILES) -> Path:
    """The folder that ``option NAME`` means: an existing one, or ``files`` of a model on the hub, perhaps cached.

    Raises:
        ValueError: there is no such folder, and the hub gives no such model.
    """
    folder = expand_user(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{option} {name} is a file; give its folder")
    missing = f"{option} {name}: no such folder"
    if re.fullmatch(_HUB_NAME, name) is None:
        raise ValueError(f"{missing}; give a run, a step_* folder, or transformers' folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(f"{missing}; for a model of the hub: pip install huggingface_hub") from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError) as error:  # the library's own errors are among them
        raise ValueError(f"{missing}, and the hub does not give it ({told(error)[:200]})") from error


def is_hf(folder: Path) -> bool:
    """Whether ``folder`` is a model folder of transformers, such as an export, not a checkpoint of ours."""
    return (folder / CONFIG_FILE).exists() or (folder / SUMS_FILE).exists()


def read_config(folder: Path) -> ModelConfig:
    """The folder's config.json. ValueError: it cannot be read, or `DecoderLM` does not implement it."""
    path = folder / CONFIG_FILE
    data = read_settings(path)
    try:
        config = config_from_hf(data)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    require_bytes(config, sum(file.stat().st_size for file in folder.glob("*.safetensors")), str(path))
    return config


def read_settings(path: Path, folder: str = "a folder with a model in it") -> Any:
    """The contents of a config.json; ValueError, which asks for ``folder``, if it cannot be read."""
    try:
        return parse_json(read_text(path), _float_or_dict)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give {folder}") from error


def _float_or_dict(entry: dict[str, Any]) -> Any:
    """transformers writes a float that JSON lacks as ``{"__float__": "Infinity"}``."""
    is_float = entry.keys() == {"__float__"} and entry["__float__"] in ("NaN", "Infinity", "-Infinity")
    return float(entry["__float__"]) if is_float else entry


def require_bytes(config: ModelConfig, size: int, where: str) -> None:
    """ValueError if files of ``size`` bytes (0: there are none) cannot hold the parameters that ``where`` claims.

    No parameter is smaller than a byte. Call it before allocating memory for them or looping over them.
    """
    parameters = count_parameters(config)
    if 0 < size < parameters:
        raise ValueError(f"{where} claims {parameters:,} parameters, and the files have {size:,} bytes; correct it")


def hf_tokenizer(folder: Path) -> str:
    """The path from which `tilemoe.data.load_tokenizer` loads the tokenizer of transformers' folder."""
    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise ValueError(f"{folder} has no {TOKENIZER_FILE}; save the model's tokenizer there")
    return str(path)

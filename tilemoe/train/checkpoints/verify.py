"""Verify a folder of checkpoints or of a model by reading all of it: what it is, and whether it is intact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilemoe.checks import told
from tilemoe.models.folder import CONFIG_FILE, is_hf, read_config, read_settings
from tilemoe.models.hf_base import why_base
from tilemoe.models.huggingface import opened, whole_parameters
from tilemoe.models.sums import SUMS_FILE, checked
from tilemoe.train.checkpoints.folder import MANIFEST_FILE, open_checkpoint
from tilemoe.train.checkpoints.names import is_step_dir, list_checkpoints


@dataclass(frozen=True)
class Finding:
    """One checkpoint or model: a line that says what it is, or what is wrong."""

    line: str
    is_right: bool


def verify(folder: Path) -> Iterator[Finding]:
    """A finding for a transformers model or a checkpoint, or for each checkpoint of a run's folder, oldest first.

    A checkpoint that a training drops meanwhile is not wrong. ValueError: ``folder`` is none of these.
    """
    if is_hf(folder) or is_step_dir(folder) or (folder / MANIFEST_FILE).exists():
        paths = [folder]
    else:
        paths = list_checkpoints(folder)
    if not paths:
        raise ValueError(f"{folder} holds no step_* folder; give a run, a step_* folder, or transformers' folder")
    for path in paths:
        finding = _find(path)
        is_dropped = path != folder and folder.exists() and not path.exists()
        yield Finding(f"{path}: deleted meanwhile, perhaps by a training", True) if is_dropped else finding


def _find(path: Path) -> Finding:
    try:
        read = _of_model if (path / CONFIG_FILE).exists() else _of_export if is_hf(path) else _of_checkpoint
        return Finding(f"{path}: {read(path)}", True)
    except (ValueError, OSError) as error:
        return Finding(told(error), False)


def _of_checkpoint(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    with checkpoint.compared(), checkpoint.readable():
        if checkpoint.is_sharded:
            checkpoint.open_tensors()
    whose = "a job" if checkpoint.is_sharded else "one process"
    size = sum((path / name).stat().st_size for name in checkpoint.files)
    state = checkpoint.state
    what = f"checkpoint of {state.recipe.name} at step {state.step}, by {whose}"
    return f"{what}, {len(checkpoint.files)} files, {size / 1e6:,.1f} MB: every byte is as its manifest says"


def _of_export(path: Path) -> str:
    with checked(path):
        return "exported adapters: every byte is as its checksums say"


def _of_model(path: Path) -> str:
    """Read all that `load_hf` would read, with one parameter at a time in memory; of another class, every tensor."""
    is_ours = why_base(path) is None and not read_settings(path / CONFIG_FILE).get("quantization_config")
    with checked(path):
        if is_ours:
            count = sum(tensor.numel() for _, tensor in whole_parameters(path, read_config(path)))
        else:
            with opened(path, dtypes=None) as file_of:
                count = sum(file.get_tensor(name).numel() for name, file in file_of.items())
    bare = f"{'complete' if is_ours else 'readable'}, without {SUMS_FILE} to compare it to"
    found = "every byte is as its checksums say" if (path / SUMS_FILE).exists() else bare
    return f"model of transformers, {count:,} {'parameters' if is_ours else 'values'}: {found}"

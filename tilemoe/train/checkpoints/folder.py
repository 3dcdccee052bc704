"""Checkpoints of a run, written atomically: each is either complete or absent.

A run's folder holds one folder per checkpoint::

    step_00001234/
        model.safetensors      weights and buffers
        optimizer.safetensors  the optimiser's state, by parameter name; with adapters, of the trained weights alone
        state.json             recipe, step, tokens, random-number states (hex), versions
        tokenizer.json         unless the tokenizer is the plain bytes; tokenizer_config.json holds its chat template
        manifest.json          size and SHA-256 of each file above, and of itself

A job of several processes writes other files instead of the first two, see `tilemoe.train.checkpoints.distributed`.
A checkpoint is written under a temporary name, synced and renamed. No pickle is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import nn

from tilemoe.checks import parse_json, told
from tilemoe.config import ModelConfig, to_dict
from tilemoe.data.tokenizer import BYTES, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, Tokenizer
from tilemoe.files import fsync, read_text, rename_synced
from tilemoe.layers.lora import adapter_names, packed_weights
from tilemoe.models.folder import require_bytes
from tilemoe.models.hf_base import HFBase
from tilemoe.models.sums import (
    Damage,
    Entries,
    canonical,
    compared,
    file_entries,
    manifest_of,
    read_manifest,
    require_files,
    require_sizes,
)
from tilemoe.train.checkpoints.metadata import METADATA_FILE, StoredTensor, open_tensors
from tilemoe.train.checkpoints.names import (
    GONE,
    STATE_FILE,
    delete_files,
    is_step_dir,
    list_checkpoints,
    step_dir,
    step_of,
    temporary_of,
)
from tilemoe.train.checkpoints.pickled import read_pickled
from tilemoe.train.checkpoints.sharded_state import (
    is_shared,
    read_model,
    read_training,
    read_whole,
    set_random,
    whole_tensors,
)
from tilemoe.train.config import Recipe, differences, parse_recipe
from tilemoe.train.finite import find_non_finite

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
TOKENIZER_FILE, MANIFEST_FILE = "tokenizer.json", "manifest.json"
FORMAT = 1
_READ = frozenset(  # files that are read by a fixed name
    {METADATA_FILE, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE}
)
_OF_TENSORS = (".safetensors", ".distcp")


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, trusted or used; one line names it and the fix."""


@dataclass(frozen=True)
class TrainState:
    """The progress and the recipe of a run, without its tensors."""

    recipe: Recipe
    step: int  # optimiser steps done
    tokens: int  # training tokens seen by all ranks together
    seconds: float  # of training, summed over resumed runs
    data_fingerprint: str  # of the token shards it was trained on
    processes: int = 1  # number of processes that shared a step's sequences; 0: not known


def publish(
    target: Path, state: bytes, tokenizer: Tokenizer, hashed: dict[str, Any], tensors: dict[str, Any] | None = None
) -> None:
    """Complete a checkpoint whose tensors are written: sync its files and rename it to ``target``.

    hashed: manifest entries of files that are hashed already; all other files are hashed here.
    tensors: the places of a job's tensors, for the manifest.
    """
    temporary = temporary_of(target)
    (temporary / STATE_FILE).write_bytes(state)
    if tokenizer.name != BYTES:
        tokenizer.save(temporary / TOKENIZER_FILE)
    unhashed = (path for path in temporary.iterdir() if path.name not in hashed)
    entries = hashed | file_entries(unhashed)
    (temporary / MANIFEST_FILE).write_bytes(manifest_of(entries, tensors))
    for path in temporary.iterdir():
        fsync(path)
    fsync(temporary)
    rename_synced(temporary, target)


def write_error(target: Path, error: BaseException | str) -> CheckpointError:
    """The error for a checkpoint that could not be written; it names the newest one that exists."""
    older = list_checkpoints(target.parent)
    kept = f"the newest one is {older[-1]}" if older else "there is no older one"
    return CheckpointError(f"could not write checkpoint {target} ({error}); {kept}; free space and resume")


def drop_old(newest: Path, keep_last: int) -> None:
    """Delete our checkpoints up to ``newest`` except the last ``keep_last``: of each, the files that its manifest
    lists.

    Links and folders that are not ours stay. So does, with a warning, one that is read-only or holds something else.
    """
    there = (path for path in list_checkpoints(newest.parent) if step_of(path) <= step_of(newest))
    ours = [(path, files) for path in there if (files := own_files(path))]
    for path, files in ours[:-keep_last]:
        other = _first_other(path, files)
        if other is None and os.access(path, os.W_OK):
            delete_files(path, files)
            continue
        theirs = f"{path} is not deleted: tilemoe did not write {told(other or '')} in it; move that away"
        warnings.warn(theirs if other else f"{path} is not deleted: it is read-only", stacklevel=2)


def own_files(path: Path) -> list[str]:
    """The files that our checkpoint's manifest lists; empty if ``path`` is no such checkpoint, a link or renamed."""
    is_ours = not path.is_symlink() and path == step_dir(path.parent, step_of(path))
    try:
        return [] if not is_ours else [*_read_manifest(path)[0], MANIFEST_FILE]
    except (ValueError, OSError):
        return []


def _first_other(path: Path, files: list[str]) -> str | None:
    """The first name in a checkpoint's folder that is not one of its ``files``; None: there is no other."""
    others = (e.name for e in os.scandir(path) if e.name not in files or e.is_dir(follow_symlinks=False))
    return min(others, default=None)


def state_json(state: TrainState) -> bytes:
    """Content of STATE_FILE, with this process' random-number states."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return canonical(
        {
            **to_dict(state),
            "format": FORMAT,
            "torch": torch.__version__,
            "rng_cpu": torch.get_rng_state().numpy().tobytes().hex(),
            "rng_cuda": [generator.numpy().tobytes().hex() for generator in cuda],
        }
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint from `open_checkpoint`. The content of the tensors' files is not verified yet, see `compared`.

    files: the manifest's entry of each file that it lists; no other file of the folder is read.
    tensors: the places of a job's tensors in the manifest; None: an older manifest, which has none.
    newer: names of later checkpoints beside it; a run that goes on from it sets these aside, and no others.
    """

    path: Path
    state: TrainState
    rng_cpu: str
    rng_cuda: list[str]
    files: Entries
    tensors: Any
    newer: frozenset[str] = frozenset()

    @property
    def is_sharded(self) -> bool:
        """Whether a job wrote the tensors, into torch.distributed.checkpoint's files."""
        return METADATA_FILE in self.files

    @property
    def tokenizer_spec(self) -> str:
        """The ``spec`` from which ``tilemoe.data.load_tokenizer`` makes the run's tokenizer without its corpus."""
        is_saved = TOKENIZER_FILE in self.files
        return str(self.path / TOKENIZER_FILE) if is_saved else self.state.recipe.data.tokenizer

    def open_tensors(self) -> dict[str, StoredTensor]:
        """The tensors that a job wrote, not read yet. ValueError: their description in the checkpoint is impossible."""
        placed = read_pickled(self.path / METADATA_FILE) if self.tensors is None else self.tensors
        return open_tensors(self.path, {name: entry["bytes"] for name, entry in self.files.items()}, placed)

    @contextlib.contextmanager
    def compared(self, share: slice = slice(None), without: str = "") -> Iterator[None]:
        """While the block reads the tensors, threads compare their files, or a ``share`` of them, to the manifest, but
        none by the name ``without``. What the block has read of the others is good if this ends without an error.
        CheckpointError: a file has changed.
        """
        names = sorted(name for name in self.files if name.endswith(_OF_TENSORS) and name != without)[share]
        try:
            with compared(self.path, {name: self.files[name] for name in names}):
                yield
        except Damage as damage:
            raise _damaged(self.path, str(damage)) from None

    @contextlib.contextmanager
    def _tensors(self) -> Iterator[dict[str, Any]]:
        with self.readable(), contextlib.ExitStack() as stack:
            files = self.path / MODEL_FILE, self.path / OPTIMIZER_FILE
            yield self.open_tensors() if self.is_sharded else stack.enter_context(whole_tensors(*files))

    def require_model(self, config: ModelConfig | HFBase) -> None:
        """Raise unless this checkpoint's model is ``config``; the error names the first setting that differs.

        How experts compute and save may differ: their weights are the same.
        """
        ours, saved = _architecture(config), _architecture(self.state.recipe.model)
        difference = next(differences(ours, saved, "model."), None)
        if difference is not None:
            raise CheckpointError(
                f"checkpoint {self.path} is of another model: {difference}; "
                "use the settings it was trained with, or another train.out_dir"
            )

    def refuse_non_finite(self, name: str) -> NoReturn:
        raise CheckpointError(f"checkpoint {self.path}: {name} is not finite; take an earlier checkpoint")

    def load_model(self, model: nn.Module) -> None:
        """Copy weights and buffers into ``model``, on any device; of a sharded model, this process' shards.

        If the checkpoint has no adapters, those of ``model`` keep their values, and its experts may be stored in 4
        bits. CheckpointError: see `compared`, or a value is not finite.
        """
        is_plain = self.state.recipe.lora is None
        packed = packed_weights(model) if is_plain else {}
        absent = adapter_names(model) if is_plain else set()
        with self.compared(without=OPTIMIZER_FILE), self._tensors() as held:
            for weight, (module, names) in packed.items():
                module.pack(weight.rpartition(".")[2], read_whole(held, weight))
                absent |= {weight, *names}
            read_model(held, model, absent)
        if name := find_non_finite(model):
            self.refuse_non_finite(name)

    def load_training(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Restore weights, optimiser state and torch's random-number states, bit for bit; call it within `compared`.

        Any number of processes can read what one process or a job has written. A rank restores its own random-number
        state; if none was saved for it, as where a job goes on from a single process, it keeps its present one.
        """
        with self._tensors() as held:
            read_training(held, model, optimizer)
            if self.is_sharded or is_shared(model):
                return
            set_random("rng_cpu", _rng_tensor(self.rng_cpu), torch.set_rng_state)
            if self.rng_cuda and torch.cuda.device_count() == len(self.rng_cuda):
                set_random("rng_cuda", [_rng_tensor(text) for text in self.rng_cuda], torch.cuda.set_rng_state_all)

    def require_bytes(self) -> None:
        """CheckpointError if its model has more parameters than its files can hold; call it before taking memory."""
        if isinstance(self.state.recipe.model, HFBase):  # its files hold the adapters alone
            return
        with self.readable():
            require_bytes(self.state.recipe.model, sum(entry["bytes"] for entry in self.files.values()), STATE_FILE)

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Within the block, errors from bad content of its files become a CheckpointError that names the checkpoint."""
        try:
            yield
        except (ValueError, SafetensorError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {self.path} cannot be used: {told(error)}") from error


def _architecture(config: ModelConfig | HFBase) -> dict[str, Any]:
    """The settings that decide which weights there are and what they mean: all except how experts compute and save, and
    the folder of a base.
    """
    if isinstance(config, HFBase):
        return to_dict(replace(config, folder="any"))
    moe = config.moe
    if moe is None:
        return to_dict(config)
    return to_dict(replace(config, moe=replace(moe, precision="bf16", save="full", invariance="none")))


def _rng_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's state and verify its folder, except for the content of tensors (`Checkpoint.compared`).

    CheckpointError: a file is missing, cut short or changed; the message names it.
    """
    try:
        files, tensors = _read_manifest(path)
        require_sizes(path, files)
        require_files(path, {name: entry for name, entry in files.items() if not name.endswith(_OF_TENSORS)})
    except ValueError as damage:
        raise _damaged(path, str(damage)) from None
    unlisted = sorted(name for name in _READ - files.keys() if (path / name).exists())
    if unlisted:
        raise CheckpointError(
            f"checkpoint {path} is not to be trusted: {unlisted[0]} is not listed in {MANIFEST_FILE}; remove that file"
        )
    try:
        data = parse_json(read_text(path / STATE_FILE))
    except ValueError as error:
        raise _damaged(path, f"{STATE_FILE} cannot be read ({told(error)})") from None
    _require_state(path, data)
    if data["format"] != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {data['format']}, this tilemoe reads {FORMAT}; upgrade it")
    own_name = step_dir(path.parent, data["step"]).name
    if is_step_dir(path) and path.name != own_name:
        raise CheckpointError(
            f"checkpoint {path} was renamed: {STATE_FILE} says step {data['step']}; name it {own_name} again, or move "
            "it out of the run's folder"
        )
    recipe = parse_recipe(json.dumps(data["recipe"]), f"checkpoint {path}")
    if TOKENIZER_FILE not in files and recipe.data.tokenizer != BYTES:
        raise _damaged(path, f"{TOKENIZER_FILE} is not listed in {MANIFEST_FILE}")
    processes = data.get("processes", 0)  # releases up to 0.1.0 did not write it
    state = TrainState(recipe, data["step"], data["tokens"], data["seconds"], data["data_fingerprint"], processes)
    newer = frozenset(other.name for other in list_checkpoints(path.parent, after=state.step))
    return Checkpoint(path, state, data["rng_cpu"], data["rng_cuda"], files, tensors, newer)


def _require_state(path: Path, data: Any) -> None:
    """CheckpointError if state.json, which anybody may have written, lacks an entry or has one of a wrong type."""
    types = {"format": int, "recipe": dict, "step": int, "tokens": int, "seconds": float, "data_fingerprint": str}
    types |= {"rng_cpu": str, "rng_cuda": list, "processes": int}
    found = {"processes": 0, **data} if isinstance(data, dict) else {}
    for name, kind in types.items():
        value: Any = found.get(name)
        if kind in (int, float):
            is_right = type(value) in (int, kind) and 0 <= value < 1 << 63
        else:
            is_right = isinstance(value, kind)
        if not is_right:
            raise _damaged(path, f"{STATE_FILE} has no {name} of type {kind.__name__}")


def _read_manifest(path: Path) -> tuple[Entries, Any]:
    """The manifest's entries of files, and its places of a job's tensors. ValueError: it cannot be read, or does not
    list a file that the checkpoint needs.
    """
    manifest = read_manifest(path / MANIFEST_FILE)
    files: Entries = manifest["files"]
    needed = {STATE_FILE} if METADATA_FILE in files else {STATE_FILE, MODEL_FILE, OPTIMIZER_FILE}
    if needed - files.keys():
        raise ValueError(f"{min(needed - files.keys())} is not listed in {MANIFEST_FILE}")
    return files, manifest.get("tensors")


def _is_intact(path: Path) -> bool:
    try:
        require_files(path, _read_manifest(path)[0])
    except ValueError:
        return False
    return True


def _damaged(path: Path, what: str) -> CheckpointError:
    """The error for a damaged checkpoint. It names the newest intact older one, which is never loaded in its place."""
    if not path.exists():
        return CheckpointError(f"checkpoint {path} {GONE}")
    candidates = list_checkpoints(path.parent)
    before = candidates[: candidates.index(path)] if path in candidates else []
    older = next((candidate for candidate in reversed(before) if _is_intact(candidate)), None)
    fix = f"resume from the older one with --resume {older}" if older else "no older one is intact: start a new run"
    return CheckpointError(f"checkpoint {path} is damaged: {what}; {fix}")


def find_latest(run_dir: Path) -> Checkpoint | None:
    """The run's newest checkpoint, opened by `open_checkpoint`; None: the run has none."""
    candidates = list_checkpoints(run_dir)
    return replace(open_checkpoint(candidates[-1]), newer=frozenset()) if candidates else None


def resolve_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in ``path``: a run's folder (its newest checkpoint, by `find_latest`) or a checkpoint's folder."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint: no folder {path}; give a run's folder or one of its step_* folders")
    if is_step_dir(path) or (path / MANIFEST_FILE).exists():
        return open_checkpoint(path)
    found = find_latest(path)
    if found is None:
        raise CheckpointError(f"checkpoint: {path} holds no step_* folder; give a run's folder or a step_* folder")
    return found

"""``tilemoe eval``: the held-out loss of a checkpoint, on its own corpus or another, or of a model of transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tilemoe.checks import require_int
from tilemoe.cli.parsing import parse
from tilemoe.files import default_cache_dir
from tilemoe.models.folder import find_folder, hf_tokenizer, is_hf, read_config
from tilemoe.models.sums import sums_line
from tilemoe.train.checkpoints.names import read_newest
from tilemoe.train.config import DataConfig

if TYPE_CHECKING:
    from tilemoe.data import Prepared
    from tilemoe.integrations.hf_decoder import HFDecoder
    from tilemoe.models.decoder import DecoderLM
    from tilemoe.train.evaluate import Evaluation

_SEQ_LEN, _BATCH_SIZE = 2048, 8  # for transformers' folder, which does not say


@dataclass(frozen=True)
class EvalOptions:
    """Options of ``tilemoe eval``. Defaults are the settings that a checkpoint was trained with."""

    checkpoint: str  # a run's folder (its newest checkpoint), a step_* folder, transformers' folder, a name on the hub
    corpus: str | None = None  # "stdlib", a file or a folder; default: the training's; transformers' folder needs one
    format: Literal["text", "chat"] | None = None  # as of `tilemoe train`; default: the training's, else text
    too_long: Literal["error", "skip", "truncate"] | None = None  # chat: as of `tilemoe train`; default: the training's
    undecodable: Literal["error", "replace"] | None = None  # as of `tilemoe train`; default: the training's, else error
    longest_line: int | None = None  # as of `tilemoe train`; default: the training's, else 67108864
    heldout_every: int | None = None  # every N-th document is held out, and read; default: the training's, else 20
    batches: int = 0  # batches to read, spread over the held-out split; 0: all of it
    batch_size: int | None = None  # sequences per batch; default: the training's, else 8
    seq_len: int | None = None  # tokens per sequence; default: the training's, else 2048 or the model's longest
    precision: Literal["fp32", "bf16"] | None = None  # bf16: autocast; default: the training's if fast here, else fp32
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one

    def __post_init__(self) -> None:
        require_int("--batches", self.batches, 0)
        for name, value, least in (
            ("heldout-every", self.heldout_every, 2),
            ("batch-size", self.batch_size, 1),
            ("seq-len", self.seq_len, 1),
            ("longest-line", self.longest_line, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"--{name} must be >= {least}, got {value}")

    def settings(self, default: DataConfig, max_seq_len: int) -> DataConfig:
        """``default`` with the settings that the options override."""
        if self.seq_len is not None and self.seq_len > max_seq_len:
            raise ValueError(f"--seq-len ({self.seq_len}) must not exceed the {max_seq_len} that the model takes")
        if self.corpus is not None:
            default = replace(default, sources=())
        known = {each.name for each in fields(default)}
        given = {name: value for name, value in vars(self).items() if name in known and value is not None}
        return replace(default, **given)


@dataclass(frozen=True)
class Subject:
    """The model, the data and the settings of an evaluation."""

    path: Path
    model: DecoderLM | HFDecoder
    data: Prepared
    settings: DataConfig
    precision: Literal["fp32", "bf16"]


def run(arguments: Sequence[str]) -> None:
    options = parse(EvalOptions, arguments, prog="tilemoe eval", description="Held-out loss of a model on a corpus.")
    folder = find_folder("--checkpoint", options.checkpoint)
    if is_hf(folder):
        subject = _of_transformers(folder, options)
    else:
        subject = read_newest(folder, lambda: _of_checkpoint(folder, options))
    result = _evaluate(subject, options.batches)
    print(f"checkpoint {subject.path}, {result}")
    print(f"held-out loss {result.shown(2)}" + ("" if result.whole_split else ", subset"))


def _of_checkpoint(folder: Path, options: EvalOptions) -> Subject:
    import torch

    from tilemoe.integrations.hf_decoder import HFDecoder
    from tilemoe.runtime.device import has_fast_gemm
    from tilemoe.train.checkpoints.restore import restore
    from tilemoe.train.datasets import prepare_data
    from tilemoe.train.loop import data_fingerprint

    restored = restore(folder, options.device, options.precision)
    state = restored.checkpoint.state
    recipe = state.recipe
    tokenizer = restored.checkpoint.tokenizer_spec
    trained = replace(recipe.data, tokenizer=tokenizer)  # a tokenizer that was trained on text may serve chats, too
    settings = options.settings(trained, recipe.model.max_seq_len)
    if isinstance(restored.model, HFDecoder) and restored.model.documents_by == "rows":
        settings = replace(settings, packing="one_document")
    # Somebody else may have made the checkpoint, so nothing is written to the cache folder that it names.
    data = prepare_data(settings, tokenizer, default_cache_dir())
    seq_len = settings.seq_len if settings.format == "text" else trained.seq_len  # chats are cut to it
    is_same_text = settings == replace(trained, batch_size=settings.batch_size, seq_len=seq_len)
    if is_same_text and data_fingerprint(data) != state.data_fingerprint:
        print(f"note: {settings.named} changed since training, which may have seen what is held out now")
    device_type = next(restored.model.parameters()).device.type
    trained_in = recipe.train.precision if has_fast_gemm(device_type, torch.bfloat16) else "fp32"
    precision = options.precision or trained_in
    return Subject(restored.checkpoint.path, restored.model, data, settings, precision)


def _of_transformers(folder: Path, options: EvalOptions) -> Subject:
    if options.corpus is None:
        raise ValueError(f"--corpus is missing: {folder} does not say what to evaluate on; give 'stdlib' or a path")

    from tilemoe.train.checkpoints.restore import restore_model
    from tilemoe.train.datasets import prepare_data

    longest, tokenizer = read_config(folder).max_seq_len, hf_tokenizer(folder)
    default = DataConfig(min(_SEQ_LEN, longest), _BATCH_SIZE, tokenizer=tokenizer)
    settings = options.settings(default, longest)
    model, _ = restore_model(folder, options.device)
    if line := sums_line(folder):
        print(f"note: {line}", file=sys.stderr)
    data = prepare_data(settings, tokenizer)
    return Subject(folder, model, data, settings, options.precision or "fp32")


def _evaluate(subject: Subject, batches: int) -> Evaluation:
    """Evaluate, with a progress bar on a terminal."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from tilemoe.train.evaluate import evaluate

    shards, settings = subject.data.heldout, subject.settings
    device = next(subject.model.parameters()).device
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        most = batches * settings.batch_size * settings.seq_len or shards.num_targets
        bar = shown.add_task("held-out tokens", total=min(most, shards.num_targets))
        result = evaluate(
            subject.model,
            shards,
            seq_len=settings.seq_len,
            batch_size=settings.batch_size,
            device=device,
            autocast=lambda: torch.autocast(device.type, torch.bfloat16, enabled=subject.precision == "bf16"),
            max_batches=batches,
            on_batch=lambda tokens: shown.update(bar, completed=tokens),
        )
    assert result is not None, "nothing asks this evaluation to stop"
    return result

"""The run's record: ``metrics.jsonl``, one JSON object per line; its numbers also go to trackers: TensorBoard
(tilemoe[log]) and Weights & Biases (tilemoe[wandb]).

There are two kinds of record, by ``kind``. Everything except the ``RUN_FIELDS`` is a function of the recipe:

* ``train``: the fields of `tilemoe.train.progress.StepStats`, and seconds, tokens_per_second and mfu
  (`tilemoe.train.progress.Speed`);
* ``eval``: step, the fields of `tilemoe.train.evaluate.Evaluation`, and seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilemoe.checks import parse_json, told
from tilemoe.config import to_dict
from tilemoe.files import never_a_link, open_regular, read_text, write_atomic
from tilemoe.train.config import Recipe

RUN_FIELDS = frozenset({"seconds", "tokens_per_second", "mfu", "capacity", "repeats"})
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR, WANDB_DIR = "tensorboard", "wandb"
_PROJECT = "tilemoe"
_WANDB_ID = "run-id.txt"  # in W&B's folder: the id under which a resumed run continues
_LONGEST_LINE = 1 << 26  # bytes
_BEGINNINGS = (b'{"kind": "train", "step": ', b'{"kind": "eval", "step": ')
_RENAMED = MappingProxyType({"loss": "nats_per_token"})  # names of 0.1.0, whose runs may be resumed


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, without a last line that a kill has cut short.

    A record of release 0.1.0 gets the present name of its loss.
    """
    return ({_RENAMED.get(name, name): value for name, value in record.items()} for record, _ in _records(path))


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each record, with the byte offset of its line's end."""
    end = 0
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            where, fix = f"{path} line {number}", "move the file away to go on without it"
            if len(line) == _LONGEST_LINE:
                raise ValueError(f"{where} is longer than any line of a run; {fix}")
            if not line.endswith(b"\n"):
                if not any(line.startswith(begin) or begin.startswith(line) for begin in _BEGINNINGS):
                    raise ValueError(f"{where} is not a record of a run; {fix}")
                return
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{where} cannot be read ({error}); {fix}") from error
            if not isinstance(record, dict) or "kind" not in record or not isinstance(record.get("step"), int):
                raise ValueError(f"{where} is not a record of a run; {fix}")
            end += len(line)
            yield record, end


def truncate_metrics(path: Path, step: int) -> None:
    """Cut the file back to the records that were written before the checkpoint of ``step``.

    A step's training record precedes its checkpoint and its evaluation follows it. A resumed run repeats the evaluation
    at ``step``, so that record is removed too.
    """
    if not path.exists():
        return
    kept = 0
    for record, end in _records(path):
        if record["step"] > step or (record["step"] == step and record["kind"] == "eval"):
            break
        kept = end
    with open_regular(path) as file:
        begin, mode = file.read(kept), os.fstat(file.fileno()).st_mode
    write_atomic(path, begin)  # a new file: a copy of the run by hard links keeps the old one
    path.chmod(stat.S_IMODE(mode))


class TensorBoard:
    """Event files in ``run_dir/tensorboard``; steps from ``first_step`` on replace earlier ones.

    ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(run_dir / TENSORBOARD_DIR), purge_step=first_step)
        self._writer: SummaryWriter | None = None

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if self._writer is None:  # not before: a run that ends in its first step leaves nothing in its folder
            self._writer = self._open()
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run of Weights & Biases, with the recipe as its configuration, in project "tilemoe" or ``$WANDB_PROJECT``.

    A resumed run continues there; for steps that it repeats, W&B keeps the first numbers.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: it cannot start a run, say without a login.
    """

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        import wandb

        id_file = run_dir / WANDB_DIR / _WANDB_ID
        id_file.parent.mkdir(exist_ok=True)  # else wandb uses another folder
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=run_dir.name,
                dir=str(run_dir),
                config=to_dict(recipe),
                id=read_text(id_file) if id_file.exists() else None,
                resume="allow",
            )
        except wandb.Error as error:
            reason = told(error).rstrip(".")
            raise ValueError(f"train.wandb: {reason}; run wandb login, or set WANDB_MODE=offline") from error
        with open(id_file, "w", opener=never_a_link) as file:
            file.write(self._run.id)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | WandB


class MetricsWriter:
    """Appends each record to ``metrics.jsonl`` at once and gives its numbers to ``trackers``. A list, with a number per
    MoE layer, becomes one named number per layer.

    ValueError, in write and sync: the file was removed, moved or replaced.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        # Unbuffered: otherwise close would write again what a full disk has refused, after a part of it.
        self._path = run_dir / METRICS_FILE
        self._file = open(self._path, "ab", buffering=0, opener=never_a_link)  # noqa: SIM115
        self._trackers = trackers

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        self._require_place()
        line = json.dumps({"kind": kind, **record}).encode() + b"\n"
        while line:
            line = line[self._file.write(line) :]
        for tracker in self._trackers:
            tracker.log(dict(_numbers(kind, record)), record["step"])

    def sync(self) -> None:
        """Force what was written to the disk; a checkpoint must never be ahead of its metrics."""
        self._require_place()
        os.fsync(self._file.fileno())

    def _require_place(self) -> None:
        """ValueError: the file was removed, moved or replaced. Records appended to the open file would be lost."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
        raise ValueError(
            f"train.out_dir {self._path.parent}: {METRICS_FILE} was removed, moved or replaced during the run, which "
            "ends without saving; put the folder back and go on with --resume, or start again"
        )

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _numbers(kind: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Each number of a record and of its lists, with its own name; tables (layers x experts) are left out."""
    for name, value in record.items():
        values = {f"/{i}": each for i, each in enumerate(value)} if isinstance(value, list) else {"": value}
        for suffix, each in values.items():
            if isinstance(each, (int, float)) and name != "step":
                yield f"{kind}/{name}{suffix}", each

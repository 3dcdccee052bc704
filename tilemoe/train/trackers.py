"""Trackers of a run's numbers beside metrics.jsonl: TensorBoard (tilemoe[log]), Weights & Biases (tilemoe[wandb])."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tilemoe.checks import told
from tilemoe.config import to_dict
from tilemoe.files import never_a_link, read_text
from tilemoe.train.config import Recipe

TENSORBOARD_DIR, WANDB_DIR = "tensorboard", "wandb"
_PROJECT = "tilemoe"
_WANDB_ID = "run-id.txt"  # in W&B's folder: the id under which a resumed run continues


class Tracker(Protocol):
    """Takes numbers by name. Steps never decrease, unless a run resumes from an older checkpoint."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``run_dir/tensorboard``; steps from ``first_step`` on replace earlier ones.

    ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=first_step)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
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

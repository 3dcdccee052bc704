"""``tilemoe verify``: whether every byte of a checkpoint, a run's checkpoints or an exported folder is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tilemoe.checks import expand_user
from tilemoe.cli.parsing import parse


@dataclass(frozen=True)
class VerifyOptions:
    """Options of ``tilemoe verify``."""

    folder: Positional[Path]  # a run's folder (all its checkpoints), a step_* folder, or transformers' folder


def run(arguments: Sequence[str]) -> None:
    options = parse(
        VerifyOptions,
        arguments,
        prog="tilemoe verify",
        description="Read every byte of checkpoints or a model and say whether each is intact; exit status 2 if not.",
    )

    from tilemoe.train.checkpoints.verify import verify

    folder, found = expand_user(options.folder), []
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a run, a step_* folder, or transformers' folder")
    for finding in verify(folder):
        print(finding.line if finding.is_right else f"wrong: {finding.line}", flush=True)
        found.append(finding.is_right)
    if not all(found):
        raise ValueError(f"{folder}: {found.count(False)} of {len(found)} not right, as said above")

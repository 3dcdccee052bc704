"""``tilemoe report``: the recorded results as Markdown, PNG and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilemoe.checks import expand_user
from tilemoe.cli.parsing import parse


@dataclass(frozen=True)
class ReportOptions:
    """Options of ``tilemoe report``."""

    out: Path = Path("report")  # folder that the files are written to
    mode: Literal["burst", "sustained"] = "sustained"  # show the rows of this mode (see `tilemoe bench --help`)
    gpu: str | None = None  # only rows of this GPU, by its full name


def run(arguments: Sequence[str]) -> None:
    description = "Tables and figures of results/*.jsonl, or of the folder that TILEMOE_RESULTS names."
    options = parse(ReportOptions, arguments, prog="tilemoe report", description=description)

    from tilemoe.bench.report import write

    out = expand_user(options.out)
    try:
        paths = write(out, options.mode, options.gpu)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ValueError("tilemoe report needs matplotlib: pip install 'tilemoe[plot]'") from error
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error}); make room or choose another") from error
    for path in paths:
        print(path)

"""A newcomer's first hour with a stop-watch: README and every quick start, as written, in a new environment.

    python tests/docs/newcomer.py [NOTE]                # make newcomer

With an empty HOME: a virtual environment, PyTorch as requirements-dev.txt pins it, the wheel of this checkout where a
page says ``pip install .``, with the page's extras, and its code blocks. README has a folder, the quick starts another.
What `make` does from a checkout is left out. Appends a row to results/newcomer.jsonl. Exit code 1 above `LIMIT`; a step
that fails ends it, and then nothing is recorded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pages import PAGES, ROOT, commands_of, save_model

from tilemoe.bench import record

LIMIT = 15 * 60  # seconds, on two cores
ORDER = ("pretrain", "finetune", "transformers", "module", "several-gpus", "one-gpu")
INSTALL = re.compile(r"pip install '?\.(\[[\w,]+\])?'?([^`\n#]*)")
PACKAGES = ("torch", "triton", "numpy", "transformers", "peft", "trl", "bitsandbytes")
NOT_RUN = ("make ", "pip install")  # of the blocks: `INSTALL` finds what is to be installed in the text, too
NOT_SET = ("PYTHON", "TILEMOE_", "VIRTUAL_ENV", "HF_", "XDG_", "OMP_")  # variables that a newcomer does not have


class StopWatch:
    """Runs a newcomer's commands, whose HOME and virtual environment are in ``home``, and keeps the seconds of each."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.steps: list[dict[str, object]] = []
        told = {name: value for name, value in os.environ.items() if not name.startswith(NOT_SET)}
        self.environment = told | {"HOME": str(home), "PATH": os.pathsep.join([f"{home}/venv/bin", told["PATH"]])}

    def __call__(self, page: str, folder: Path, *command: str) -> None:
        """Runs ``command`` in ``folder``; it must succeed."""
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True)
        seconds = round(time.perf_counter() - start, 1)
        text = command[-1] if command[0] in ("bash", "python") else " ".join(command)
        for path, name in ((sys.executable, "python"), (f"{self.home}/", ""), (str(self.home), "."), (str(ROOT), ".")):
            text = text.replace(path, name)
        what = text.splitlines()[0] if command[0] != "python" else "its Python"
        print(f"{seconds:7.1f} s  {page}: {what}", flush=True)
        if done.returncode:
            raise SystemExit(f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        self.steps.append({"page": page, "step": what, "seconds": seconds})


def follow(page: Path, folder: Path, wheel: Path, run: StopWatch) -> None:
    """In ``folder``, installs what the page names, then runs its blocks."""
    for extras, more in dict.fromkeys(INSTALL.findall(page.read_text(encoding="utf-8"))):
        run(page.stem, folder, "bash", "-c", f"pip install --quiet '{wheel}{extras}' {more.strip()}".strip())
    for command in commands_of(page, folder, *NOT_RUN):
        run(page.stem, folder, *command)


def main(note: str) -> int:
    load = os.getloadavg()[0]
    assert {page.stem for page in PAGES.glob("*.md")} == set(ORDER)
    torch = re.search(r"^torch==\S+", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.M)
    assert torch
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        run = StopWatch(home)
        run("install", home, sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, str(ROOT))
        (wheel,) = home.glob("*.whl")
        run("install", home, sys.executable, "-m", "venv", "venv")
        run("install", home, "bash", "-c", f"pip install --quiet {torch[0]}")
        for name in ("readme", "quickstart/texts"):
            (home / name).mkdir(parents=True)
        for page in (ROOT / "docs").glob("*.md"):  # the reader's own text
            shutil.copy(page, home / "quickstart/texts")
        save_model(home / "quickstart/base")
        follow(ROOT / "README.md", home / "readme", wheel, run)
        for name in ORDER:
            follow(PAGES / f"{name}.md", home / "quickstart", wheel, run)
        listed = subprocess.check_output([home / "venv/bin/pip", "list", "--format", "json"], text=True)
    versions = {each["name"]: each["version"] for each in json.loads(listed) if each["name"] in PACKAGES}
    total = round(sum(step["seconds"] for step in run.steps), 1)
    row = {"seconds": total, "steps": run.steps, "installed": versions, "load_average_before": load, "note": note}
    record.append("newcomer", [row])
    print(f"{total} s")
    return int(total > LIMIT)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))

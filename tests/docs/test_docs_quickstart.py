"""Every code block of the quick starts and of the README runs, as by a reader who takes one page after another.

The README's processes are new ones; those of the quick starts are copies of this one, see `commands.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_by_copies
from helpers import HANGS, write_corpus
from pages import PAGES, ROOT, SCRIPTS, commands_of, save_model
from safetensors.torch import load_file

# Which are not for a test: what installs, demonstrates for minutes or tests; and what another test runs.
NOT_RUN = ("make ", "pip install", "tilemoe doctor")
OF_THE_SCRIPT = ("tilemoe train", "tilemoe generate", "tilemoe export")  # of the README, as train_folder.sh has them


def run(folder: Path, environment: dict[str, str], *command: str) -> str:
    """What a command prints in ``folder``; it must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def run_blocks(page: Path, folder: Path, *not_run: str, run: Callable[..., str] = run_by_copies) -> str:
    """Of a page, in order; what they print. Lines that begin with one of ``not_run`` are left out."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TILEMOE_CACHE": str(folder / "cache")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return "".join(run(folder, environment, *command) for command in commands_of(page, folder, *NOT_RUN, *not_run))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the first page has been followed, and what its commands printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "texts").mkdir()
    write_corpus(folder / "texts", seed=0)
    return folder, run_blocks(PAGES / "pretrain.md", folder)


def test_pretrain(pretrained: tuple[Path, str]) -> None:
    folder, printed = pretrained
    losses = [float(loss) for loss in re.findall(r"step \d+/30  loss ([\d.]+)", printed)]
    assert losses[-1] < 0.8 * losses[0]
    assert (folder / "exported" / "model.safetensors").is_file()


def test_finetune(pretrained: tuple[Path, str]) -> None:
    printed = run_blocks(PAGES / "finetune.md", pretrained[0])
    losses = [float(loss) for loss in re.findall(r"step \d+/30  loss ([\d.]+)", printed)]
    assert losses[-1] < 0.8 * losses[0]
    assert (pretrained[0] / "tuned" / "tokenizer.json").is_file()


def test_transformers(pretrained: tuple[Path, str]) -> None:
    printed = run_blocks(PAGES / "transformers.md", pretrained[0])
    found = re.search(r"2 MoE layers: loss [\d.]+ nats/token, (\S+) from", printed)
    assert found, printed
    assert float(found[1]) < 1e-5


def test_one_gpu(tmp_path: Path) -> None:
    save_model(tmp_path / "base")
    printed = run_blocks(PAGES / "one-gpu.md", tmp_path)
    assert re.search(r"loss \d\.\d+ nats/token over 10 steps", printed), printed
    tensors = load_file(tmp_path / "base-nf4" / "model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj_codes" in tensors
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_module(tmp_path: Path) -> None:
    assert run_blocks(PAGES / "module.md", tmp_path).startswith("torch because")


@pytest.mark.dist
def test_several_gpus(pretrained: tuple[Path, str]) -> None:
    printed = run_blocks(PAGES / "several-gpus.md", pretrained[0])
    assert (pretrained[0] / "runs" / "two" / "result.json").is_file()
    first, last = (float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", printed, re.M))
    assert last < 0.5 * first


def test_readme(pretrained: tuple[Path, str]) -> None:
    """Its commands are those of the script, which has been run, but for the text and the prompt."""
    script = (PAGES / "train_folder.sh").read_text(encoding="utf-8").splitlines()
    commands = [line.partition(" #")[0] for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    for start in OF_THE_SCRIPT:
        ((told,), (ran,)) = ([line.split() for line in lines if line.startswith(start)] for lines in (commands, script))
        assert {word for word in told if word.startswith("--")} <= set(ran), told
        assert "--prompt" in told or set(told) <= set(ran), told
    run_blocks(ROOT / "README.md", pretrained[0], *OF_THE_SCRIPT, run=run)


def test_every_page_and_script_is_run() -> None:
    pages = {page.stem.replace("-", "_") for page in PAGES.glob("*.md")}
    assert {f"test_{page}" for page in pages} <= globals().keys()
    assert {path.name for path in PAGES.iterdir() if path.suffix != ".md"} == SCRIPTS

"""Variants of the `tiny` recipe, side by side on one GPU, judged on a validation split that the held-out one is not in.

    python benchmarks/tiny_trials.py trials.json [--recipe tiny] [--processes 14]

trials.json is a list of what differs from the recipe: [{"optim": {"lr": 0.004}, "train": {"steps": 500}}, ...]. The
corpus is the training documents of the standard library alone, of which every 20th is kept for validation. Each
finished trial goes to results/tiny_trials.jsonl; losses, not times, are what carries over to a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilemoe.bench import record
from tilemoe.data import prepare
from tilemoe.data.corpus import open_corpus, split_documents
from tilemoe.train.checkpoints.restore import build_model, select_device
from tilemoe.train.config import load_recipe
from tilemoe.train.evaluate import evaluate
from tilemoe.train.loop import Trainer

NAME = "tiny_trials"
HELDOUT_EVERY = 20


def changed(settings: Any, changes: dict[str, Any]) -> Any:
    """A nested dataclass with some of its fields replaced."""
    old = {name: getattr(settings, name) for name in changes}
    new = {name: changed(old[name], to) if is_dataclass(old[name]) else to for name, to in changes.items()}
    return replace(settings, **new)


def write_training_documents(folder: Path) -> None:
    for number, (split, text) in enumerate(split_documents(open_corpus("stdlib"), HELDOUT_EVERY)):
        if split == "train":
            (folder / f"{number:05d}.py").write_text(text, encoding="utf-8")


def run(recipe: str, changes: dict[str, Any], folder: Path) -> None:
    """One trial, recorded and printed."""
    torch.set_num_threads(1)
    where = {"data": {"corpus": str(folder / "corpus"), "cache_dir": str(folder / "cache")}}
    settings = changed(changed(load_recipe(recipe), where), changes)
    data = prepare(settings.data.corpus, "bytes", settings.data.cache_path, heldout_every=HELDOUT_EVERY)
    device = select_device("auto")
    torch.manual_seed(settings.train.seed)
    trainer = Trainer(settings, build_model(settings, device), data, device)
    trainer.model.train()
    for _ in range(settings.train.steps):
        trainer.train_step()
    found = evaluate(
        trainer.model,
        data.heldout,
        seq_len=settings.data.seq_len,
        batch_size=64,
        device=device,
        autocast=trainer.autocast,
    )
    assert found is not None, "nobody stops it"
    row = {"recipe": recipe, "changes": changes, "validation_nats_per_byte": round(found.nats_per_token, 4)}
    record.append(NAME, [row])
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        run(args.recipe, args.one, args.folder)
        return
    left, running = json.loads(args.trials.read_text(encoding="utf-8")), list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corpus").mkdir()
        write_training_documents(Path(folder) / "corpus")
        while left or running:
            running = [each for each in running if each.poll() is None]
            while left and len(running) < args.processes:
                options = ["--recipe", args.recipe, "--folder", folder, "--one", json.dumps(left.pop(0))]
                running.append(subprocess.Popen([sys.executable, __file__, str(args.trials), *options]))
            time.sleep(0.2)


if __name__ == "__main__":
    main()

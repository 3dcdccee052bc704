"""Held-out loss of language models trained with FP8 operands and without, and how far gradients turn.

    python benchmarks/fp8_quality.py run --recipe single-gpu-100m --corpus FOLDER --precisions bf16,fp8 --seeds 3
    python benchmarks/fp8_quality.py run --recipe fp8-smoke --seeds 3        (minutes on a CPU)
    python benchmarks/fp8_quality.py forks --recipe single-gpu-100m --corpus FOLDER --precisions bf16,bf16,fp8,fp8 \\
        --steps 350 --fork-at 250 --seeds 1
    python benchmarks/fp8_quality.py table
    python benchmarks/fp8_quality.py curves --recipe single-gpu

A recipe is one of the package's or of benchmarks/recipes. The runs of a seed start from the same weights and see the
same batches; each is evaluated along the way, in its own precision. At its end the gradients of two sequences are
compared to those of fp32 with the same weights: 1 minus the cosine, of each layer's experts and router. Each finished
run is appended to results/fp8_quality.jsonl; those that are there are not repeated.

``forks`` trains each seed once, in bf16, up to a step, and from there on once for each precision given: branches start
from equal weights and optimiser states, and see the same batches. So they differ less than whole runs do. A precision
given twice shows by how much they differ anyway. Each call trains anew, unless ``--trunks FOLDER`` holds what an
earlier one saved there: so one process per GPU can train one branch each. ``--all-wgrads`` is for layers whose weight
gradients are too narrow for FP8: they are in FP8, too. Rows go to results/fp8_forks.jsonl.

``curves`` reads results/end_to_end.jsonl, whose runs may be as long as a real one: a run there that was told
``--model.moe.precision fp8 --train.dense-precision fp8`` beside the one that was not, all else being the same. Whether
its corpus is, too, shows in ``corpus_digest``; older rows describe theirs in words.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from precisions import PLAIN, PRECISIONS, in_precision
from rounding_quality import RECIPES, prepared, spread
from torch import Tensor, nn

import tilemoe
from tilemoe import config
from tilemoe.bench import record
from tilemoe.data.files import only_one_process, staged_folder
from tilemoe.train.checkpoints.restore import build_model, select_device
from tilemoe.train.config import Recipe, load_recipe
from tilemoe.train.evaluate import evaluate
from tilemoe.train.loop import Trainer

NAME, FORKS = "fp8_quality", "fp8_forks"
OPTIONS = ("--model.moe.precision", "--train.dense-precision")  # of `tilemoe train`, in the order of `PRECISIONS`
POINTS = 10  # evaluations of a run
COMPARED = 2  # sequences whose gradients are compared: fp32 keeps a square of attention's weights for each head
# What a run is: a row that agrees in these, and was measured on such a machine, is a repetition.
KEY = ("recipe", "precision", "seed", "steps")

Row = dict[str, Any]


def variant(recipe: Recipe, precision: str, seed: int) -> Recipe:
    return in_precision(replace(recipe, train=replace(recipe.train, seed=seed)), precision)


def measure(recipe: Recipe, device: torch.device) -> Row:
    """One run: [step, held-out nats/token] along it, and what its gradients are off at the end."""
    torch.manual_seed(recipe.train.seed)
    trainer = new_trainer(recipe, device)
    curve = trained(trainer, recipe.train.steps)
    return {
        "heldout_nats": curve[-1][1],
        "curve": curve,
        "gradients_off": gradients_off(trainer, recipe),
        "corpus_digest": trainer.data_fingerprint,
    }


def new_trainer(recipe: Recipe, device: torch.device) -> Trainer:
    return Trainer(recipe, build_model(recipe, device), prepared(recipe.data), device)


def trained(trainer: Trainer, until: int) -> list[list[float]]:
    """Train up to the step ``until``: [step, held-out nats/token] at `POINTS` of the recipe's steps."""
    curve = []
    steps = trainer.recipe.train.steps
    trainer.model.train()
    while trainer.step < until:
        trainer.train_step()
        if trainer.step * POINTS % steps < POINTS:
            curve.append([trainer.step, round(heldout_loss(trainer), 6)])
            print(*curve[-1], flush=True)
    return curve


def heldout_loss(trainer: Trainer) -> float:
    """Nats/token over ``eval_batches``."""
    recipe = trainer.recipe
    found = evaluate(
        trainer.model,
        trainer.data.heldout,
        seq_len=recipe.data.seq_len,
        batch_size=recipe.data.batch_size,
        device=trainer.device,
        autocast=trainer.autocast,
        max_batches=recipe.train.eval_batches,
    )
    assert found is not None, "nobody stops it"
    return found.nats_per_token


def gradients_off(trainer: Trainer, recipe: Recipe) -> dict[str, list[float]]:
    """1 - cosine to the gradients of fp32, for each MoE layer: by the parameter's name in it."""
    exact = build_model(variant(recipe, PLAIN, recipe.train.seed), trainer.device)
    exact.load_state_dict(trainer.model.state_dict())
    inputs, targets = (
        torch.from_numpy(part)[:COMPARED].to(trainer.device) for part in trainer.sampler.batch(trainer.step)
    )
    with trainer.autocast():
        trainer.model(inputs, targets).loss.backward()
    exact.float().train()
    exact(inputs, targets).loss.backward()
    off: dict[str, list[float]] = {}
    for mine, theirs in zip(layers(trainer.model), layers(exact), strict=True):
        for (name, parameter), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            off.setdefault(name, []).append(round(1 - cosine(parameter.grad, other.grad), 7))
    return off


def layers(model: nn.Module) -> list[tilemoe.MoE]:
    return [module for module in model.modules() if isinstance(module, tilemoe.MoE)]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Of benchmarks/recipes if it is there, else the package's; with what the command line changes of it."""
    path = RECIPES / f"{args.recipe}.json"
    recipe = load_recipe(str(path) if path.exists() else args.recipe)
    data = replace(recipe.data, corpus=args.corpus or recipe.data.corpus)
    train = replace(recipe.train, steps=args.steps or recipe.train.steps)
    return replace(recipe, data=data, train=train)


def asked_for(args: argparse.Namespace) -> Iterator[tuple[Recipe, Row]]:
    """Every run, seed by seed, so that what is there can be compared."""
    base = recipe_of(args)
    for seed in seeds(args):
        for precision in args.precisions.split(","):
            what = (args.recipe, precision, seed, base.train.steps)
            yield variant(base, precision, seed), dict(zip(KEY, what, strict=True))


def run(args: argparse.Namespace) -> None:
    device = select_device(args.device)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    done = {tuple(row[field] for field in KEY) for row in record.rows(NAME) if row["gpu"] == gpu}
    for recipe, row in asked_for(args):
        if tuple(row.values()) not in done:
            row |= measure(recipe, device)
            record.append(NAME, [row])
            print(json.dumps(row), flush=True)


def seeds(args: argparse.Namespace) -> range:
    return range(args.first_seed, args.first_seed + args.seeds)


def forks(args: argparse.Namespace) -> None:
    """Of each seed a run in `PLAIN` up to ``fork_at``, then a branch for each precision given."""
    device, base = select_device(args.device), recipe_of(args)
    if not 0 < args.fork_at < base.train.steps:
        raise ValueError(f"--fork-at must lie within the run's {base.train.steps} steps, got {args.fork_at}")
    rule = mock.patch.multiple(config, FP8_WGRAD_WIDTH=1, FP8_WGRAD_ELEMENTS=1) if args.all_wgrads else nullcontext()
    with rule, tempfile.TemporaryDirectory() as folder:
        for seed in seeds(args):
            trunk = save_trunk(variant(base, PLAIN, seed), args.fork_at, args.trunks or Path(folder), device)
            for precision in args.precisions.split(","):
                row = dict(zip(KEY, (args.recipe, precision, seed, base.train.steps), strict=True))
                row |= {"all_wgrads": args.all_wgrads, "fork_at": args.fork_at}
                record.append(FORKS, [row | measure_branch(variant(base, precision, seed), trunk, device)])


def save_trunk(recipe: Recipe, until: int, folder: Path, device: torch.device) -> Path:
    """A file with the ``step``, the ``curve``, ``weights`` and optimiser ``states`` there; one that exists is kept.

    Of several processes one trains, and the others wait.
    """
    saved = folder / f"{recipe.name}-{recipe.train.seed}-{recipe.train.steps}-{until}"
    with only_one_process(saved):
        if not saved.exists():
            torch.manual_seed(recipe.train.seed)
            trainer = new_trainer(recipe, device)
            trunk = {"curve": trained(trainer, until), "step": trainer.step, "digest": trainer.data_fingerprint}
            trunk |= {"weights": trainer.model.state_dict(), "states": trainer.optimizer.state_dict()}
            with staged_folder(saved) as staged:
                torch.save(trunk, staged / "trunk.pt")
    return saved / "trunk.pt"


def measure_branch(recipe: Recipe, trunk: Path, device: torch.device) -> Row:
    state = torch.load(trunk, map_location="cpu")
    branch = new_trainer(recipe, device)
    if state["digest"] != branch.data_fingerprint:
        raise ValueError(f"--trunks: {trunk} was trained on another corpus; delete it, or name another folder")
    branch.model.load_state_dict(state["weights"])
    branch.optimizer.load_state_dict(state["states"])
    branch.step = state["step"]
    curve = trained(branch, recipe.train.steps)
    return {"before": state["curve"], "curve": curve, "corpus_digest": branch.data_fingerprint}


def table(args: argparse.Namespace) -> None:
    """Markdown: the last held-out loss over the seeds, FP8's against the plain run's of its seed, gradients off."""
    rows = [row for row in record.rows(NAME) if row["recipe"] == args.recipe]
    plain = {(row["seed"], row["steps"]): row["heldout_nats"] for row in rows if row["precision"] == PLAIN}
    print("| precision | seeds | loss, nats/token | against its seed's | 1 - cosine of gradients, largest |")
    print("| :--- | ---: | ---: | ---: | ---: |")
    for precision in dict.fromkeys(row["precision"] for row in rows):
        here = [row for row in rows if row["precision"] == precision]
        pairs = [(row["heldout_nats"], plain.get((row["seed"], row["steps"]))) for row in here]
        gaps = [100 * (loss / base - 1) for loss, base in pairs if base is not None]
        worst = max(max(values) for row in here for values in row["gradients_off"].values())
        against = "" if precision == PLAIN or not gaps else f"{statistics.mean(gaps):+.3f}% (worst {max(gaps):+.3f}%)"
        losses = spread([loss for loss, _ in pairs], "{:.4f}")
        print(f"| {precision} | {len(here)} | {losses} | {against} | {worst:.1e} |")


def curves(args: argparse.Namespace) -> None:
    """Markdown: held-out nats/token of recorded end-to-end runs that differ in precision alone, the newest of each."""
    runs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in record.rows("end_to_end"):
        if row["recipe"] == args.recipe and "pretrain" in row:
            precision, others = told(row["arguments"])
            runs.setdefault((row["steps"], *others), {})[precision] = row
    for same in runs.values():
        if PLAIN in same:
            print("\n".join(curve_table(same)))


def told(arguments: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(which of `PRECISIONS` the options ask for, the other options)"""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    asked = tuple(options.pop(option, PLAIN) for option in OPTIONS)
    return next(name for name, each in PRECISIONS.items() if each == asked), sorted(options.items())


def curve_table(same: dict[str, Row]) -> Iterator[str]:
    """The held-out losses step by step, each with what it is above the plain run's."""
    yield "| step | " + " | ".join(f"{name}, {row['commit']}" for name, row in same.items()) + " |"
    yield "| ---: |" + " ---: |" * len(same)
    losses = {name: {step: nats for step, nats, *_ in row["pretrain"]["heldout"]} for name, row in same.items()}
    for step, plain in losses[PLAIN].items():
        cells = [(name, found.get(step)) for name, found in losses.items()]
        shown = ["" if nats is None else f"{nats:.4f}" + above(nats / plain, name) for name, nats in cells]
        yield f"| {step} | {' | '.join(shown)} |"
    digests = {row.get("corpus_digest", "unknown") for row in same.values()}
    yield f"corpus: {', '.join(sorted(digests))}"


def above(ratio: float, name: str) -> str:
    return "" if name == PLAIN else f" ({100 * (ratio - 1):+.3f}%)"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "forks", "table", "curves"])
    parser.add_argument("--recipe", default="fp8-smoke")
    parser.add_argument("--corpus", help="in place of the recipe's, as data.corpus")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="commas between")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="in place of the recipe's")
    parser.add_argument("--fork-at", type=int, default=0, help="the step up to which branches are one run")
    parser.add_argument("--trunks", type=Path, help="folder in which forks keeps what branches start from")
    parser.add_argument("--all-wgrads", action="store_true", help="forks: narrow layers' weight gradients in FP8, too")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    args = parser.parse_args(argv)
    {"run": run, "forks": forks, "table": table, "curves": curves}[args.what](args)


if __name__ == "__main__":
    main()

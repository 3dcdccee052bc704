"""Held-out loss of small language models trained under top-K and under each mode of token rounding.

    python benchmarks/rounding_quality.py run --recipes rounding-e32k4,rounding-e64k2 --processes 6 --seconds 450
    python benchmarks/rounding_quality.py run --recipes rounding-smoke --modes nearest --seeds 2     (minutes on a CPU)
    python benchmarks/rounding_quality.py table

The recipes are in benchmarks/recipes. Every run of a seed starts from the same weights and sees the same batches; all
are evaluated by plain top-K, as any layer in evaluation is. Each finished run is appended to
results/rounding_quality.jsonl, and those that are there are not repeated: with ``--seconds`` one call does as much as
fits, and the next goes on. ``--processes`` trains several models side by side on one GPU, which one leaves mostly idle.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilemoe
from tilemoe.bench import record
from tilemoe.config import ROUNDING_MODES, TokenRounding
from tilemoe.data import Prepared, prepare
from tilemoe.train.checkpoints.restore import build_model, select_device
from tilemoe.train.config import DataConfig, Recipe, load_recipe
from tilemoe.train.evaluate import evaluate
from tilemoe.train.loop import Trainer

NAME = "rounding_quality"
RECIPES = Path(__file__).resolve().parent / "recipes"
TOPK = "top-K"
WARM_STEPS = 4  # until nothing is compiled or recorded any more
COUNTED_BATCHES = 8  # training batches over which dropped and added pairs are counted
# What a run is: a row that agrees in these, and was measured on such a GPU, is a repetition.
KEY = ("recipe", "routing", "seed", "steps", "tile")

Row = dict[str, Any]


def variant(recipe: Recipe, routing: str, seed: int) -> Recipe:
    """``recipe`` under a mode of rounding, or under plain top-K, with another seed."""
    moe = recipe.model.moe
    assert moe is not None, "the recipe has experts"
    assert moe.rounding is not None, "the recipe says the tile"
    rounding = None if routing == TOPK else TokenRounding(routing, moe.rounding.tile)  # type: ignore[arg-type]
    model = replace(recipe.model, moe=replace(moe, rounding=rounding))
    return replace(recipe, model=model, train=replace(recipe.train, seed=seed))


def train(recipe: Recipe, data: Prepared, device: torch.device, steps: int) -> tuple[Trainer, float]:
    """A model after so many steps and the seconds they took. The draws of a random rounding follow the seed."""
    torch.manual_seed(recipe.train.seed)
    trainer = Trainer(recipe, build_model(recipe, device), data, device)
    trainer.model.train()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    return trainer, time.perf_counter() - start


@cache
def prepared(data: DataConfig) -> Prepared:
    return prepare(data.corpus, data.tokenizer, data.cache_path, heldout_every=data.heldout_every)


def measure(recipe: Recipe, data: Prepared, device: torch.device) -> Row:
    """One run: held-out loss under top-K, how even the load is, and what the rounding changes at the end."""
    trainer, seconds = train(recipe, data, device, recipe.train.steps)
    heldout = evaluate(
        trainer.model,
        data.heldout,
        seq_len=recipe.data.seq_len,
        batch_size=recipe.data.batch_size,
        device=device,
        autocast=trainer.autocast,
        max_batches=recipe.train.eval_batches,
    )
    assert heldout is not None, "nobody stops it"
    return {
        "heldout_nats": round(heldout.nats_per_token, 6),
        "heldout_tokens": heldout.tokens,
        "load_entropy": round(statistics.mean(map(entropy, heldout.tokens_per_expert)), 6),
        **changed_pairs(trainer),
        "seconds": round(seconds, 2),
    }


def entropy(tokens_per_expert: list[int]) -> float:
    """Of the load of one layer's experts, over that of an even load: 1 is even, 0 is one expert."""
    total = sum(tokens_per_expert)
    shares = [count / total for count in tokens_per_expert if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(tokens_per_expert))


def changed_pairs(trainer: Trainer) -> Row:
    """Percent of the top-K pairs that the layers' rounding drops, and that it adds; over batches of the training."""
    layers = [module for module in trainer.model.modules() if isinstance(module, tilemoe.MoE)]
    counts: list[tuple[Tensor, Tensor]] = []

    def count(layer: tilemoe.MoE, _inputs: Any, out: tilemoe.MoEOutput) -> None:
        top_k = tilemoe.route(out.router_logits, layer.cfg, training=False)
        counts.append((top_k.tokens_per_expert.cpu(), out.tokens_per_expert.cpu()))

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad(), trainer.autocast():
            for step in range(COUNTED_BATCHES):
                inputs, _ = trainer.sampler.batch(trainer.step + step)
                trainer.model(torch.from_numpy(inputs).to(trainer.device))
    finally:
        for hook in hooks:
            hook.remove()
    pairs = sum(int(before.sum()) for before, _ in counts)
    dropped = sum(int((before - after).clamp(min=0).sum()) for before, after in counts)
    added = sum(int((after - before).clamp(min=0).sum()) for before, after in counts)
    return {"dropped_percent": round(100 * dropped / pairs, 3), "added_percent": round(100 * added / pairs, 3)}


def asked_for(args: argparse.Namespace) -> Iterator[tuple[Recipe, Row]]:
    """Every run: top-K and the first mode, seed by seed, then the other modes; what is there can be compared."""
    modes = ROUNDING_MODES if args.modes == "all" else tuple(args.modes.split(","))
    unknown = [mode for mode in modes if mode not in ROUNDING_MODES]
    if unknown:
        raise SystemExit(f"no mode called {unknown[0]!r}; known are {', '.join(ROUNDING_MODES)}")
    for routings in ((TOPK, modes[0]), modes[1:]):
        for seed in range(args.seeds):
            for name in args.recipes.split(","):
                base = load_recipe(str(RECIPES / f"{name}.json"))
                if args.steps:
                    base = replace(base, train=replace(base.train, steps=args.steps))
                assert base.model.moe is not None
                assert base.model.moe.rounding is not None
                for routing in routings:
                    what = (name, routing, seed, base.train.steps, base.model.moe.rounding.tile)
                    yield variant(base, routing, seed), dict(zip(KEY, what, strict=True))


def run(args: argparse.Namespace) -> None:
    start, longest, warm = time.perf_counter(), 0.0, set()
    device = select_device(args.device)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    done = {tuple(row[field] for field in KEY) for row in record.rows(NAME) if row["gpu"] == gpu}
    share, shares = map(int, args.share.split("/"))
    for index, (recipe, row) in enumerate(asked_for(args)):
        if index % shares != share or tuple(row.values()) in done:
            continue
        if args.seconds and time.perf_counter() - start + 1.1 * longest > args.seconds:
            print("out of time: the same command goes on from here")
            return
        if (row["recipe"], row["routing"]) not in warm:  # what compiles belongs to no run, and says nothing of the next
            train(recipe, prepared(recipe.data), device, WARM_STEPS)
            warm.add((row["recipe"], row["routing"]))
        began = time.perf_counter()
        row |= measure(recipe, prepared(recipe.data), device)
        longest = max(longest, time.perf_counter() - began)
        record.append(NAME, [{**row, "processes": shares}])
        print(json.dumps(row), flush=True)


def run_side_by_side(args: argparse.Namespace) -> None:
    """`run`, its runs dealt out to processes: models this small leave most of a GPU idle, while Python launches."""
    start = time.perf_counter()
    for recipe, _ in asked_for(args):
        prepared(recipe.data)  # once, and not by each
    command = [sys.executable, __file__, "run", "--recipes", args.recipes, "--modes", args.modes]
    command += ["--seeds", str(args.seeds), "--steps", str(args.steps), "--device", args.device]
    if args.seconds:
        command += ["--seconds", str(max(1e-9, args.seconds - (time.perf_counter() - start)))]
    running = [subprocess.Popen([*command, "--share", f"{share}/{args.processes}"]) for share in range(args.processes)]
    try:
        failed = [process.wait() for process in running].count(0) < len(running)
    except BaseException:
        for process in running:
            process.terminate()
        raise
    if failed:
        raise SystemExit("a process failed: its message is above; what the others have finished is recorded")


def table(args: argparse.Namespace) -> None:
    """Markdown: held-out loss, mean and spread over the seeds, and the difference to top-K seed by seed."""
    rows = [row for row in record.rows(NAME) if args.gpu in (None, row["gpu"])]
    header = ("recipe", "routing", "seeds", "loss, nats/token", "minus top-K", "load entropy", "dropped", "added")
    print("| " + " | ".join(header) + " |")
    print("| :--- | :--- |" + " ---: |" * (len(header) - 2))
    for recipe, routing in dict.fromkeys((row["recipe"], row["routing"]) for row in rows):
        here = {row["seed"]: row for row in rows if (row["recipe"], row["routing"]) == (recipe, routing)}
        base = {row["seed"]: row for row in rows if (row["recipe"], row["routing"]) == (recipe, TOPK)}
        losses = [row["heldout_nats"] for row in here.values()]
        gaps = [row["heldout_nats"] - base[seed]["heldout_nats"] for seed, row in here.items() if seed in base]

        def mean(field: str, here: dict[int, Row] = here) -> float:
            return statistics.mean(row[field] for row in here.values())

        cells = [
            recipe, routing, str(len(here)), spread(losses, "{:.4f}"),
            "" if routing == TOPK or not gaps else spread(gaps, "{:+.4f}"),
            f"{mean('load_entropy'):.4f}", f"{mean('dropped_percent'):.2f}%", f"{mean('added_percent'):.2f}%",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def spread(values: list[float], form: str) -> str:
    """Mean and, of two or more, the standard deviation."""
    found = form.format(statistics.mean(values))
    return found if len(values) < 2 else f"{found} ± {statistics.stdev(values):.4f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--recipes", default="rounding-e32k4,rounding-e64k2", help="names, separated by commas")
    parser.add_argument("--modes", default="all", help='"all" or modes, separated by commas; top-K is always run')
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="in place of the recipe's")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="begin no run that would end later than that; 0: all"
    )
    parser.add_argument("--processes", type=int, default=1, help="side by side on one GPU")
    parser.add_argument("--share", default="0/1", help="of the runs, that of one process: 2/6 is the third of six")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--gpu", help="table: only rows of this GPU, by its full name")
    args = parser.parse_args(argv)
    actions = {"run": run if args.processes <= 1 else run_side_by_side, "table": table}
    actions[args.what](args)


if __name__ == "__main__":
    main()

"""Training with transformers' Trainer: the losses of tilemoe's experts beside transformers' own, step by step.

    python benchmarks/hf_finetune.py
    python benchmarks/hf_finetune.py --runs tilemoe,grouped_mm,eager --steps 50

A gpt-oss of two layers with its real widths and random weights, over the bytes of Python's standard library, trained in
bf16 by Trainer's default optimiser. Every run starts from the same weights and sees the same batches. What two runs of
the same training may differ by is measured, not assumed: "eager" computes the experts by transformers' own loop,
"reversed" is grouped_mm with the rows of each batch in reverse order, and "fp32" trains the weights in fp32. ``held``:
the losses of tilemoe and grouped_mm are no further apart, at most and in the mean square, than some pair of
transformers' bf16 runs, which round the same products at the same places and so differ by less than bf16 leaves open;
``held_in_bf16``: than grouped_mm's and fp32's.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import hf_cases
import torch
from torch import Tensor, nn

from tilemoe.bench import record
from tilemoe.data import open_corpus
from tilemoe.integrations import transformers as integration

NAME = "hf_finetune"
OURS, THEIRS, EXACT = "tilemoe", "grouped_mm", "fp32"
BYTES = 256
SETTLED = 0.5  # of the steps are over before the time of a step is taken

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """How a run differs from the others; ``is_reversed``: each batch's rows are in reverse order."""

    implementation: str
    dtype: torch.dtype = torch.bfloat16
    is_reversed: bool = False


RUNS = MappingProxyType(
    {
        OURS: Run("tilemoe"),
        THEIRS: Run("grouped_mm"),
        "eager": Run("eager"),
        "reversed": Run("grouped_mm", is_reversed=True),
        EXACT: Run("eager", dtype=torch.float32),
    }
)


def corpus_windows(count: int, length: int) -> list[dict[str, Tensor]]:
    """``count`` windows of bytes from the standard library, each from a place of its own, in a fixed random order."""
    needed = count * length
    parts: list[bytes] = []
    found = 0
    for text in open_corpus("stdlib").documents():
        parts.append(text.encode())
        found += len(parts[-1])
        if found >= needed:
            break
    text = b"".join(parts)
    if len(text) < needed:
        raise SystemExit(f"the corpus has {len(text)} bytes, {needed} are asked for: fewer steps or a smaller batch")
    windows = torch.frombuffer(bytearray(text[:needed]), dtype=torch.uint8).view(count, length).long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return [{"input_ids": window, "labels": window} for window in windows[order]]


def train(run: Run, initial: nn.Module, windows: list[dict[str, Tensor]], args: argparse.Namespace) -> Row:
    """One run of Trainer: the loss of each step, and milliseconds of a step once it is settled."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    class LaunchTracer(Trainer):
        """Keeps each step's loss on its device: Trainer's log rounds, and reading it would wait for the GPU."""

        def training_step(self, *inputs: Any, **options: Any) -> Tensor:
            loss: Tensor = super().training_step(*inputs, **options)
            losses.append(loss.detach().clone())
            if len(losses) == settled:
                started.append(now(loss))
            return loss

    def collate(rows: Sequence[Any]) -> Mapping[str, Tensor]:
        return default_data_collator(rows[::-1] if run.is_reversed else rows)

    losses: list[Tensor] = []
    started: list[float] = []
    settled = max(1, int(SETTLED * args.steps))
    model = copy.deepcopy(initial)
    if run.dtype == torch.float32:
        model = model.float()
    model.set_experts_implementation(run.implementation)  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            warmup_steps=args.steps // 10,
            bf16=run.dtype == torch.bfloat16,
            seed=0,
            use_cpu=args.device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        LaunchTracer(model=model, args=training, train_dataset=windows, data_collator=collate).train()
    seconds = now(losses[-1]) - started[0]
    values = [round(float(loss), 6) for loss in losses]
    return {"losses": values, "ms_per_step": round(1e3 * seconds / max(1, len(losses) - settled), 2)}


def now(tensor: Tensor) -> float:
    """The host's clock, once the device has come so far."""
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def apart(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The largest difference of two runs' losses at a step, and its root mean square."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    rms = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))
    return {"max": round(max(gaps), 6), "rms": round(rms, 6)}


def compare(losses: Mapping[str, Sequence[float]]) -> Row:
    """Every two runs' distance by "one~other", and what holds; None where the runs for it are missing."""
    gaps = {f"{a}~{b}": apart(losses[a], losses[b]) for a, b in itertools.combinations(losses, 2)}
    ours = gaps.get(f"{OURS}~{THEIRS}")
    references = [gap for pair, gap in gaps.items() if OURS not in pair and EXACT not in pair]

    def within(others: Sequence[Mapping[str, float]]) -> bool | None:
        if ours is None or not others:
            return None
        return all(ours[kind] <= max(other[kind] for other in others) for kind in ("max", "rms"))

    to_exact = [gaps[pair] for pair in (f"{THEIRS}~{EXACT}",) if pair in gaps]
    return {"apart": gaps, "held": within(references), "held_in_bf16": within(to_exact)}


def describe(compared: Row) -> str:
    apart = compared["apart"].items()
    lines = [f"{pair:24} max {gap['max']:.6f}, rms {gap['rms']:.6f} nats/token" for pair, gap in apart]
    lines.append(f"within transformers' own bf16 runs: {compared['held']}; within fp32's distance: ")
    return "\n".join(lines) + str(compared["held_in_bf16"])


def model_of(args: argparse.Namespace) -> hf_cases.Model:
    """gpt-oss over bytes, with ``args.layers``; small on a CPU."""
    model = hf_cases.MODELS["gpt-oss-20b"]
    model = hf_cases.tiny(model) if args.device == "cpu" else model
    model = model.with_config(num_hidden_layers=args.layers, vocab_size=BYTES)
    return replace(model, batch=args.batch, sequence=args.sequence)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--device", default="cuda", help='"cpu" trains a tiny model, to see that everything works')
    args = parser.parse_args(arguments)
    names = args.runs.split(",")
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        raise SystemExit(f"no run called {unknown[0]!r}; known are {', '.join(RUNS)}")
    windows = corpus_windows(args.steps * args.batch, args.sequence)
    case = model_of(args)
    initial = hf_cases.build(case, torch.device(args.device), torch.bfloat16)
    integration.use(initial)
    parameters = sum(each.numel() for each in initial.parameters())
    keys = ("steps", "batch", "sequence", "layers", "lr")
    where = {"case": f"gpt-oss x{args.layers}", "parameters": parameters, **{key: getattr(args, key) for key in keys}}
    print(where, flush=True)
    found: dict[str, Row] = {}
    for name in names:
        start = time.perf_counter()
        found[name] = train(RUNS[name], initial, windows, args)
        losses = found[name]["losses"]
        line = f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f} nats/token, {found[name]['ms_per_step']} ms a step"
        print(f"{line}, {time.perf_counter() - start:.0f} s", flush=True)
        record.append(NAME, [{"mode": "run", **where, "run": name, **found[name]}])
        if args.device == "cuda":
            torch.cuda.empty_cache()
    compared = compare({name: row["losses"] for name, row in found.items()})
    record.append(NAME, [{"mode": "comparison", **where, **compared}])
    print(describe(compared))


if __name__ == "__main__":
    main()

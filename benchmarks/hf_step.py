"""A training step of transformers' own models, real widths and few layers: tilemoe's experts against transformers'.

    python benchmarks/hf_step.py --cases gpt-oss-20b,OLMoE-1B-7B --rounds 5
    python benchmarks/hf_step.py --profile gpt-oss-20b
    python benchmarks/hf_step.py --report

A step is forward, loss and backward in bf16, no optimiser: one model (`hf_cases`) with one batch of random tokens, of
which only ``experts_implementation`` changes. Each implementation runs once first: its loss and its gradients are
compared with `grouped_mm`'s, and with ``--exact`` with those of the model in fp32. ``noise`` is what transformers'
"eager" experts differ from `grouped_mm` by, which round where it does: so it is less than what bf16 leaves open. Where
bf16 puts a router's logits in another order a token goes elsewhere, so gradients differ by percents. One that runs out
of memory is recorded so. Then they are timed in the same rounds, in changing order, by the host's clock: a user waits
for the host, too. The peak of memory counts weights and gradients.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import hf_cases
import profiles
import torch
from torch import Tensor, nn

from tilemoe.bench import record, timing
from tilemoe.bench.gate import Difference
from tilemoe.integrations import transformers as integration

NAME, MODE = "hf_step", "step"
OURS, THEIRS, REFERENCE = "tilemoe", "grouped_mm", "eager"
IMPLEMENTATIONS = (OURS, THEIRS, "batched_mm")
WARM_STEPS = 2
TOP = 25  # kernels that are printed
_GROUPS = (("experts", re.compile(r"\.experts\.")), ("router", re.compile(r"\.(gate|router)\.")))

Row = dict[str, Any]
Gradients = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is measured: the model, its tokens (batch, sequence), and where they are."""

    model: nn.Module
    ids: Tensor

    def step(self, implementation: str) -> Tensor:
        """Forward, loss and backward; every gradient is made anew. The loss."""
        self.model.set_experts_implementation(implementation)  # type: ignore[operator]
        self.model.zero_grad(set_to_none=True)
        loss: Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def synchronize(self) -> None:
        if self.ids.is_cuda:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gradients, and what PyTorch keeps of memory that is free."""
        self.model.zero_grad(set_to_none=True)
        if self.ids.is_cuda:
            torch.cuda.empty_cache()


def make(case: hf_cases.Model, device: torch.device) -> Subject:
    model = hf_cases.build(case, device, torch.bfloat16)
    integration.use(model)
    generator = torch.Generator(device).manual_seed(1)
    size = (case.batch, case.sequence)
    return Subject(model, torch.randint(case.config["vocab_size"], size, device=device, generator=generator))


def gradients(subject: Subject, implementation: str) -> tuple[float, Gradients]:
    """The loss and every parameter's gradient, which the model gives up."""
    loss = float(subject.step(implementation))
    found = {name: each.grad for name, each in subject.model.named_parameters() if each.grad is not None}
    subject.model.zero_grad(set_to_none=True)
    return loss, found


def difference(actual: Gradients, expected: Gradients) -> dict[str, float]:
    """RMS-relative, of the experts' parameters, the routers' and the rest."""
    assert actual.keys() == expected.keys(), "both have the same parameters"
    sums = {name: Difference() for name in ("experts", "router", "rest")}
    for name, gradient in expected.items():
        group = next((group for group, pattern in _GROUPS if pattern.search(name)), "rest")
        parts = zip(actual[name], gradient, strict=True) if gradient.ndim == 3 else [(actual[name], gradient)]
        for ours, theirs in parts:  # an expert at a time: differences take fp32 copies
            sums[group].add(ours, theirs.float())
    return {group: float(f"{each.relative():.3g}") for group, each in sums.items()}


def agree(subject: Subject, implementations: list[str], exact: bool) -> dict[str, Row]:
    """Implementation, "eager" too, to its loss and its differences from `grouped_mm` and, if asked, from fp32."""
    found: dict[str, Row] = {}
    right = in_fp32(subject) if exact else None
    theirs, kept = gradients(subject, THEIRS)
    for name in dict.fromkeys([THEIRS, *implementations, REFERENCE]):
        start = time.perf_counter()
        try:
            loss, grads = (theirs, kept) if name == THEIRS else gradients(subject, name)
        except torch.OutOfMemoryError as error:
            found[name] = {"problem": ". ".join(str(error).split(". ")[:2])}
        else:
            found[name] = {"problem": None, "loss": loss, "loss_difference": abs(loss - theirs)}
            found[name]["grad_difference"] = difference(grads, kept)
            if right is not None:
                found[name]["grad_error"] = difference(grads, right)
            del grads
        subject.release()
        seconds = time.perf_counter() - start
        print(f"  {name}: {found[name]['problem'] or found[name]} {seconds:.1f} s", flush=True)
    return found


def in_fp32(subject: Subject) -> Gradients | None:
    """The gradients of the same model and batch in fp32, by "eager" experts; None where memory does not allow it."""
    found = None
    try:
        found = gradients(replace(subject, model=copy.deepcopy(subject.model).float()), REFERENCE)[1]
    except torch.OutOfMemoryError:
        print("  not compared with fp32: out of memory", flush=True)
    subject.release()
    return found


def measure(subject: Subject, names: list[str], args: argparse.Namespace) -> tuple[dict[str, list[float]], Row]:
    """Implementation to the milliseconds of a step by round, and to its peak of memory in bytes, None on a CPU."""
    found: dict[str, list[float]] = {name: [] for name in names}
    peak: Row = dict.fromkeys(names)
    for index in range(args.rounds):
        for name in timing.turn(names, index):
            for _ in range(WARM_STEPS if index == 0 else 1):
                subject.step(name)
            subject.synchronize()
            if subject.ids.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(args.steps):
                subject.step(name)
            subject.synchronize()
            found[name].append(1e3 * (time.perf_counter() - start) / args.steps)
            if subject.ids.is_cuda:
                peak[name] = max(peak[name] or 0, torch.cuda.max_memory_allocated())
    subject.release()
    return found, peak


def rows_of(
    case: hf_cases.Model, agreed: dict[str, Row], ms: dict[str, list[float]], peak: Row, names: list[str]
) -> list[Row]:
    """A row for each implementation; ours has the ratios to `grouped_mm`, the noise and whether its bar is held."""
    rows = []
    for name in names:
        row: Row = {"implementation": name, **agreed[name]}
        if name in ms:
            row |= {"ms": timing.summary(ms[name]), "peak_bytes": peak[name]}
            row["tokens_per_s"] = round(1e3 * case.batch * case.sequence / statistics.median(ms[name]))
        if name == OURS and OURS in ms:
            eager = agreed[REFERENCE]
            row["noise"] = {key: eager.get(key) for key in ("problem", "loss_difference", "grad_difference")}
            row |= {"ratio": timing.ratio(ms[OURS], ms[THEIRS]), "bar": case.bar}
            row["memory_ratio"] = round(peak[OURS] / peak[THEIRS], 4) if peak[THEIRS] else None
            row["held"] = row["ratio"] >= (case.bar or 0) and (row["memory_ratio"] or 0) <= 1
        rows.append(row)
    return rows


def one_case(args: argparse.Namespace, name: str, case: hf_cases.Model) -> list[Row]:
    import transformers

    start = time.perf_counter()
    subject = make(case, torch.device(args.device))
    parameters = sum(each.numel() for each in subject.model.parameters())
    layers, vocabulary = case.config["num_hidden_layers"], case.config["vocab_size"]
    where = {
        "case": name, "mode": MODE, "layers": layers, "batch": case.batch, "sequence": case.sequence,
        "attention": case.attention, "vocabulary": vocabulary, "parameters": parameters,
        "transformers": transformers.__version__, "rounds": args.rounds, "steps": args.steps,
    }  # fmt: skip
    print(f"{name}: {parameters / 1e9:.2f} B parameters, {where}", flush=True)
    names = list(dict.fromkeys([OURS, THEIRS, *args.implementations.split(",")]))
    agreed = agree(subject, names, args.exact)
    ms, peak = measure(subject, [each for each in names if agreed[each]["problem"] is None], args)
    rows = [{**where, **row} for row in rows_of(case, agreed, ms, peak, names)]
    for row in rows:
        print(describe(row), flush=True)
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return rows


def describe(row: Row) -> str:
    head = f"{row['case']:16} {row['implementation']:10}"
    if row["problem"]:
        return f"{head} {row['problem']}"
    memory = f", {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else ""
    line = f"{head} {row['ms']['median']:8.2f} ms, {row['tokens_per_s']} tokens/s{memory}, loss {row['loss']:.4f}"
    if "ratio" not in row:
        return line
    bar = "" if row["bar"] is None else f" of {row['bar']:.2f} asked"
    held = "held" if row["held"] else "MISSED"
    return f"{line}; {row['ratio']:.3f}x{bar}, memory {row['memory_ratio']}, {held}; gradients {_differences(row)}"


def _differences(row: Row) -> str:
    noise = row["noise"]["grad_difference"] or {}
    return ", ".join(f"{group} {e:.1e} (noise {noise.get(group)})" for group, e in row["grad_difference"].items())


def profile(args: argparse.Namespace, name: str, case: hf_cases.Model) -> None:
    """Print the longest kernels of a step of each implementation; all of them go to results/profiles."""
    subject = make(case, torch.device(args.device))
    folder = record.RESULTS / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"hf-step-{name}-{record.commit()}.txt"
    for implementation in (OURS, THEIRS):
        for _ in range(WARM_STEPS):
            subject.step(implementation)
        rows = profiles.of_kernels(partial(subject.step, implementation))
        title = f"{name}, {implementation}"
        profiles.write(path, title, rows)
        print(f"{title}: {sum(ms for _, ms, _ in rows):.2f} ms of kernels")
        for kernel, ms, count in rows[:TOP]:
            print(f"{ms:10.3f} ms {count:6d}  {kernel[:100]}", flush=True)
    print(f"all of them: {path.name}")


def report() -> str:
    """The newest row of every case: ours against `grouped_mm`, and the others."""
    rows = record.latest(NAME, MODE, None, "case", "batch", "sequence", "attention", "vocabulary", "implementation")
    return "\n".join(describe(row) for row in rows.values())


def cases_of(args: argparse.Namespace, names: str) -> dict[str, hf_cases.Model]:
    """The models asked for, changed as the options say; on a CPU small ones of the same architecture."""
    asked = list(hf_cases.MODELS) if names == "all" else names.split(",")
    unknown = [name for name in asked if name not in hf_cases.MODELS]
    if unknown:
        raise SystemExit(f"no case called {unknown[0]!r}; known are all, {', '.join(hf_cases.MODELS)}")
    changes = {key: value for key in ("batch", "sequence", "attention") if (value := getattr(args, key)) is not None}
    inner = {"num_hidden_layers": args.layers, "vocab_size": args.vocabulary}
    inner = {key: value for key, value in inner.items() if value is not None}
    found = {}
    for name in asked:
        case = hf_cases.MODELS[name]
        case = hf_cases.tiny(case) if args.device == "cpu" else case
        found[name] = replace(case.with_config(**inner), **changes)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="all")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help=f"beside {OURS} and {THEIRS}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in a round, of each implementation")
    parser.add_argument("--exact", action="store_true", help="gradients' errors against fp32, where memory allows")
    parser.add_argument("--profile", metavar="CASE", help="print the kernels of a step and measure nothing")
    parser.add_argument("--report", action="store_true", help="print the newest rows")
    parser.add_argument("--device", default="cuda", help='"cpu" runs tiny models, to see that everything works')
    for name in ("batch", "sequence", "layers", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="instead of the case's")
    parser.add_argument("--attention", help="transformers' attn_implementation instead of the case's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this many")
    args = parser.parse_args(arguments)
    if args.report:
        print(report())
        return
    start = time.perf_counter()
    for name, case in cases_of(args, args.profile or args.cases).items():
        if time.perf_counter() - start > args.seconds:
            print(f"{name} is left out: --seconds are over", flush=True)
        elif args.profile:
            profile(args, name, case)
        else:
            try:
                record.append(NAME, one_case(args, name, case))
            except torch.OutOfMemoryError as error:
                print(f"{name} is left out: {error}", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

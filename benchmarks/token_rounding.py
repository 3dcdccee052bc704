"""Token rounding against plain top-K: the whole layer with its router, in parts.

    python benchmarks/token_rounding.py run --cases all --modes nearest
    python benchmarks/token_rounding.py run --cases E256-d4096,Qwen3-Next-16k --modes all
    python benchmarks/token_rounding.py kernels --cases all --modes nearest
    python benchmarks/token_rounding.py table
    python benchmarks/token_rounding.py plot --out results/figures

run appends to results/token_rounding.jsonl, a case as soon as it is measured; with ``--device cpu`` it runs toy cases,
to see that everything works. All contestants share the weights, the input and the kernels. A step is timed behind
other work, so that the host is ahead and what is measured is the GPU's. "full tiles" runs the experts alone on rows as
many as top-K's that fill whole tiles: top-K's experts minus that is what padding costs it, and a mode recovers the
part of it by which the whole layer, routing included, becomes faster. kernels prints the microseconds of each kernel
of the rounding.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peers
import record
import timing
import torch
from torch import Tensor

import tilemoe
from tilemoe.config import ROUNDING_MODES, RouterConfig, TokenRounding
from tilemoe.perf.shape import MoEShape
from tilemoe.routing.plan import RoutingPlan

TOPK, FULL = "top-K", "full tiles"
FORWARD, BACKWARD = ("logits", "routing", "experts"), ("experts_grad", "routing_grad", "logits_grad")
PARTS = (*FORWARD, *BACKWARD)
GATE_TOLERANCE = 2e-2  # RMS error over RMS value, both in bf16
T = 16384
CASES = MappingProxyType(
    {
        **{f"E{e}-d1536-n256": MoEShape(T, 1536, 256, e, 8) for e in (64, 128, 256, 512)},
        **{f"E{e}-d4096-n1024": MoEShape(T, 4096, 1024, e, 4) for e in (32, 64, 128, 256)},
        **{f"E{e}-d1536-n1024": MoEShape(T, 1536, 1024, e, 2) for e in (16, 32, 64, 128)},
        "Qwen3-Next-16k": MoEShape(T, 2048, 512, 512, 10),
        "Qwen3-Next-32k": MoEShape(2 * T, 2048, 512, 512, 10),
    }
)
TOYS = MappingProxyType({"toy-E8": MoEShape(256, 32, 16, 8, 2), "toy-E16": MoEShape(256, 32, 16, 16, 2)})

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Contestant:
    """A layer in training mode; ``plan``: the routing that replaces its own, for "full tiles"."""

    layer: tilemoe.MoE
    plan: RoutingPlan | None = None


@dataclass(frozen=True)
class Machine:
    """Where a step runs: how a moment is marked, what lies between two marks in milliseconds, and what runs before."""

    device: torch.device
    dtype: torch.dtype
    tile: int
    mark: Callable[[], Any]
    milliseconds: Callable[[Any, Any], float]
    synchronize: Callable[[], None]
    run_ahead: Callable[[], object]


def gpu() -> Machine:
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(square)

    def run_ahead() -> None:
        for _ in range(3):  # some 5 ms: more than the host needs for a step
            torch.mm(square, square, out=out)

    return Machine(
        torch.device("cuda"),
        torch.bfloat16,
        128,
        timing.event,
        lambda start, end: start.elapsed_time(end),
        torch.cuda.synchronize,
        run_ahead,
    )


def cpu() -> Machine:
    def nothing() -> None:
        """Nothing runs ahead on a CPU."""

    def between(start: float, end: float) -> float:
        return 1e3 * (end - start)

    return Machine(torch.device("cpu"), torch.float32, 16, time.perf_counter, between, nothing, nothing)


def build(shape: MoEShape, weights: peers.Weights, rounding: TokenRounding | None) -> tilemoe.MoE:
    cfg = replace(peers.layer_config(shape), router=RouterConfig(), rounding=rounding)
    layer = tilemoe.MoE(cfg, device="meta")
    layer.router.weight, layer.experts.w1, layer.experts.w2 = weights.router, weights.w1, weights.w2
    return layer


def contestants(shape: MoEShape, modes: list[str], machine: Machine, x: Tensor) -> dict[str, Contestant]:
    """Top-K, full tiles, and the modes, all on one set of weights. A mode that is wrong is reported and left out."""
    weights = peers.make_weights(shape, machine.device, machine.dtype)
    found = {TOPK: Contestant(build(shape, weights, None))}
    for mode in modes:
        layer = build(shape, weights, TokenRounding(mode, machine.tile))  # type: ignore[arg-type]
        problem = gate(layer, x, machine.tile)
        if problem is None:
            found[mode] = Contestant(layer)
        else:
            print(f"{mode} is left out: {problem}", flush=True)
    even = build(shape, weights, TokenRounding("balance", machine.tile))
    with torch.no_grad():
        found[FULL] = Contestant(even, tilemoe.route(even.router(x), even.cfg).plan)
    return found


def gate(layer: tilemoe.MoE, x: Tensor, tile: int) -> str | None:
    """None if every expert has full tiles and the experts agree with plain PyTorch on those rows, else what is off."""
    with torch.no_grad():
        routing = tilemoe.route(layer.router(x), layer.cfg)
        if bool((routing.tokens_per_expert % tile).any()):
            return "an expert's rows are no multiple of the tile"
        actual = layer.experts(x, routing.plan, routing.scores).float()
        experts = layer.experts
        exact = tilemoe.moe(x, experts.w1, experts.w2, routing.plan, routing.scores, kernels="torch").float()
    error = float((actual - exact).norm() / exact.norm())
    return None if error <= GATE_TOLERANCE else f"the output is off by {error:.2e} RMS-relative"


def step(contestant: Contestant, x: Tensor, do: Tensor, machine: Machine) -> list[Any]:
    """Forward and backward once; the marks around the six parts. Every gradient is made anew."""
    layer, mark = contestant.layer, machine.mark
    machine.run_ahead()
    marks = [mark()]
    logits = layer.router(x)
    marks.append(mark())
    leaf = logits.detach().requires_grad_()
    if contestant.plan is None:
        routing = tilemoe.route(leaf, layer.cfg)
        plan, scores = routing.plan, routing.scores
    else:
        plan = contestant.plan
        scores = leaf.new_ones(plan.num_pairs).requires_grad_()
    marks.append(mark())
    inner, score_leaf = x.detach().requires_grad_(), scores.detach().requires_grad_()
    out = layer.experts(inner, plan, score_leaf)
    marks.append(mark())
    *_, d_scores = torch.autograd.grad(out, [inner, layer.experts.w1, layer.experts.w2, score_leaf], do)
    marks.append(mark())
    d_logits = torch.zeros_like(leaf) if contestant.plan is not None else torch.autograd.grad(scores, leaf, d_scores)[0]
    marks.append(mark())
    torch.autograd.grad(logits, [x, layer.router.weight], d_logits)
    marks.append(mark())
    return marks


def measure(found: dict[str, Contestant], x: Tensor, do: Tensor, machine: Machine, args: Any) -> dict[str, list[Row]]:
    """Contestant to, for each round, the median milliseconds of each part. Each round starts with another one."""
    samples: dict[str, list[Row]] = {name: [] for name in found}
    for name in found:
        step(found[name], x, do, machine)
    for index in range(args.rounds):
        for name in timing.turn(list(found), index):
            marks = [step(found[name], x, do, machine) for _ in range(args.settle + args.calls)][args.settle :]
            machine.synchronize()
            times = [[machine.milliseconds(a, b) for a, b in itertools.pairwise(m)] for m in marks]
            parts = zip(*times, strict=True)
            samples[name].append(dict(zip(PARTS, map(statistics.median, parts), strict=True)))
    return samples


def waste(tokens_per_expert: Tensor, tile: int) -> float:
    """Percent by which rows padded to ``tile`` exceed the rows."""
    rows = tokens_per_expert.double()
    padded = torch.ceil(rows / tile) * tile
    return round(100 * float(padded.sum() / rows.sum() - 1), 3)


def summarise(samples: dict[str, list[Row]], counts: dict[str, Tensor], tile: int) -> list[Row]:
    """A row for each contestant: medians, and ratios round by round against top-K."""

    def totals(name: str, parts: tuple[str, ...]) -> list[float]:
        return [sum(sample[part] for part in parts) for sample in samples[name]]

    experts = ("experts", "experts_grad")
    padding = [a - b for a, b in zip(totals(TOPK, experts), totals(FULL, experts), strict=True)]
    rows = []
    for name in samples:
        row: Row = {"contestant": name, "rows": int(counts[name].sum())}
        row |= {f"{part}_ms": timing.summary([sample[part] for sample in samples[name]]) for part in PARTS}
        for label, parts in (("forward", FORWARD), ("backward", BACKWARD), ("total", PARTS)):
            row[f"{label}_ms"] = timing.summary(totals(name, parts))
            row[f"{label}_speedup"] = timing.ratio(totals(name, parts), totals(TOPK, parts))
        routing, total = totals(name, ("routing", "routing_grad")), totals(name, PARTS)
        row["routing_percent"] = round(statistics.median(100 * a / b for a, b in zip(routing, total, strict=True)), 3)
        gained = [a - b for a, b in zip(totals(TOPK, PARTS), total, strict=True)]
        cost = statistics.median(padding)
        row["recovered"] = round(statistics.median(gained) / cost, 4) if cost > 0 else None
        row["padding_ms"] = timing.summary(padding)
        change = counts[name] - counts[TOPK]
        row |= {"added": int(change.clamp(min=0).sum()), "dropped": int((-change).clamp(min=0).sum())}
        # The kernels' own tile may be half of it where it pays.
        row |= {"waste_percent": waste(counts[name], tile), "waste_half_tile_percent": waste(counts[name], tile // 2)}
        rows.append(row)
    return rows


def run(args: argparse.Namespace) -> None:
    machine = gpu() if args.device == "cuda" else cpu()
    known = CASES if args.device == "cuda" else TOYS
    names = list(known) if args.cases == "all" else args.cases.split(",")
    modes = list(ROUNDING_MODES) if args.modes == "all" else args.modes.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no case called {unknown[0]!r}; known are {', '.join(known)}")
    start = time.perf_counter()
    for name in names:
        if args.seconds and time.perf_counter() - start > args.seconds:
            print(f"out of time before {name}")
            return
        shape = known[name]
        torch.manual_seed(0)
        x = torch.randn(shape.num_tokens, shape.hidden_size, device=machine.device, dtype=machine.dtype)
        x, do = x.requires_grad_(), torch.randn_like(x)
        found = contestants(shape, modes, machine, x)
        counts = {}
        for contestant, entry in found.items():
            with torch.no_grad():
                plan = entry.plan or tilemoe.route(entry.layer.router(x), entry.layer.cfg).plan
            counts[contestant] = plan.rows_per_expert.cpu()
        rows = summarise(measure(found, x, do, machine, args), counts, machine.tile)
        where = {"case": name, **asdict(shape), "mode": "sustained", "tile": machine.tile, "rounds": args.rounds}
        rows = [{**where, **row} for row in rows]
        for row in rows:
            print(describe(row), flush=True)
        record.append("token_rounding", rows)
        del found, x, do
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()


def kernels(args: argparse.Namespace) -> None:
    """Print the median time of each launch of a rounding and of its gradient, run in order."""
    from tilemoe.kernels.triton import rounding
    from tilemoe.routing.rounding import draw_uniform, row_capacity

    machine = gpu()
    for name in list(CASES) if args.cases == "all" else args.cases.split(","):
        shape = CASES[name]
        experts, k = shape.num_experts, shape.num_experts_per_tok
        logits = torch.randn(shape.num_tokens, experts, device="cuda")
        kept, ids = logits.softmax(dim=-1).topk(k, dim=-1)
        for mode in ROUNDING_MODES if args.modes == "all" else args.modes.split(","):
            how = TokenRounding(mode, machine.tile)  # type: ignore[arg-type]
            capacity = row_capacity(how, shape.num_tokens, k, experts)
            spec = rounding.RoundingSpec(mode, machine.tile, "softmax", True, 1.0, capacity)
            uniform = draw_uniform(experts, how, logits.device, None)
            launches, rows = rounding.round_launches(logits, ids.int(), kept, uniform, None, spec)
            saved = (rows.norm, rows.row_of_pair, rows.code_of_pair, rows.pair_start_of_token)
            launches.append(rounding.score_grad_launch(rows.scores, logits, ids.int(), None, *saved, spec))
            times = []
            for _ in range(args.settle + args.calls):
                machine.run_ahead()
                marks = [machine.mark()]
                for launch in launches:
                    launch.run()
                    marks.append(machine.mark())
                machine.synchronize()
                times.append([1e3 * machine.milliseconds(a, b) for a, b in itertools.pairwise(marks)])
            medians = [statistics.median(found) for found in zip(*times[args.settle :], strict=True)]
            names = [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in launches]
            parts = " ".join(f"{what} {us:.1f}" for what, us in zip(names, medians, strict=True))
            print(f"{name:16} {mode:13} {sum(medians):6.1f} us: {parts}", flush=True)


def describe(row: Row) -> str:
    times = " ".join(f"{row[f'{part}_ms']['median']:8.3f}" for part in ("forward", "backward"))
    routing = " + ".join(f"{row[f'{part}_ms']['median']:.3f}" for part in ("routing", "routing_grad"))
    return (
        f"{row['case']:16} {row['contestant']:13} {times} ms, routing {routing} ms = {row['routing_percent']:.1f}%, "
        f"waste {row['waste_percent']:.1f}%, {row['forward_speedup']:.3f}x {row['backward_speedup']:.3f}x "
        f"{row['total_speedup']:.3f}x{recovers(row)}"
    )


def recovers(row: Row) -> str:
    """Nothing where padding costs nothing that could be measured."""
    return "" if row["recovered"] is None else f", recovers {100 * row['recovered']:.0f}%"


def table(args: argparse.Namespace) -> None:
    """The last recorded row of each case and contestant, as Markdown."""
    rows = record.latest("token_rounding", "sustained", args.gpu, "case", "contestant")
    header = ["case", "routing", "padded rows", "forward", "backward", "routing", "of the layer"]
    header += ["forward / both against top-K", "recovers"]
    print("| " + " | ".join(header) + " |")
    print("| :--- | :--- |" + " ---: |" * (len(header) - 2))
    for (case, contestant), row in rows.items():
        if contestant == FULL:
            continue
        routing = row["routing_ms"]["median"] + row["routing_grad_ms"]["median"]
        speed = " / ".join(f"{row[f'{part}_speedup']:.2f}" for part in ("forward", "total"))
        cells = [
            case, contestant, f"{row['waste_percent']:.1f}%",
            *(f"{row[f'{part}_ms']['median']:.3f} ms" for part in ("forward", "backward")),
            f"{routing:.3f} ms", f"{row['routing_percent']:.1f}%", speed,
            "" if contestant == TOPK else recovers(row).removeprefix(", recovers "),
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def plot(args: argparse.Namespace) -> None:
    """Speed-up of forward + backward over top-K, and the rows that top-K pads, over the cases."""
    import matplotlib.pyplot as plt

    rows = record.latest("token_rounding", "sustained", args.gpu, "case", "contestant")
    cases = list(dict.fromkeys(case for case, _ in rows))
    names = [name for name in (*ROUNDING_MODES,) if any(found == name for _, found in rows)]
    figure, axes = plt.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        here = [(place, rows[case, name]) for place, case in enumerate(cases) if (case, name) in rows]
        places = [place + index * width for place, _ in here]
        axes[0].bar(places, [row["total_speedup"] for _, row in here], width, label=name)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set_ylabel("forward + backward: top-K over this")
    axes[0].legend(ncols=len(names))
    centres = [place + 0.4 - width / 2 for place in range(len(cases))]
    padded = [rows[case, TOPK]["waste_percent"] if (case, TOPK) in rows else 0.0 for case in cases]
    axes[1].bar(centres, padded, 0.8)
    axes[1].set_ylabel("rows that top-K pads, %")
    axes[1].set_xticks(centres, cases, rotation=30, ha="right")
    some = next(iter(rows.values()))
    figure.suptitle(f"Token rounding · {some['gpu'] or some['machine']} · {some['commit']}")
    path = Path(args.out) / "token-rounding.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    print(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "kernels", "table", "plot"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", default="all", help='"all" or names, separated by commas')
    parser.add_argument("--modes", default="nearest", help='"all" or modes, separated by commas')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle", type=int, default=8, help="steps before those that are timed, in each round")
    parser.add_argument("--calls", type=int, default=8, help="timed steps of a round")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no case later than that; 0: run all")
    parser.add_argument("--gpu", help="table and plot: only rows of this GPU, by its full name")
    parser.add_argument("--out", default=str(record.RESULTS / "figures"))
    args = parser.parse_args(argv)
    {"run": run, "kernels": kernels, "table": table, "plot": plot}[args.what](args)


if __name__ == "__main__":
    main()

"""Token rounding against plain top-K: the whole layer with its router, and its parts.

    python benchmarks/token_rounding.py run --cases all --modes nearest --seconds 200
    python benchmarks/token_rounding.py run --cases E256-d4096-n1024,Qwen3-Next-16k --kernels triton
    python benchmarks/token_rounding.py kernels --cases all --modes nearest
    python benchmarks/token_rounding.py table
    python benchmarks/token_rounding.py plot --out results/figures

run appends to results/token_rounding.jsonl, a case as soon as it is measured, and leaves out what that file has of this
commit, GPU and backend: the same command goes on. With ``--device cpu`` it runs toy cases, to see that everything
works. All contestants share the weights, the input and the kernels, and are checked first (`rounding_gate`).

"forward" and "backward" are the layer as a model calls it. The six parts are timed apart, in the same rounds. All of
it runs behind other work, so that the host is ahead and the GPU's time is measured; ``host_ms`` is what launching took.
"full tiles" runs the experts alone on other top-K ids, by which each of them has whole tiles: top-K's experts minus
that is what padding costs, and a mode recovers the part of it by which the whole layer, routing included, is faster.
The Hopper kernels pass by the lower half of a last tile that has no rows there, so top-K pads less with them than the
tile says; ``--kernels triton`` computes whole tiles. warm compiles what the cases need, and measures nothing. kernels
prints and records each kernel of the rounding.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import rounding_gate
import rounding_report
import torch
from rounding_report import CHOSEN, FULL, NAME, PARTS, TOPK, WHOLE
from torch import Tensor

import tilemoe
from tilemoe.bench import peers, record, timing
from tilemoe.config import ROUNDING_MODES, RouterConfig, TokenRounding
from tilemoe.plan import RoutingPlan
from tilemoe.shape import MoEShape

MATMUL_MS = 1.4  # of 8192^3 in bf16 on an H200
T = 16384
WARM_TOKENS = 8192
WARM_STEPS, HOST_STEPS = 4, 5  # until nothing is compiled or recorded any more, and then
CASES = MappingProxyType(  # those with a promise of their own first
    {
        "E256-d4096-n1024": MoEShape(T, 4096, 1024, 256, 4),
        "Qwen3-Next-16k": MoEShape(T, 2048, 512, 512, 10),
        "Qwen3-Next-32k": MoEShape(2 * T, 2048, 512, 512, 10),
        **{f"E{e}-d1536-n256": MoEShape(T, 1536, 256, e, 8) for e in (512, 256, 128, 64)},
        **{f"E{e}-d4096-n1024": MoEShape(T, 4096, 1024, e, 4) for e in (128, 64, 32)},
        **{f"E{e}-d1536-n1024": MoEShape(T, 1536, 1024, e, 2) for e in (128, 64, 32, 16)},
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
    """Where a step runs: how a moment is marked, what lies between two marks in milliseconds, and ``run_ahead``, which
    keeps the device busy for about as many milliseconds as it is told.
    """

    device: torch.device
    dtype: torch.dtype
    tile: int
    mark: Callable[[], Any]
    milliseconds: Callable[[Any, Any], float]
    synchronize: Callable[[], None]
    run_ahead: Callable[[float], None]


def gpu() -> Machine:
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(square)

    def run_ahead(milliseconds: float) -> None:
        for _ in range(math.ceil(milliseconds / MATMUL_MS)):
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
    def between(start: float, end: float) -> float:
        return 1e3 * (end - start)

    return Machine(
        torch.device("cpu"), torch.float32, 16, time.perf_counter, between, lambda: None, lambda milliseconds: None
    )


def build(shape: MoEShape, weights: peers.Weights, rounding: TokenRounding | None, kernels: str | None) -> tilemoe.MoE:
    cfg = replace(peers.layer_config(shape), router=RouterConfig(), rounding=rounding)
    layer = tilemoe.MoE(cfg, device="meta", kernels=kernels)
    layer.router.weight, layer.experts.w1, layer.experts.w2 = weights.router, weights.w1, weights.w2
    return layer


def contestants(
    shape: MoEShape, modes: list[str], kernels: str, machine: Machine, x: Tensor, do: Tensor
) -> dict[str, Contestant]:
    """Top-K, full tiles, and the modes, all on one set of weights. What is wrong is reported and left out."""
    weights = peers.make_weights(shape, machine.device, machine.dtype)
    of_set = None if kernels == CHOSEN else kernels

    def layer(rounding: TokenRounding | None) -> tilemoe.MoE:
        return build(shape, weights, rounding, of_set)

    top_k = layer(None)
    with torch.no_grad():
        even = replace(top_k.cfg, rounding=TokenRounding("balance", machine.tile))
        counts = tilemoe.route(top_k.router(x).logits, even).tokens_per_expert
        plan = tilemoe.plan_topk(full_tiles(counts, shape.num_tokens), shape.num_experts)
    wanted = {TOPK: Contestant(top_k), FULL: Contestant(top_k, plan)}
    for mode in modes:
        wanted[mode] = Contestant(layer(TokenRounding(mode, machine.tile)))  # type: ignore[arg-type]
    found = {}
    for name, contestant in wanted.items():
        problem = problem_of(contestant, x, do)
        if problem is None:
            found[name] = contestant
        else:
            print(f"{name} is left out: {problem}", flush=True)
    return found


def full_tiles(counts: Tensor, num_tokens: int) -> Tensor:
    """(T, K) expert ids at random, by which each expert gets so many of T tokens; their sum is T K, each at most T."""
    experts = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts.long())
    # An expert's run of at most T places, written line by line into (K, T), meets no column twice.
    by_place = experts.view(-1, num_tokens).t()
    return by_place[torch.randperm(num_tokens, device=counts.device)]


def problem_of(contestant: Contestant, x: Tensor, do: Tensor) -> str | None:
    """None if its routing and its experts are right, else what is not."""
    layer = contestant.layer
    with torch.no_grad():
        logits = layer.router(x).logits
        plan, scores = routed(contestant, logits)
    problem = None if contestant.plan is not None else rounding_gate.problem_of_routing(logits, layer.cfg)
    return problem or rounding_gate.problem_of_experts(layer, x, do, plan, scores)


def routed(contestant: Contestant, logits: Tensor) -> tuple[RoutingPlan, Tensor]:
    """The plan and the scores: the layer's own, or the plan that replaces it, and ones."""
    plan = contestant.plan
    if plan is not None:
        return plan, logits.new_ones(plan.num_tokens, plan.num_pairs // plan.num_tokens).requires_grad_()
    routing = tilemoe.route(logits, contestant.layer.cfg)
    return routing.plan, routing.scores


def whole_step(layer: tilemoe.MoE, x: Tensor, do: Tensor, machine: Machine) -> list[Any]:
    """The layer as a model calls it, forward and backward; the marks around both. Every gradient is made anew."""
    marks = [machine.mark()]
    hidden = layer(x).hidden
    marks.append(machine.mark())
    torch.autograd.grad(hidden, [x, layer.router.weight, layer.experts.w1, layer.experts.w2], do)
    return [*marks, machine.mark()]


def parts_step(contestant: Contestant, x: Tensor, do: Tensor, machine: Machine) -> list[Any]:
    """The same in six parts; the marks around them."""
    layer, mark = contestant.layer, machine.mark
    marks = [mark()]
    logits, handed_on = layer.router(x)
    marks.append(mark())
    leaf = logits.detach().requires_grad_()
    plan, scores = routed(contestant, leaf)
    marks.append(mark())
    inner, score_leaf = handed_on.detach().requires_grad_(), scores.detach().requires_grad_()
    out = layer.experts(inner, plan, score_leaf)
    marks.append(mark())
    d_inner, *_, d_scores = torch.autograd.grad(out, [inner, layer.experts.w1, layer.experts.w2, score_leaf], do)
    marks.append(mark())
    d_logits = torch.zeros_like(leaf) if contestant.plan is not None else torch.autograd.grad(scores, leaf, d_scores)[0]
    marks.append(mark())
    torch.autograd.grad((logits, handed_on), [x, layer.router.weight], (d_logits, d_inner))
    return [*marks, mark()]


def measure(
    found: dict[str, Contestant], x: Tensor, do: Tensor, machine: Machine, args: Any
) -> tuple[dict[str, list[Row]], dict[str, Row]]:
    """Contestant to, for each round, the median milliseconds of the whole and of each part; and to what was measured
    once. Rounds differ in their order (`timing.turn`); in each the layer settles, then come whole steps and parts.
    """
    samples: dict[str, list[Row]] = {name: [] for name in found}
    host = {name: host_ms(entry, x, do, machine) for name, entry in found.items()}
    ahead = 1.5 * max(host.values())

    def timed(step: Callable[[], list[Any]], names: tuple[str, ...], count: int) -> Row:
        marks = []
        for _ in range(count):
            machine.run_ahead(ahead)
            marks.append(step())
        machine.synchronize()
        times = [[machine.milliseconds(a, b) for a, b in itertools.pairwise(m)] for m in marks[args.settle :]]
        return dict(zip(names, map(statistics.median, zip(*times, strict=True)), strict=True))

    for index in range(args.rounds):
        for name in timing.turn(list(found), index):
            entry = found[name]
            count = args.settle + args.calls
            row = timed(lambda entry=entry: parts_step(entry, x, do, machine), PARTS, count)
            if entry.plan is None:
                row |= timed(lambda entry=entry: whole_step(entry.layer, x, do, machine), WHOLE, count)
            samples[name].append(row)
    return samples, {name: {"host_ms": round(host[name], 3), "ahead_ms": round(ahead, 3)} for name in found}


def host_ms(contestant: Contestant, x: Tensor, do: Tensor, machine: Machine) -> float:
    """The median milliseconds until the host has launched a step, the layer's where it chooses its own rows."""
    times = []
    for _ in range(WARM_STEPS + HOST_STEPS):
        machine.synchronize()
        start = time.perf_counter()
        if contestant.plan is None:
            whole_step(contestant.layer, x, do, machine)
        else:
            parts_step(contestant, x, do, machine)
        times.append(1e3 * (time.perf_counter() - start))
    for _ in range(WARM_STEPS):  # some operands are laid out otherwise
        parts_step(contestant, x, do, machine)
    machine.synchronize()
    return statistics.median(times[WARM_STEPS:])


def waste(tokens_per_expert: Tensor, tile: int) -> float:
    """Percent by which rows padded to ``tile`` exceed the rows."""
    rows = tokens_per_expert.double()
    padded = torch.ceil(rows / tile) * tile
    return round(100 * float(padded.sum() / rows.sum() - 1), 3)


def summarise(samples: dict[str, list[Row]], once: dict[str, Row], counts: dict[str, Tensor], tile: int) -> list[Row]:
    """A row for each contestant: medians, and ratios round by round against top-K."""

    def totals(name: str, parts: tuple[str, ...]) -> list[float]:
        return [sum(sample[part] for part in parts) for sample in samples[name]]

    experts = ("experts", "experts_grad")
    padding = [a - b for a, b in zip(totals(TOPK, experts), totals(FULL, experts), strict=True)]
    cost = statistics.median(padding)
    rows = []
    for name in samples:
        row: Row = {"contestant": name, "rows": int(counts[name].sum()), **once[name]}
        row |= {f"{part}_ms": timing.summary(totals(name, (part,))) for part in PARTS}
        row["padding_ms"] = timing.summary(padding)
        change = counts[name] - counts[TOPK]
        row |= {"added": int(change.clamp(min=0).sum()), "dropped": int((-change).clamp(min=0).sum())}
        # Some kernels pad to half the tile.
        row |= {"waste_percent": waste(counts[name], tile), "waste_half_tile_percent": waste(counts[name], tile // 2)}
        if name != FULL:
            for label, parts in (("forward", WHOLE[:1]), ("backward", WHOLE[1:]), ("total", WHOLE)):
                row[f"{label}_ms"] = timing.summary(totals(name, parts))
                row[f"{label}_speedup"] = timing.ratio(totals(name, parts), totals(TOPK, parts))
            routing, total = totals(name, ("routing", "routing_grad")), totals(name, WHOLE)
            shares = [100 * a / b for a, b in zip(routing, total, strict=True)]
            row["routing_percent"] = round(statistics.median(shares), 3)
            gained = [a - b for a, b in zip(totals(TOPK, WHOLE), total, strict=True)]
            row["gained_ms"] = timing.summary(gained)
            row["recovered"] = round(statistics.median(gained) / cost, 4) if cost > 0 else None
        rows.append(row)
    return rows


def run(args: argparse.Namespace) -> None:
    machine = gpu() if args.device == "cuda" else cpu()
    known = CASES if args.device == "cuda" else TOYS
    names = list(known) if args.cases == "all" else args.cases.split(",")
    modes = list(ROUNDING_MODES) if args.modes == "all" else args.modes.split(",")
    for what, asked, of in (("case", names, known), ("mode", modes, ROUNDING_MODES)):
        unknown = [name for name in asked if name not in of]
        if unknown:
            raise SystemExit(f"no {what} called {unknown[0]!r}; known are {', '.join(of)}")
    start, longest = time.perf_counter(), 0.0
    done = recorded()
    for kernels in args.kernels.split(","):
        for name in names:
            left = [mode for mode in modes if (name, kernels, mode) not in done]
            if not left:
                continue
            if args.seconds and time.perf_counter() - start + longest > args.seconds:
                print(f"out of time before {name}: the same command goes on from here")
                return
            began = time.perf_counter()
            one_case(name, known[name], left, kernels, machine, args)
            longest = max(longest, time.perf_counter() - began)


def warm(args: argparse.Namespace) -> None:
    """Compile what the cases need, into Triton's cache, with fewer tokens: several processes at once use more cores."""
    machine = gpu() if args.device == "cuda" else cpu()
    known = CASES if args.device == "cuda" else TOYS
    for name in list(known) if args.cases == "all" else args.cases.split(","):
        start = time.perf_counter()
        shape = replace(known[name], num_tokens=min(known[name].num_tokens, WARM_TOKENS))
        weights = peers.make_weights(shape, machine.device, machine.dtype)
        x = torch.randn(shape.num_tokens, shape.hidden_size, device=machine.device, dtype=machine.dtype)
        x, do = x.requires_grad_(), torch.randn_like(x)
        for kernels in args.kernels.split(","):
            for mode in (None, "balance", *(ROUNDING_MODES if args.modes == "all" else args.modes.split(","))):
                rounding = None if mode is None else TokenRounding(mode, machine.tile)  # type: ignore[arg-type]
                layer = build(shape, weights, rounding, None if kernels == CHOSEN else kernels)
                whole_step(layer, x, do, machine)
        machine.synchronize()
        print(f"{name}: ready after {time.perf_counter() - start:.1f} s", flush=True)


def recorded() -> set[tuple[str, str, str]]:
    """(case, kernels, contestant) that the results file has of this commit and this GPU."""
    here = record.provenance()
    rows = [row for row in record.rows(NAME) if row["mode"] == "sustained"]
    return {
        (row["case"], row["kernels"], row["contestant"])
        for row in rows
        if (row["commit"], row["gpu"]) == (here["commit"], here["gpu"])
    }


def one_case(
    name: str, shape: MoEShape, modes: list[str], kernels: str, machine: Machine, args: argparse.Namespace
) -> None:
    """Measure and append the rows of a case; nothing where top-K or full tiles are wrong."""
    began = time.perf_counter()
    torch.manual_seed(0)
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=machine.device, dtype=machine.dtype)
    x, do = x.requires_grad_(), torch.randn_like(x)
    found = contestants(shape, modes, kernels, machine, x, do)
    if TOPK not in found or FULL not in found:
        return
    counts = {}
    for contestant, entry in found.items():
        with torch.no_grad():
            counts[contestant] = routed(entry, entry.layer.router(x).logits)[0].rows_per_expert.cpu()
    ready = time.perf_counter()
    samples, once = measure(found, x, do, machine, args)
    rows = summarise(samples, once, counts, machine.tile)
    chosen = tilemoe.select_kernels(machine.device, machine.dtype, found[TOPK].layer.cfg).name
    where = {
        "case": name, **asdict(shape), "mode": "sustained", "kernels": kernels,
        "kernel_set": chosen if kernels == CHOSEN else kernels, "tile": machine.tile, "rounds": args.rounds,
    }  # fmt: skip
    rows = [{**where, **row} for row in rows]
    record.append(NAME, rows)
    for row in rows:
        print(rounding_report.describe(row), flush=True)
    print(f"{name}: checked in {ready - began:.1f} s, timed in {time.perf_counter() - ready:.1f} s", flush=True)
    del found, x, do
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()


def kernels(args: argparse.Namespace) -> None:
    """Print and record the median time of each launch of a rounding and of its gradient, run in order."""
    from tilemoe.kernels.rounding import triton as rounding
    from tilemoe.routing.rounding import draw_uniform, row_capacity

    machine = gpu()
    for name in list(CASES) if args.cases == "all" else args.cases.split(","):
        shape = CASES[name]
        experts, k = shape.num_experts, shape.num_experts_per_tok
        logits = torch.randn(shape.num_tokens, experts, device="cuda")
        kept, ids = logits.softmax(dim=-1).topk(k, dim=-1)
        kept = kept / kept.sum(dim=-1, keepdim=True)
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
                machine.run_ahead(2.0)
                marks = [machine.mark()]
                for launch in launches:
                    launch.run()
                    marks.append(machine.mark())
                machine.synchronize()
                times.append([1e3 * machine.milliseconds(a, b) for a, b in itertools.pairwise(marks)])
            medians = [statistics.median(found) for found in zip(*times[args.settle :], strict=True)]
            names = [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in launches]
            us = {what: round(median, 2) for what, median in zip(names, medians, strict=True)}
            record.append(NAME, [{"case": name, **asdict(shape), "mode": "kernels", "contestant": mode, "us": us}])
            parts = " ".join(f"{what} {median:.1f}" for what, median in us.items())
            print(f"{name:16} {mode:13} {sum(medians):6.1f} us: {parts}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "warm", "kernels", "table", "plot"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", default="all", help='"all" or names, separated by commas')
    parser.add_argument("--modes", default="nearest", help='"all" or modes, separated by commas')
    parser.add_argument("--kernels", default=CHOSEN, help='"chosen", or names of backends, separated by commas')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle", type=int, default=3, help="steps before those that are timed, in each round")
    parser.add_argument("--calls", type=int, default=6, help="timed steps of a round")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="begin no case that would end later than that; 0: run all"
    )
    parser.add_argument("--gpu", help="table and plot: only rows of this GPU, by its full name")
    parser.add_argument("--out", default=str(record.RESULTS / "figures"))
    args = parser.parse_args(argv)
    actions = {"run": run, "warm": warm, "kernels": kernels, "table": rounding_report.table}
    {**actions, "plot": rounding_report.plot}[args.what](args)


if __name__ == "__main__":
    main()

"""The trainer's speed: one recipe, on one GPU and on several, with only the experts' implementation swapped.

    torchrun --nproc-per-node 4 benchmarks/train_throughput.py --recipe 7b --peers tilemoe,scattermoe
    python benchmarks/train_throughput.py --recipe 1b --shard-alone        # beside the same under torchrun: scaling
    python benchmarks/train_throughput.py --recipe single-gpu --peers "tilemoe,tilemoe[fp8],tilemoe[fp8+dense]" \\
        --rounds 3 --steps 3 --warmup 2
    python benchmarks/train_throughput.py --recipe benchmarks/recipes/wide.json --peers "tilemoe,tilemoe[fp8]"
        (or olmoe.json, on four GPUs: models as wide as FP8 gains from)

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

This is one process of a job. Every contestant trains the recipe's model from the same weights on the same made-up
tokens, whose frequencies fall as 1 / rank, one contestant after the other; whole optimiser steps are timed, the update
included. Another package computes the experts alone: router, parameters, their names and their values stay ours.
``tilemoe[fp8]`` and ``tilemoe[fp8+dense]`` are ours in one of `PRECISIONS`, whatever the recipe's. With ``--rounds``
all contestants stay in memory and take turns. Rows go to results/train_throughput.jsonl as soon as a contestant is
done. ``tokens_per_second`` and ``mfu`` are those of one GPU, by the formulas of the trainer's own progress line.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilemoe
from tilemoe.config import CHECKPOINTING_MODES, KEPT_BETWEEN_MICRO_BATCHES, ModelConfig, to_dict
from tilemoe.data import Prepared, TokenShards, load_tokenizer
from tilemoe.data.corpus import SPLITS
from tilemoe.data.shards import ShardWriter, token_dtype, write_index
from tilemoe.layers.experts import Experts
from tilemoe.layers.float8 import quantize_projections
from tilemoe.layers.moe import MoE
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.flops import flops_per_token
from tilemoe.parallel.mesh import build_meshes
from tilemoe.parallel.model import parallelize
from tilemoe.plan import RoutingPlan, experts_of_rows
from tilemoe.shape import MoEShape
from tilemoe.train.checkpoints.restore import compile_backend, select_device
from tilemoe.train.config import Recipe, load_recipe
from tilemoe.train.job.collective import joined, objects_of_processes
from tilemoe.train.job.processes import Job
from tilemoe.train.loop import Trainer, peak_flops
from tilemoe.train.progress import StepStats

sys.path.insert(0, str(Path(__file__).parent))
import profiles

from tilemoe.bench import check, peers, record, timing

NAME, MODE = "train_throughput", "sustained"
TOKENS = 1 << 22  # of the made-up text
GIB = 2**30
# model.moe.precision and train.dense_precision of each; bf16 is the layer's own dtype, under a recipe in fp32 that.
PRECISIONS = MappingProxyType({"bf16": ("bf16", "bf16"), "fp8": ("fp8", "bf16"), "fp8+dense": ("fp8", "fp8")})

# ----------------------------------------------------------------------------------------------- whose experts


class SwappedExperts(Experts):
    """`Experts` by a ``compute`` of somebody else's."""

    compute: peers.Compute

    def forward(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        w1, w2 = self.w1.to(dtype), self.w2.to(dtype)
        # What peers sort themselves is all that they take of our plan.
        ids = experts_of_rows(plan.row_start_of_expert, plan.row_of_pair).clamp(min=0)  # a skipped pair: any
        return self.compute(x.to(dtype), scores, ids.view(scores.shape), w1, w2)


def swap(module: nn.Module, name: str) -> str:
    """Let the package ``name`` compute the experts of every MoE layer in ``module``; returns its version.

    Before the parameters are sharded, drawn or brought to a device. ImportError: the package is not there.
    """
    version, compute = CONTESTANTS[name]()
    for layer in module.modules():
        if compute is not None and isinstance(layer, MoE):
            experts = SwappedExperts(layer.cfg, device="meta", dtype=layer.experts.w1.dtype)
            experts.compute = compute
            layer.experts = experts
    return version


def swapped_layer(name: str, shape: MoEShape, weights: peers.Weights) -> peers.Contestant:
    """One layer so swapped, for the check. ImportError: the package is not there."""
    moe = tilemoe.MoE(peers.layer_config(shape), device="meta")
    version = swap(moe, name)
    moe.router.weight, moe.experts.w1, moe.experts.w2 = weights.router, weights.w1, weights.w2
    return peers.Contestant(name, version, lambda x: moe(x).hidden, weights.leaves)


def obstacle(name: str, model: ModelConfig, expert_parallel: int) -> str | None:
    """Why ``name`` cannot compute the experts of ``model``; None if it can. ValueError lists the names."""
    if name not in CONTESTANTS:
        raise ValueError(f"no contestant called {name!r}; known are {', '.join(CONTESTANTS)}")
    if name == "tilemoe":
        return None
    moe = model.moe
    if moe is None:
        return "the model has no experts"
    if (moe.activation, moe.gate_up, moe.expert_bias, moe.rounding) != ("swiglu", "concatenated", False, None):
        return "the adapter knows swiglu, [gate; up] rows, no biases and no rounding alone"
    return None if expert_parallel == 1 else "it does not divide experts among processes"


def _ours() -> tuple[str, None]:
    return tilemoe.__version__, None


def _grouped_mm() -> tuple[str, peers.Compute]:
    if not torch.cuda.is_available():  # torch.compile would need a C++ compiler
        return f"torch {torch.__version__}", peers.grouped_mm_experts
    return f"torch {torch.__version__}, compiled", torch.compile(peers.grouped_mm_experts, dynamic=False)


CONTESTANTS = MappingProxyType({"tilemoe": _ours, "scattermoe": peers.scattermoe_experts, "grouped_mm": _grouped_mm})


# ------------------------------------------------------------------------------------------------------ one job


def run(args: argparse.Namespace) -> None:
    """All contestants in this process of a job; its first process prints and records."""
    job = Job.from_environment()
    recipe = recipe_of(args)
    device = select_device(args.device, job)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    with tempfile.TemporaryDirectory() as folder, meeting(job, device, recipe, args.shard_alone):
        data = made_up_text(Path(folder), recipe.model.vocab_size)
        names = [name for name in dict.fromkeys(args.peers.split(",")) if takes_part(name, recipe, device, job)]
        for group in [names] if args.rounds > 1 else [[name] for name in names]:
            gc.collect()  # hooks of FSDP's refer to each other
            torch.cuda.empty_cache()
            take_turns(args, group, recipe, data, device, job)


def take_turns(
    args: argparse.Namespace, names: list[str], recipe: Recipe, data: Prepared, device: torch.device, job: Job
) -> None:
    """The contestants of these names, in memory together until all are recorded."""
    contestants = [warmed_up(args, name, recipe, data, device, job) for name in names]
    timing.in_turn({each.name: partial(take_steps, args, each) for each in contestants}, args.rounds)
    for contestant in contestants:
        report(args, contestant)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe with what the command line changes of it, long enough for the steps that are asked for."""
    recipe = load_recipe(args.recipe)
    train, data, parallel = recipe.train, recipe.data, recipe.parallel
    train = replace(train, steps=max(train.steps, args.warmup + args.steps), device=args.device)
    if args.accumulation:
        train = replace(train, accumulation=args.accumulation)
    if args.batch_size:
        data = replace(data, batch_size=args.batch_size)
    if args.between_micro_batches:
        kept = args.between_micro_batches
        parallel = replace(parallel, reshard_after_forward=kept == "nothing", between_micro_batches=kept)
    if args.checkpointing:
        parallel = replace(parallel, checkpointing=args.checkpointing)
    if args.compile:
        train = replace(train, compile="blocks")
    return replace(recipe, train=train, data=data, parallel=parallel)


def peer_and_recipe(name: str, recipe: Recipe) -> tuple[str, Recipe]:
    """Whose experts ``name`` means, and the recipe in the precision that it has in brackets, if it has one."""
    peer, bracket, precision = name.removesuffix("]").partition("[")
    if not bracket:
        return peer, recipe
    if precision not in PRECISIONS:
        raise ValueError(f"no precision called {precision!r}; known are {', '.join(PRECISIONS)}")
    experts, dense = PRECISIONS[precision]
    assert recipe.model.moe is not None, "the recipe has experts"
    model = replace(recipe.model, moe=replace(recipe.model.moe, precision=experts))
    return peer, replace(recipe, model=model, train=replace(recipe.train, dense_precision=dense))


@contextmanager
def meeting(job: Job, device: torch.device, recipe: Recipe, shard_alone: bool) -> Iterator[None]:
    """torch.distributed, also for one process where that is to shard its model over itself."""
    with joined(job, device, recipe.train.timeout, to_dict(recipe)):
        if job.is_alone and shard_alone:
            backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        yield
        if job.is_alone and shard_alone:
            dist.destroy_process_group()


def made_up_text(folder: Path, vocab_size: int) -> Prepared:
    """`TOKENS` tokens in ``folder``, the same in every process: the k-th most frequent one's share falls as 1 / k."""
    uniform = np.random.default_rng(0).random(TOKENS)
    ids = np.minimum(np.expm1(uniform * np.log(vocab_size + 1)).astype(np.int64), vocab_size - 1)
    entries = {}
    for split, part in zip(SPLITS, (ids, ids[: TOKENS // 16]), strict=True):
        with ShardWriter(folder, split, vocab_size) as writer:
            writer.append(part, part.size)
            entries[split] = writer.entry()
    dtype = token_dtype(vocab_size).str
    write_index(folder, {"vocab_size": vocab_size, "separator_id": 0, "dtype": dtype, "splits": entries})
    return Prepared(*(TokenShards(folder, split) for split in SPLITS), load_tokenizer("bytes"))


def takes_part(name: str, recipe: Recipe, device: torch.device, job: Job) -> bool:
    """Whether the contestant can be measured; what any process finds against it is said: the package is missing, or its
    layer, of the recipe's size, computes something else.
    """
    peer, recipe = peer_and_recipe(name, recipe)
    problem = obstacle(peer, recipe.model, recipe.parallel.expert)
    if problem is None and recipe.model.moe is not None:
        moe = recipe.model.moe
        tokens = recipe.data.batch_size * recipe.data.seq_len
        sizes = (moe.hidden_size, moe.intermediate_size, moe.num_experts, moe.num_experts_per_tok)
        shape = MoEShape(tokens, *sizes)
        torch.manual_seed(job.rank)
        dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
        weights = peers.make_weights(shape, device, dtype)
        try:
            problem = check.problem(swapped_layer(peer, shape, weights), shape, weights)
        except ImportError as error:
            problem = f"not importable here: {error}"
    problem = next((found for found in objects_of_processes(problem, job) if found is not None), None)
    if problem is not None:
        say(job, f"{name} is left out: {problem}")
    return problem is None


def build(name: str, recipe: Recipe, device: torch.device, job: Job) -> tuple[DecoderLM, str]:
    """(the model, its weights drawn on ``device`` and the same whoever computes it; the contestant's version)."""
    model = DecoderLM(recipe.model, device="meta", recompute=recipe.train.recompute)
    if recipe.train.dense_precision == "fp8":
        quantize_projections(model, device)
    version = swap(model, name)
    generator = torch.Generator(device).manual_seed(recipe.train.seed)
    parallel = recipe.parallel_for(job.world_size)
    if dist.is_initialized():
        meshes = build_meshes(parallel, recipe.model, device.type)
        parallelize(model, meshes, device=device, generator=generator, compile_backend=compile_backend(recipe))
        return model, version
    model.to_empty(device=device)
    model.reset_parameters(generator)
    model.set_checkpointing(parallel.checkpointing)
    backend = compile_backend(recipe)
    if backend is not None:
        model.compile_blocks(backend)
    return model, version


@dataclass
class Contestant:
    """A model in training, and what was seen of its steps: all stats, and of the timed ones each one's seconds and all
    steps' together.
    """

    name: str
    version: str
    trainer: Trainer
    stats: list[StepStats]
    step_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0


def warmed_up(
    args: argparse.Namespace, name: str, recipe: Recipe, data: Prepared, device: torch.device, job: Job
) -> Contestant:
    begun = time.perf_counter()
    peer, recipe = peer_and_recipe(name, recipe)
    model, version = build(peer, recipe, device, job)
    trainer = Trainer(recipe, model, data, device, job)
    timing.synchronize()
    say(job, f"{name}: ready after {time.perf_counter() - begun:.1f} s")
    stats = [step(trainer, name) for _ in range(args.warmup)]
    timing.synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return Contestant(name, version, trainer, stats)


def take_steps(args: argparse.Namespace, contestant: Contestant) -> None:
    """One round of timed steps; all processes call it."""
    trainer = contestant.trainer
    timing.synchronize()
    if dist.is_initialized():
        dist.barrier()
    marks = [time.perf_counter()]
    for _ in range(args.steps):
        contestant.stats.append(step(trainer, contestant.name))
        marks.append(time.perf_counter())
    timing.synchronize()
    contestant.seconds += time.perf_counter() - marks[0]
    contestant.step_seconds += [later - earlier for earlier, later in pairwise(marks)]


def report(args: argparse.Namespace, contestant: Contestant) -> None:
    """One row of the results, recorded by the first process; all call it."""
    trainer, stats = contestant.trainer, contestant.stats
    recipe, device, job = trainer.recipe, trainer.device, trainer.job
    steps = len(contestant.step_seconds)
    seconds = max(objects_of_processes(contestant.seconds / steps, job))
    speed = recipe.tokens_per_step / seconds
    peak = peak_flops(device, recipe.train.precision)
    row = {
        "recipe": recipe.name,
        "contestant": contestant.name,
        "version": contestant.version,
        "mode": MODE,
        "processes": job.world_size,
        "sharded": dist.is_initialized(),
        "batch_size": recipe.data.batch_size,
        "accumulation": recipe.train.accumulation,
        "between_micro_batches": recipe.parallel.between_micro_batches,
        "checkpointing": recipe.parallel.checkpointing,
        "compile": recipe.train.compile != "none",
        "rounds": args.rounds,
        "steps": steps,
        "step_seconds": timing.summary(contestant.step_seconds),
        "tokens_per_second": round(speed, 1),
        "mfu": round(speed * flops_per_token(recipe.model, recipe.data.seq_len) / peak, 4) if peak else None,
        **memory(device, job, is_alone=args.rounds == 1),
        "losses": [round(found.nats_per_token, 5) for found in stats],
        "grad_norms": [round(found.grad_norm, 5) for found in stats],
        "expert_load": max(stats[-1].expert_load, default=None),
        "tile_waste": max(stats[-1].tile_waste, default=None),
    }
    if job.is_first:
        print(describe(row), flush=True)
        record.append(NAME, [row])
    if args.profile is not None and device.type == "cuda":  # all take the step
        if job.is_first:  # tracing slows its host, and the others wait for it
            events = profiles.of_gpu(lambda: step(trainer, contestant.name))
            title = f"{recipe.name}, {contestant.name}, {job.world_size} processes, one step"
            profiles.write(args.profile, f"{title} of {profiles.usage(events)}", profiles.by_name(events))
        else:
            step(trainer, contestant.name)


def step(trainer: Trainer, name: str) -> StepStats:
    stats = trainer.train_step()
    loss = f"loss {stats.nats_per_token:.4f} nats/token"
    say(trainer.job, f"{name}: step {stats.step}, {loss}, gradient norm {stats.grad_norm:.4f}")
    return stats


def memory(device: torch.device, job: Job, *, is_alone: bool) -> dict[str, list[int] | None]:
    """Of each process, by rank: the most bytes its tensors took since the warm-up, and what PyTorch holds for them.

    None of a contestant beside which others are in memory, and on a CPU.
    """
    if device.type != "cuda" or not is_alone:
        return {"peak_bytes": None, "reserved_bytes": None}
    found = objects_of_processes((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()), job)
    return {"peak_bytes": [peak for peak, _ in found], "reserved_bytes": [reserved for _, reserved in found]}


def say(job: Job, line: str) -> None:
    if job.is_first:
        print(line, flush=True)


def describe(row: dict[str, Any]) -> str:
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    peak = "" if row["peak_bytes"] is None else f", peak {max(row['peak_bytes']) / GIB:.1f} GiB"
    where = f"{row['processes']} processes" + ("" if row["sharded"] else ", not sharded")
    return f"{row['recipe']} {row['contestant']} on {where}: {row['tokens_per_second']:.0f} tokens/s each{mfu}{peak}"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="7b", help="name, or path of a .json")
    known = [*CONTESTANTS, *(f"tilemoe[{name}]" for name in PRECISIONS)]
    parser.add_argument("--peers", default="tilemoe", help=f"of {', '.join(known)}; commas between")
    parser.add_argument("--steps", type=int, default=20, help="timed optimiser steps, at least one")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--rounds", type=int, default=1, help="of --steps; above 1 the contestants take turns")
    parser.add_argument("--accumulation", type=int, default=0, help="micro-batches of a step; 0: as the recipe says")
    parser.add_argument("--batch-size", type=int, default=0, help="sequences of a micro-batch; 0: as the recipe says")
    kept = "what stays whole between micro-batches; default: as the recipe says"
    parser.add_argument("--between-micro-batches", choices=KEPT_BETWEEN_MICRO_BATCHES, help=kept)
    parser.add_argument("--checkpointing", choices=CHECKPOINTING_MODES, help="default: as the recipe says")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--profile", type=Path, help="append one more step's kernels and idle time to this file")
    parser.add_argument("--shard-alone", action="store_true", help="a process alone uses FSDP too, over itself")
    args = parser.parse_args(arguments)
    for name in ("steps", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


if __name__ == "__main__":
    run(parse(sys.argv[1:]))

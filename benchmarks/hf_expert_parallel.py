"""A training step of transformers' Qwen3-MoE under `tilemoe.expert_parallel` against that of our decoder, in one job.

    torchrun --nproc-per-node 2 benchmarks/hf_expert_parallel.py --layers 6
    torchrun --nproc-per-node 2 benchmarks/hf_expert_parallel.py --device cpu --rounds 1      (to see that it works)

A step is forward, loss and backward; the update is the same for both and is left out. Both have the weights and the
tokens of the other, experts over all processes, everything else by FSDP2 over them, bf16 over fp32 parameters, the
next layer's gathers named ahead. Their first losses must agree before anything is timed. "compiled": torch.compile
makes each of a model's blocks, as users of either do. Times are those of the slowest process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import hf_cases
import profiles
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tilemoe.bench import record, timing
from tilemoe.config import ParallelConfig
from tilemoe.integrations import transformers as integration
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.hf_config import config_from_hf
from tilemoe.models.huggingface import to_hf_state_dict
from tilemoe.parallel import build_meshes, expert_parallel, parallelize

NAME, MODE = "hf_expert_parallel", "step"
CASE = "Qwen3-30B-A3B"
THEIRS, OURS = "transformers", "tilemoe"
GATE = 0.01  # of the losses of the first step, relative: bf16, and experts chosen by rounded logits
BAR = 1.10  # theirs over ours
WARM_STEPS = 2

Step = Callable[[], Tensor]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    on_gpu = args.device == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rows = measure(args, torch.device(args.device))
    if dist.get_rank() == 0:
        record.append(NAME, rows)
    dist.destroy_process_group()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, help="sequences of a process; default: the case's")
    parser.add_argument("--sequence", type=int, help="tokens of one; default: the case's")
    parser.add_argument("--vocabulary", type=int, help="default: the model's own")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block of both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a round, of each")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help='"cpu" runs a tiny model')
    parser.add_argument("--profile", type=Path, help="append the kernels of one step of each, of rank 0, to this file")
    return parser.parse_args(arguments)


def case_of(args: argparse.Namespace) -> hf_cases.Model:
    case = hf_cases.MODELS[CASE]
    case = hf_cases.tiny(case) if args.device == "cpu" else case.with_config(num_hidden_layers=args.layers)
    if args.vocabulary is not None:
        case = case.with_config(vocab_size=args.vocabulary)
    changes = {name: value for name in ("batch", "sequence") if (value := getattr(args, name)) is not None}
    return replace(case, **changes)


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each of the two; all processes call it. SystemExit: their losses do not agree."""
    case = case_of(args)
    backend = ("inductor" if args.device == "cuda" else "eager") if args.compile else None
    theirs, ours = built(case, device)
    shared(theirs, device, backend)
    meshes = build_meshes(ParallelConfig(expert=dist.get_world_size()), ours.config, device.type)
    parallelize(ours, meshes, compile_backend=backend)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    size = (case.batch, case.sequence + 1)
    tokens = torch.randint(case.config["vocab_size"], size, device=device, generator=generator)
    steps = {THEIRS: step_of_theirs(theirs, tokens), OURS: step_of_ours(ours, tokens)}
    losses = {name: mean_of_processes(step()) for name, step in steps.items()}
    if abs(losses[THEIRS] / losses[OURS] - 1) > GATE:
        raise SystemExit(f"the losses of the same weights and tokens do not agree: {losses}")
    found = timed(steps, args.rounds, args.steps)
    if args.profile is not None:
        look(args.profile, steps)
    return rows_of(args, case, losses, found)


def built(case: hf_cases.Model, device: torch.device) -> tuple[nn.Module, DecoderLM]:
    """Both with the same weights in fp32, whole; no auxiliary loss."""
    theirs = hf_cases.build(case, device, torch.float32)
    integration.use(theirs)
    config: Any = theirs.config
    settings = config_from_hf({**config.to_dict(), "model_type": case.model_type, "router_aux_loss_coef": 0.0})
    ours = DecoderLM(settings, device=device)
    names = theirs.state_dict()
    with torch.no_grad():
        for name, tensor in stacked(to_hf_state_dict(ours)).items():
            names.pop(name).copy_(tensor)
    assert not names, f"without a value: {', '.join(names)}"
    return theirs, ours


def stacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' own names in memory, (E, ...) experts, of the hub's, a tensor for each expert."""
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[str, list[Tensor]]] = {}
    for name, tensor in state.items():
        layer, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            found[name] = tensor
            continue
        parts.setdefault(layer, {}).setdefault(rest.split(".")[1], []).append(tensor)  # experts come in order
    for layer, of in parts.items():
        pairs = zip(of["gate_proj"], of["up_proj"], strict=True)
        found[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{layer}.experts.down_proj"] = torch.stack(of["down_proj"])
    return found


def shared(model: Any, device: torch.device, backend: str | None) -> None:
    """As docs/expert-parallelism.md has it, with the gathers of the next layer named."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    layers = list(model.model.layers)
    if backend is not None:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, backend=backend)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("expert",))
    expert_parallel(model, mesh, mp_policy=policy)
    for layer in layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=layer is not layers[-1])
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    gathers = [[part for part in layer.modules() if isinstance(part, FSDPModule)] for layer in layers]
    for gathered, following in pairwise(gathers):
        gathered[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(gathered[::-1])


def step_of_theirs(model: Any, tokens: Tensor) -> Step:
    labels = tokens[:, 1:].contiguous()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(input_ids=tokens[:, :-1], shift_labels=labels, labels=labels).loss
        loss.backward()
        return loss.detach()

    return step


def step_of_ours(model: DecoderLM, tokens: Tensor) -> Step:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        assert loss is not None, "labels were given"
        (loss / dist.get_world_size()).backward()
        return loss.detach()

    return step


def timed(steps: dict[str, Step], rounds: int, count: int) -> dict[str, dict[str, list[float]]]:
    """Of each, by round: ms of a step, and the most bytes that a GPU held (its peak counts both models' weights)."""
    found: dict[str, dict[str, list[float]]] = {name: {"ms": [], "peak": []} for name in steps}
    for index in range(rounds):
        for name in timing.turn(list(steps), index):
            for _ in range(WARM_STEPS if index == 0 else 1):
                steps[name]()
            timing.synchronize()
            dist.barrier()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(count):
                steps[name]()
            timing.synchronize()
            found[name]["ms"].append(most_of_processes((time.perf_counter() - start) * 1e3 / count))
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            found[name]["peak"].append(most_of_processes(peak))
    return found


def rows_of(
    args: argparse.Namespace,
    case: hf_cases.Model,
    losses: dict[str, float],
    found: dict[str, dict[str, list[float]]],
) -> list[dict[str, Any]]:
    import transformers

    rows = []
    for name, of in found.items():
        row = {
            "case": CASE, "mode": MODE, "model": name, "processes": dist.get_world_size(), "compiled": args.compile,
            "layers": case.config["num_hidden_layers"], "vocabulary": case.config["vocab_size"], "batch": case.batch,
            "sequence": case.sequence, "transformers": transformers.__version__, "rounds": args.rounds,
            "steps": args.steps, "loss": losses[name], "ms": timing.summary(of["ms"]),
            "tokens_per_second": round(1e3 * case.batch * case.sequence / statistics.median(of["ms"]), 1),
            "peak_bytes_beside_the_other": int(max(of["peak"])) or None,
        }  # fmt: skip
        if name == THEIRS:
            ratio = timing.ratio(found[OURS]["ms"], of["ms"])
            row |= {"over_ours": ratio, "bar": BAR, "held": ratio <= BAR}
        rows.append(row)
        if dist.get_rank() == 0:
            print(row, flush=True)
    return rows


def look(path: Path, steps: dict[str, Step]) -> None:
    """All take the step, one looks."""
    for name, step in steps.items():
        if dist.get_rank() == 0 and torch.cuda.is_available():
            profiles.write(path, f"{CASE} with divided experts, {name}", profiles.of_kernels(step))
        else:
            step()
        dist.barrier()


def mean_of_processes(value: Tensor) -> float:
    total = value.double().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def most_of_processes(value: float) -> float:
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


if __name__ == "__main__":
    main()

"""Training steps of a GPT of Megatron Core with its SequentialMLP, with grouped_mm and with tilemoe in the same spec.

    torchrun --nproc-per-node 1 benchmarks/megatron_step.py
    torchrun --nproc-per-node 4 benchmarks/megatron_step.py --tensor-parallel 2 --expert-parallel 2

Four layers of Qwen3-30B-A3B's widths in bf16; Megatron's data parallelism with gradients in fp32, its Adam and its
all-to-all dispatcher. It runs without Transformer Engine: attention and norms are PyTorch's, for all. Every contestant
starts from the same weights, reads the same tokens, of a random Markov chain, and ends after --steps or --seconds. A
row has the losses and gradient norms of all its steps, how far the losses and some first gradients are from
SequentialMLP's (grouped_mm's distance is bf16's noise), the time of a whole step, and peak bytes, of all and until all
gradients are there. "tilemoe-dispatched" is tilemoe behind Megatron's dispatcher, as "tilemoe" is under expert
parallelism.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tilemoe.bench import check, record, timing
from tilemoe.integrations.megatron import TileMoEExperts, tilemoe_spec

WIDTHS = ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_moe_experts", "moe_router_topk",
          "moe_ffn_hidden_size", "ffn_hidden_size")  # fmt: skip
SIZES = {"cuda": (2048, 32, 4, 128, 128, 8, 768, 768), "cpu": (64, 4, 2, 16, 8, 2, 32, 32)}
REFERENCE = "sequential"
COMPARED = ("mlp.router.weight", "self_attention.linear_qkv.weight", "mlp.experts.fc1", "mlp.experts.fc2")
_TOLERANCE = 0.1  # relative, of first gradients in bf16


class SDPA(DotProductAttention):
    """Causal attention that does not store all scores, as Megatron's own without Transformer Engine does."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """query (S, B, heads, width), key and value (S, B, groups, width) -> (S, B, heads * width)."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.permute(2, 0, 1, 3).flatten(2)


def norm(config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:
    """An RMSNorm under sequence parallelism, which Megatron's own without Transformer Engine and Apex refuses."""
    made = nn.RMSNorm(hidden_size, eps)
    made.weight.sequence_parallel = config.sequence_parallel  # Megatron sums its gradient over the processes
    return made


def with_norms(spec: Any) -> Any:
    """``spec`` with `norm` in place of Megatron's norms; those of queries and keys are `norm` too."""
    spec.layer_norm = norm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
    return spec


class GroupedMM(TileMoEExperts):
    """Experts as one writes them with PyTorch's grouped_mm, on the rows that Megatron has permuted."""

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        h, scores = nn.functional.grouped_mm(x, self.w1.transpose(1, 2), offs=ends), probs.unsqueeze(1)
        if self.config.bias_activation_fusion:  # Megatron's kernel, as its own experts use it
            a = weighted_bias_swiglu_impl(h, None, scores)
        else:
            gate, up = h.chunk(2, dim=1)
            a = nn.functional.silu(gate) * up * scores.to(x.dtype)
        return nn.functional.grouped_mm(a, self.w2.transpose(1, 2), offs=ends), None


def with_experts(experts: type, spec: Any) -> Any:
    """``spec`` with other experts in Megatron's own MoE layer."""
    for layer in spec.layer_specs:
        layer.submodules.mlp.keywords["submodules"].experts = experts
    return spec


SPECS: dict[str, Callable[[Any], Any]] = {
    REFERENCE: lambda spec: spec,
    "grouped_mm": partial(with_experts, GroupedMM),
    "tilemoe": tilemoe_spec,
    "tilemoe-dispatched": partial(with_experts, TileMoEExperts),
}


def parallel_sizes(args: argparse.Namespace) -> dict[str, int]:
    return {"tensor_model_parallel_size": args.tensor_parallel, "expert_model_parallel_size": args.expert_parallel}


def make(args: argparse.Namespace, name: str) -> tuple[Any, Any]:
    """(the model in Megatron's DistributedDataParallel, its optimiser)."""
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    cfg = TransformerConfig(
        num_layers=args.layers, **dict(zip(WIDTHS, SIZES[args.device], strict=True)), bf16=args.dtype == "bfloat16",
        **parallel_sizes(args), sequence_parallel=args.tensor_parallel > 1,
        params_dtype=getattr(torch, args.dtype), moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-3,
        gated_linear_unit=True, activation_func=nn.functional.silu, bias_activation_fusion=args.device == "cuda",
        add_bias_linear=False, normalization="RMSNorm", qk_layernorm=True, hidden_dropout=0.0, attention_dropout=0.0,
        transformer_impl="local", gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = SDPA
    spec = with_norms(spec)
    named = {"vocab_size": args.vocabulary, "max_sequence_length": args.sequence, "rotary_base": 1_000_000}
    model = GPTModel(cfg, SPECS[name](spec), position_embedding_type="rope", **named).to(args.device)
    draw(model, args.device)
    module = Float16Module(cfg, model) if cfg.bf16 else model
    wrapped = DistributedDataParallel(cfg, DistributedDataParallelConfig(True), module)
    settings = OptimizerConfig(optimizer="adam", lr=3e-4, clip_grad=1.0, bf16=cfg.bf16, params_dtype=cfg.params_dtype)
    return wrapped, get_megatron_optimizer(settings, [wrapped])


@torch.no_grad()
def draw(model: nn.Module, device: str) -> None:
    """The same weights whatever module holds the experts: on a GPU Megatron draws expert after expert."""
    generator, expert_rank = torch.Generator(device), parallel_state.get_expert_model_parallel_rank()
    for name, weight in model.named_parameters():
        if found := re.search(r"layers\.(\d+)\.mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc|w)([12])", name):
            layer, expert, part = (int(number or 0) for number in found.groups())
            for e, each in enumerate(weight if weight.ndim == 3 else [weight], expert):
                generator.manual_seed(hash((expert_rank, layer, e, part)) % 2**63)
                each.normal_(0.0, 0.02, generator=generator)
        elif weight.ndim == 2:
            generator.manual_seed(crc32(name.encode()))
            weight.normal_(0.0, 0.02, generator=generator)


def batches(args: argparse.Namespace) -> Tensor:
    """(steps, batch, sequence + 1) tokens of this process; each is followed by one of four."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(args.vocabulary, (args.vocabulary, 4), generator=generator)
    generator.manual_seed(1 + parallel_state.get_data_parallel_rank())
    ids = torch.randint(args.vocabulary, (args.steps, args.batch, args.sequence + 1), generator=generator)
    chosen = torch.randint(4, ids.shape, generator=generator)
    for position in range(args.sequence):
        ids[..., position + 1] = table[ids[..., position], chosen[..., position]]
    return ids.to(args.device)


def first_gradients(model: nn.Module) -> dict[str, Tensor]:
    """``main_grad`` of the `COMPARED` parameters of layer 0, by these names whatever the experts' layout."""
    found = {}
    for name, weight in model.named_parameters():
        key = re.sub(r"(local_experts\.0\.linear_fc|w)([12])(\.weight)?$", r"fc\2", name).partition("layers.0.")[2]
        if key in COMPARED:
            found[key] = (weight.main_grad[0] if weight.ndim == 3 else weight.main_grad).clone()
    return found


def peak() -> int:
    """Bytes since the last call; on a CPU 0."""
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def train(args: argparse.Namespace, name: str, data: Tensor) -> tuple[record.Row, dict[str, Tensor]]:
    """The row of a contestant, and its first step's gradients. All processes call it."""
    began, before = time.monotonic(), torch.cuda.memory_allocated()  # Megatron keeps some of the last contestant
    model, optimizer = make(args, name)
    mask, positions = torch.ones(1, dtype=torch.bool, device=args.device), torch.arange(args.sequence).to(args.device)
    losses, norms, ms, peaks, gradients = [], [], [], [], {}
    for ids in data:
        peak()
        start = timing.event()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        loss = model(inputs, positions.expand(inputs.shape), mask, labels=labels).mean()
        loss.backward()
        before_optimizer = peak()
        finalize_model_grads([model])
        gradients = gradients or first_gradients(model)
        _, norm, _ = optimizer.step()
        end = timing.event()
        timing.synchronize()
        means = torch.stack([loss.detach().float(), loss.new_tensor(time.monotonic() - began, dtype=torch.float32)])
        dist.all_reduce(means)
        mean_loss, seconds = (means / dist.get_world_size()).tolist()
        losses.append(round(mean_loss, 6))
        norms.append(round(float(norm), 6))
        ms.append(start.elapsed_time(end))
        peaks.append((before_optimizer, max(before_optimizer, peak())))
        if dist.get_rank() == 0 and len(ms) in (1, 2, len(data)):
            print(f"{name}: {len(ms)} steps after {seconds:.1f} s, loss {mean_loss:.3f}", flush=True)
        if seconds > args.seconds:  # the same number in every process
            break
    warm = min(args.warm, len(ms) // 2)
    alone, whole = map(max, zip(*peaks[warm:], strict=True))
    step_ms = timing.summary(ms[warm:])
    tokens = args.batch * args.sequence * parallel_state.get_data_parallel_world_size()
    row = {"contestant": name, "steps_done": len(losses), "step_ms": step_ms}
    row["tokens_per_s"] = round(1e3 * tokens / step_ms["median"])
    row |= {"peak_bytes": whole - before, "gradient_bytes": alone - before, "losses": losses, "grad_norms": norms}
    return row, gradients


def compared(row: record.Row, reference: record.Row, gradients: Any, expected: Any) -> record.Row:
    """``row`` with its distance from the reference; without a time where gradients are wrong."""
    apart = [abs(ours - theirs) for ours, theirs in zip(row["losses"], reference["losses"], strict=False)]
    row["loss_difference"] = {"largest": round(max(apart), 6), "mean": round(sum(apart) / len(apart), 6)}
    row["grad_difference"] = {key: check.relative(gradients[key], expected[key]) for key in COMPARED}
    row["problem"] = check.first_off(row["grad_difference"], _TOLERANCE)
    timed = {"time_ratio": round(reference["step_ms"]["median"] / row["step_ms"]["median"], 4)}
    return row | (timed if row["problem"] is None else {"step_ms": None, "tokens_per_s": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", default="grouped_mm,tilemoe", help=f"beside {REFERENCE}: {', '.join(SPECS)}")
    defaults = {"layers": 4, "batch": 2, "sequence": 4096, "vocabulary": 32768, "steps": 50, "warm": 10}
    for name, value in (defaults | {"tensor-parallel": 1, "expert-parallel": 1, "seconds": 300}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cuda", choices=SIZES, help='"cpu": tiny widths, to see that all works')
    args = parser.parse_args(arguments)
    if args.device == "cuda":
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        parallel_state.initialize_model_parallel(**parallel_sizes(args))
    version = record.version("megatron-core")
    where = {"mode": "megatron", "gpus": dist.get_world_size(), **vars(args), "megatron": version}
    data, first = batches(args), None
    for name in dict.fromkeys([REFERENCE, *args.contestants.split(",")]):
        row, gradients = train(args, name, data)
        first = first or (row, gradients)
        row = compared(row, first[0], gradients, first[1])
        gc.collect()  # hooks and models refer to each other
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(row, flush=True)
            record.append("megatron", [{**where, **row}])


if __name__ == "__main__":
    main()

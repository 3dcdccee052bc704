"""Train a transformers model in plain PyTorch, with its experts divided over processes and the rest sharded.

    pip install '.[hf]'
    torchrun --nproc-per-node 4 examples/expert_parallel.py    # a small Qwen3-MoE from scratch, on CPUs or GPUs
    torchrun --nproc-per-node 8 examples/expert_parallel.py --model Qwen/Qwen3-30B-A3B --expert 4 --text notes.txt

The lines that matter are in `share`. Each process has its own batches; gradients are averaged over all of them. The
folder written at the end loads with transformers alone.
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

from tilemoe.integrations import transformers as tilemoe_transformers
from tilemoe.parallel import clip_gradients, expert_parallel

BYTES = 256


def load(name: str | None) -> PreTrainedModel:
    """The model, with the same weights in every process."""
    tilemoe_transformers.register()
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, experts_implementation="tilemoe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=BYTES,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation="tilemoe")


def share(model: PreTrainedModel, device_type: str, expert: int) -> None:
    """Divide experts over ``expert`` neighbouring processes, and the rest over all processes. In bf16 on GPUs."""
    sizes = (dist.get_world_size() // expert, expert)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device_type == "cuda" else MixedPrecisionPolicy()
    expert_parallel(model, init_device_mesh(device_type, sizes, mesh_dim_names=("fsdp", "expert")), mp_policy=policy)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    # In each layer the host waits for the sizes of an exchange: prefetch the next layer's weights before that.
    for layer, following in pairwise(model.model.layers):
        layer.set_modules_to_forward_prefetch([part for part in following.modules() if isinstance(part, FSDPModule)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a transformers MoE model with expert parallelism and FSDP2.")
    parser.add_argument("--model", help="a name on the hub or a folder; none: a small Qwen3-MoE from scratch")
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="the text to train on")
    parser.add_argument("--out", type=Path, default=Path("runs/expert-parallel"), help="where the model goes")
    parser.add_argument("--expert", type=int, default=2, help="processes that share a layer's experts")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of each process")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, help="3e-3 from scratch, 1e-5 otherwise")
    options = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    text = options.text.read_text(encoding="utf-8")
    tokenizer = None if options.model is None else AutoTokenizer.from_pretrained(options.model)
    ids = torch.tensor(list(text.encode()) if tokenizer is None else tokenizer(text).input_ids)
    model = load(options.model)
    share(model, device.type, options.expert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr or (3e-3 if options.model is None else 1e-5))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        starts = torch.randint(len(ids) - options.seq_len, (options.batch_size,), generator=generator)
        batch = torch.stack([ids[start : start + options.seq_len] for start in starts.tolist()]).to(device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {loss.item() / dist.get_world_size():.3f} nats/token", flush=True)
    # The whole model in rank 0's memory. To resume, save model.state_dict() in parts by torch.distributed.checkpoint.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(options.out, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(options.out)
        print(f"wrote {options.out}")
    dist.barrier()  # if a process fails at exit, torchrun ends the others: none may still be writing then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a transformers model with accelerate and FSDP2; tilemoe computes its experts, divided over the processes.

    pip install '.[hf]'
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py               # a small OLMoE from scratch, on two GPUs
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --expert 1    # FSDP2 alone

The loop is ordinary accelerate code. Only two things are added: the name of the experts' implementation, and a call of
`expert_parallel` before `prepare`, which shards the remaining parameters.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedModel

from tilemoe.integrations import transformers as tilemoe_transformers
from tilemoe.parallel import expert_parallel

BYTES = 256


def make_model() -> PreTrainedModel:
    """The model, with the same weights in every process."""
    tilemoe_transformers.register()
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation="tilemoe")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a transformers MoE model by accelerate with FSDP2.")
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="the text to train on")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"), help="where the model goes")
    parser.add_argument("--expert", type=int, default=2, help="processes that share a layer's experts")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of each process")
    parser.add_argument("--seq-len", type=int, default=64)
    options = parser.parse_args(arguments)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["OlmoeDecoderLayer"],
        cpu_ram_efficient_loading=False,  # every process has the weights, which `expert_parallel` divides
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        raise SystemExit("accelerate shards a model over several GPUs; start it by torchrun on a machine that has them")
    model = make_model()
    sizes = (accelerator.num_processes // options.expert, options.expert)
    mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("fsdp", "expert"))
    expert_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    ids = torch.tensor(list(options.text.read_bytes()))
    windows = list(ids[: len(ids) // options.seq_len * options.seq_len].view(-1, options.seq_len))
    batches = DataLoader(windows, batch_size=options.batch_size, shuffle=True, drop_last=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for step, batch in zip(range(options.steps), batches, strict=False):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = accelerator.reduce(loss.detach(), "mean")
        if step % 10 == 0 or step == options.steps - 1:
            accelerator.print(f"step {step:4}  loss {loss.item():.3f} nats/token")
    accelerator.save_state(options.out / "state")  # by torch.distributed.checkpoint: any number of processes loads it
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.out, state_dict=state)
    accelerator.wait_for_everyone()  # if a process fails at exit, torchrun ends the others while they write
    accelerator.end_training()


if __name__ == "__main__":
    main()

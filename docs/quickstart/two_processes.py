"""Train a layer whose experts are divided over two processes: torchrun --nproc-per-node 2 two_processes.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tilemoe
from tilemoe.parallel import clip_gradients, expert_parallel

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)  # the same weights in every process
layer = tilemoe.MoE(tilemoe.MoEConfig(64, 32, num_experts=8, num_experts_per_tok=2), device=device)
expert_parallel(layer, init_device_mesh(device, (2,), mesh_dim_names=("expert",)))
for parameter in layer.router.parameters():  # what is not divided: here by hand, in a model by fully_shard
    parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(2)))
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

torch.manual_seed(1 + dist.get_rank())  # tokens of its own
x = torch.randn(256, 64, device=device)
for step in range(30):
    loss = (layer(x).hidden - x).square().mean()
    loss.backward()
    clip_gradients(layer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 29 == 0 and dist.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.3f}")
dist.destroy_process_group()

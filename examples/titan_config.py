r"""Configuration of torchtitan 0.3 with tilemoe's experts: a small Qwen3-MoE, its experts divided over two processes.

Run this in the examples folder; command-line options override any value:

    torchrun --nproc-per-node 2 -m torchtitan.train --module titan_config --config qwen3_moe_tilemoe \
        --hf_assets_path FOLDER_OF_A_TOKENIZER --dataloader.dataset_path FOLDER_OF_TEXTS --training.steps 100
"""

from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer


def qwen3_moe_tilemoe() -> Trainer.Config:
    config = qwen3_moe_debug()
    config.override.imports.append("tilemoe.integrations.torchtitan.tilemoe_experts")
    config.parallelism.expert_parallel_degree = 2
    config.parallelism.spmd_backend = "partial_dtensor"  # the default asks for a PyTorch newer than 2.13
    config.training.disable_cuda_graphs = True  # torchtitan has none with this dispatcher
    return config

"""Runs of torchtitan's own trainer on two CPUs, with its experts and tilemoe's; `test_titan_trainer` compares them.

torchtitan is imported in functions, by these processes alone: it chooses the device when it is imported.
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

FOLDER = "TILEMOE_TEST_FOLDER"
EXAMPLE = Path(__file__).parents[2] / "examples" / "titan_config.py"
LAYERS, E, F, K = 2, 8, 32, 2
OPTIONS = """
--module titan_trainer_checks --config small --dump_folder {folder}/{name} --debug.seed 0
--hf_assets_path {folder} --dataloader.dataset_path {folder}/texts
--training.steps 4 --training.seq_len 32 --training.local_batch_size 4 --training.mixed_precision_param float32
--checkpoint.enable --checkpoint.interval 2
"""
STOCK = "--override.imports"  # of none
START = "--checkpoint.initial_load_path {folder}/start/checkpoint/step-0"
SAVED = "--checkpoint.initial_load_path {folder}/ours/checkpoint/step-2 --checkpoint.no-initial-load-model-only"
RUNS = {
    "start": STOCK,  # it writes its first weights alone
    "stock": f"{START} {STOCK}",
    "ours": START,
    "ours_undivided": f"{START} --parallelism.expert_parallel_degree 1",
    "ours_goes_on": SAVED,
    # Without the optimizer's moments: those of gate and up are one tensor, as in torchtitan's own fused experts.
    "stock_goes_on": f"{SAVED} {STOCK} --checkpoint.exclude_from_loading optimizer --training.steps 3",
}


class CPUAsGPU:
    """torch.cpu, and what torchtitan asks of a GPU's module besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: torch.device) -> str:
        return str(device)

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**30)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def use_cpu() -> None:
    from torchtitan.tools import utils

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    utils.device_type, utils.device_module = "cpu", CPUAsGPU()  # where it finds no accelerator it takes "cuda"
    if not hasattr(dist, "set_timeout"):  # torchtitan calls it after the first step; PyTorch 2.13 has not got it
        dist.set_timeout = lambda timeout, group: (group or dist.group.WORLD).set_timeout(timeout)


def small() -> Any:
    """The example's configuration, of few and small experts, on CPUs; a function for torchtitan's ``--config``."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = runpy.run_path(str(EXAMPLE))["qwen3_moe_tilemoe"]()
    spec = config.model_spec
    del spec.model.layers[LAYERS:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no gradient on CPUs
        router, routed = layer.moe.router, layer.moe.routed_experts
        experts, dispatcher = routed.inner_experts, routed.token_dispatcher
        layer.moe.num_experts = router.num_experts = router.gate.out_features = E
        experts.num_experts = dispatcher.num_experts = E
        router.top_k = dispatcher.top_k = K
        experts.hidden_dim = F
        router.gate.param_init = {"weight": partial(fill, 0, 0.1)}
        experts.param_init = {name: partial(fill, seed, 0.03) for seed, name in enumerate(experts.param_init, start=1)}
    spec.parallelize_fn = partial(parallelize, spec.parallelize_fn)
    return config


def fill(seed: int, std: float, weight: Tensor) -> None:
    """Large enough for scores and outputs to count; other weights on each rank, where DTensor on CPUs repeats them."""
    generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    nn.init.normal_(weight.to_local(), std=std, generator=generator)


def parallelize(theirs: Callable[..., nn.Module], model: nn.Module, **given: Any) -> nn.Module:
    """As torchtitan does, with gradients reduced by plain sums: gloo has none with a factor, which is 1 here."""
    model = theirs(model, **given)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def run(name: str) -> None:
    """``name``/steps.json: of each step its number, the loss and the gradient's norm."""
    from torchtitan.components.metrics import BaseLogger
    from torchtitan.config import ConfigManager

    from tilemoe.integrations.torchtitan import TileMoERoutedExperts

    steps: list[tuple[int, float, float]] = []

    class Steps(BaseLogger):
        def log(self, metrics: dict[str, Any], step: int) -> None:
            steps.append((step, metrics["loss_metrics/global_avg_loss"], metrics["grad_norm"]))

    folder = os.environ[FOLDER]
    options = f"{OPTIONS} {RUNS[name]}".format(folder=folder, name=name)
    trainer = ConfigManager().parse_args(options.split()).build()
    modules = list(trainer.model_parts[0].modules())
    ours = sum(isinstance(module, TileMoERoutedExperts) for module in modules)
    assert ours == (0 if STOCK in RUNS[name] else LAYERS)
    trainer.metrics_processor.logger = Steps()
    if name == "start":
        trainer.checkpointer.save(0, last_step=True)
    else:
        trainer.train()
    trainer.close()
    if dist.get_rank() == 0:
        (Path(folder) / name / "steps.json").write_text(json.dumps(steps))


def check_trainer_runs() -> None:
    use_cpu()
    for name in RUNS:
        run(name)


CHECKS = [check_trainer_runs]

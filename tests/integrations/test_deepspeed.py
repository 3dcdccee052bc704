"""DeepSpeed's ZeRO-2 and ZeRO-3 over tilemoe's experts in a model of transformers, on two CPUs; if it is installed.

DeepSpeed's own sums in shared memory are left out: it compiles them for minutes.
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_models import FAMILIES, VOCAB
from ranks import run_on_ranks
from torch import Tensor

from tilemoe.integrations import transformers as integration
from tilemoe.testing import relative_error

STEPS, LENGTH = 3, 2  # of two tokens, with two experts each, some of the six experts have none


def trained(implementation: str, stage: int | None) -> tuple[list[float], list[Tensor]]:
    """This process' losses and the weights after the last step; without a stage, plain PyTorch on all sequences."""
    torch.manual_seed(0)
    model = FAMILIES["qwen3_moe"].make().train()
    model.set_experts_implementation(implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randint(VOCAB, (STEPS, dist.get_world_size(), 1, LENGTH))
    losses = []
    if stage is None:
        for batch in batches:
            optimizer.zero_grad()
            each = [model(input_ids=ids, labels=ids).loss for ids in batch]
            torch.stack(each).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(each[dist.get_rank()].item())
        return losses, [parameter.detach() for parameter in model.parameters()]
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for batch in batches:
        ids = batch[dist.get_rank()]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    parameters = list(model.parameters())
    if stage == 2:
        return losses, [parameter.detach() for parameter in parameters]
    assert not any(parameter.numel() for parameter in parameters)  # each process has its part
    with deepspeed.zero.GatheredParameters(parameters):
        return losses, [parameter.detach().clone() for parameter in parameters]


def check_zero() -> None:
    import deepspeed

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    integration.register()
    losses, weights = trained("eager", None)
    for stage in (2, 3):
        found, ours = trained("tilemoe", stage)
        for one, other in zip([torch.tensor(found), *ours], [torch.tensor(losses), *weights], strict=True):
            assert relative_error(one, other) < 1e-5


@pytest.mark.dist
def test_zero_trains_like_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="pip install deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert run_on_ranks([check_zero], 2, tmp_path) == {"check_zero": ""}

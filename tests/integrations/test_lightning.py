"""Lightning's Trainer over tilemoe's experts; where it is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, VOCAB
from torch import Tensor

STEPS = 3


def losses_of(implementation: str, folder: Path) -> list[float]:
    """Of each step, of the same model and tokens."""
    lightning: Any = pytest.importorskip("lightning", reason="pip install lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = FAMILIES["qwen3_moe"].make(experts_implementation=implementation)
            self.losses: list[float] = []

        def training_step(self, ids: Tensor) -> Tensor:
            loss = self.model(input_ids=ids, labels=ids).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=STEPS, default_root_dir=folder, **quiet)
    ids = torch.randint(VOCAB, (STEPS, 2, 8), generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(list(ids), batch_size=None))
    return module.losses


@pytest.mark.usefixtures("registered")
def test_lightning_takes_the_same_steps_as_with_eager_experts(tmp_path: Path, calls: list[Any]) -> None:
    eager = losses_of("eager", tmp_path)
    assert not calls
    ours = losses_of("tilemoe", tmp_path)
    assert len(calls) == STEPS * FAMILIES["qwen3_moe"].moe_layers
    assert len(ours) == STEPS
    assert ours == pytest.approx(eager, rel=1e-5)
    assert ours[0] != pytest.approx(ours[-1], rel=1e-5)

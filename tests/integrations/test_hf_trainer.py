"""transformers' own Trainer over a model whose experts tilemoe computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

STEPS = 20


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Runs of consecutive token ids, which a model can learn."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = 3 + (7 * index + torch.arange(12)) % 40
        return {"input_ids": ids, "labels": ids}


def losses(family: str, implementation: str, folder: Path) -> list[float]:
    model = FAMILIES[family].make(experts_implementation=implementation, initializer_range=0.05)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()
    assert model.config._experts_implementation == implementation
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.usefixtures("registered")
def test_train_takes_the_same_steps_as_with_eager_experts(tmp_path: Path, calls: list[Any]) -> None:
    family = "gpt_oss"
    eager = losses(family, "eager", tmp_path / "eager")
    assert not calls
    ours = losses(family, "tilemoe", tmp_path / "tilemoe")
    assert len(calls) == STEPS * FAMILIES[family].moe_layers
    assert len(ours) == STEPS
    assert ours[-1] < 0.7 * ours[0]
    assert ours == pytest.approx(eager, rel=1e-3)

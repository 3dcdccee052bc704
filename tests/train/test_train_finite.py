"""NaN and infinities: the step is named, nothing of it is saved, and the newest checkpoint goes on."""

import pytest
import torch

from tilemoe.data import prepare
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe
from tilemoe.train.finite import find_non_finite
from tilemoe.train.loop import Trainer
from tilemoe.train.optim import optimizer_tensors

CPU = torch.device("cpu")


def trainer_of(recipe: Recipe) -> Trainer:
    data = prepare(recipe.data.corpus, recipe.data.tokenizer, recipe.data.cache_path, recipe.data.heldout_every)
    return Trainer(recipe, build_model(recipe, CPU), data, CPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_named(moe_recipe: Recipe, value: float) -> None:
    trainer = trainer_of(moe_recipe)
    assert find_non_finite(trainer.model, trainer.optimizer) is None
    trainer.train_step()
    assert find_non_finite(trainer.model, trainer.optimizer) is None
    tensors = {**trainer.model.state_dict(), **optimizer_tensors(trainer.model, trainer.optimizer)}
    assert any(name.endswith("selection_bias") for name in tensors)
    for name, tensor in tensors.items():
        kept = tensor.reshape(-1)[-1].item()
        tensor.view(-1)[-1] = value
        assert find_non_finite(trainer.model, trainer.optimizer) == name
        tensor.view(-1)[-1] = kept
    assert find_non_finite(trainer.model, trainer.optimizer) is None

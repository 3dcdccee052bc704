"""NaN and infinities: the step is named, nothing of it is saved, and the newest checkpoint goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import raises_one_line

from tilemoe.data import prepare
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints.folder import open_checkpoint
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe
from tilemoe.train.finite import find_non_finite
from tilemoe.train.loop import NonFiniteLossError, NonFiniteWeightsError, Trainer
from tilemoe.train.optim import optimizer_tensors
from tilemoe.train.run import RunResult, train

CPU = torch.device("cpu")


@pytest.fixture(params=["moe", "dense"])
def recipe(request: pytest.FixtureRequest, moe_recipe: Recipe, dense_recipe: Recipe) -> Recipe:
    return moe_recipe if request.param == "moe" else dense_recipe


def trainer_of(recipe: Recipe) -> Trainer:
    data = prepare(recipe.data.corpus, recipe.data.tokenizer, recipe.data.cache_path, recipe.data.heldout_every)
    return Trainer(recipe, build_model(recipe, CPU), data, CPU)


@pytest.mark.parametrize("poison", ["weights", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(recipe: Recipe, poison: str) -> None:
    trainer = trainer_of(recipe)
    trainer.train_step()
    parameter = next(trainer.model.parameters())
    if poison == "weights":
        parameter.data[97:105] = float("inf")
    else:
        parameter.register_hook(lambda gradient: gradient * float("nan"))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(NonFiniteLossError, match=r"in step 2; no checkpoint was saved yet; lower optim\.lr") as caught:
        trainer.train_step()
    assert "\n" not in str(caught.value)
    assert trainer.step == 1
    assert_equal(trainer.model.state_dict(), before)


@pytest.mark.parametrize(
    ("step", "evaluated_every", "error", "message"),
    [
        (
            5,
            0,
            NonFiniteWeightsError,
            r"is not finite after the update of step 6, which is not saved; the last checkpoint is",
        ),
        (3, 0, NonFiniteLossError, r"in step 5; the last checkpoint is"),
        (3, 4, NonFiniteLossError, r"in (step 5|the evaluation after step 4); the last checkpoint is"),
    ],
    ids=["before a checkpoint", "before a step", "before an evaluation"],
)
def test_weights_that_an_update_spoils_are_not_saved(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    evaluated_every: int,
    error: type[Exception],
    message: str,
) -> None:
    recipe = replace(recipe, train=replace(recipe.train, eval_every=evaluated_every))
    real = Trainer.train_step

    def spoil(self: Trainer) -> object:
        if self.step == step:
            next(iter(self.optimizer.state.values()))["exp_avg"].fill_(float("nan"))
        return real(self)

    folder = Path(recipe.train.out_dir)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", spoil)
        with raises_one_line(rf"{message} .*step_00000003; lower optim\.lr", error):
            train(recipe)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["step_00000003"]
    assert isinstance(train(recipe, open_checkpoint(folder / "step_00000003")), RunResult)


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

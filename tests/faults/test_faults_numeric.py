"""NaN, infinities and overflow in every weight, activation, gradient and router score of a process alone.

The step and the module are named, nothing of the step is kept, and the checkpoint before it goes on. One of several
processes: test_faults_one_rank.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filesystem import ALL
from nonfinite import MODULES, PLACES, VALUES, WEIGHTS, Where
from writes import checkpoint_read, little

from tilemoe.data import prepare
from tilemoe.train.checkpoints.folder import find_latest
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.loop import NonFiniteLossError, NonFiniteWeightsError, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture
def trainer(corpus: Path, tmp_path: Path) -> Trainer:
    """After step 1, which is saved."""
    base = little("bytes", corpus)
    data = replace(base.data, batch_size=2, heldout_every=4, cache_dir=str(corpus.parent / "cache"))
    recipe = replace(base, data=data, train=replace(base.train, out_dir=str(tmp_path / "run"), precision="fp32"))
    made = trainer_of(recipe)
    made.train_step()
    made.save_if_needed()
    return made


def trainer_of(recipe: Any) -> Trainer:
    data = prepare(recipe.data.corpus, "bytes", recipe.data.cache_path, recipe.data.heldout_every)
    return Trainer(recipe, build_model(recipe, CPU), data, CPU)


def cases() -> list[Any]:
    every = [
        (where, name, value) for where, names in PLACES.items() for name, value in itertools.product(names, VALUES)
    ]
    return [pytest.param(*c, id=f"{c[0].__name__}-{c[1]}-{c[2]}") for c in every[:: 1 if ALL else 4]]


@pytest.mark.parametrize(("where", "name", "value"), cases())
def test_every_place(where: Where, name: str, value: str, trainer: Trainer) -> None:
    saved = checkpoint_read(trainer.run_dir)
    where(trainer.model, name, VALUES[value])
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    line = ""
    try:
        stats = trainer.train_step()
        assert torch.tensor([stats.nats_per_token, stats.grad_norm]).isfinite().all()
        trainer.save_if_needed()
    except (NonFiniteLossError, NonFiniteWeightsError) as error:
        line = str(error)
        assert "step 2" in line
        assert "\n" not in line
        assert "the last checkpoint is" in line
        module = name if name in MODULES else name.rpartition(".")[0]
        # What is too large is finite where it is, and first overflows elsewhere.
        blamed = [name, *children(module)] if value != "overflow" else [*MODULES, *WEIGHTS]
        assert any(f"{part}," in line or line.startswith(f"{part} ") for part in blamed), line
        if isinstance(error, NonFiniteLossError):
            assert all(torch.equal(t, before[k]) or t.isnan().any() for k, t in trainer.model.state_dict().items())
        assert checkpoint_read(trainer.run_dir) == saved
    assert line or value == "overflow", "nothing was noticed"
    again = trainer_of(trainer.recipe)
    found = find_latest(trainer.run_dir)
    assert found is not None
    again.load(found)
    assert torch.tensor(again.train_step().nats_per_token).isfinite()


def children(module: str) -> list[str]:
    return [name for name in MODULES if name == module or name.startswith(f"{module}.")]

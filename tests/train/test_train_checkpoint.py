"""Checkpoints: whole or not there, whatever fails; damage is found, named, and an older one pointed to."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from small_runs import begin
from torch import nn

from tilemoe.models.sums import file_entries
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints import pending, sharded_state
from tilemoe.train.checkpoints.folder import (
    CheckpointError,
    TrainState,
    find_latest,
    open_checkpoint,
    resolve_checkpoint,
)
from tilemoe.train.checkpoints.names import delete_files
from tilemoe.train.checkpoints.pending import Saver
from tilemoe.train.checkpoints.verify import verify
from tilemoe.train.config import OptimConfig, Recipe, load_recipe
from tilemoe.train.optim import make_optimizer, optimizer_tensors

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


class Toy(nn.Module):
    """Weights, a buffer and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("selection_bias", torch.randn(3))


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("smoke")


@pytest.fixture
def save(tmp_path: Path, recipe: Recipe) -> Callable[..., Path]:
    """Trains a toy for one step and saves it in ``tmp_path`` as the step asked for."""
    model = Toy()
    optimizer = make_optimizer(model, OptimConfig(lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()

    def write(step: int, keep_last: int = 9) -> Path:
        return begin(tmp_path, recipe, step, (model, optimizer), Saver(), keep_last).finish()

    write.model, write.optimizer = model, optimizer  # type: ignore[attr-defined]
    return write


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_holds_what_was_there_when_it_was_begun(
    device: str, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is trained until it is written; the second copy takes the memory of the first."""
    model, trained = Toy().to(device), Event()
    model.linear.requires_grad_(False)
    training, saver, write = (model, make_optimizer(model, OptimConfig(lr=0.1))), Saver(), sharded_state.write_whole
    monkeypatch.setattr(pending, "write_whole", lambda *given: write(*given) if trained.wait(60) else None)
    for step in (1, 2):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        begun = begin(tmp_path, recipe, step, training, saver)
        assert not begun.is_written
        with torch.no_grad():
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                parameter.add_(1)
        trained.set()
        found = Toy().to(device)
        load_model(found, begun.finish() / "model.safetensors")  # as anybody reads it: of tied weights there is one
        assert all(torch.equal(tensor, before[name]) for name, tensor in found.state_dict().items())
        trained.clear()
    monkeypatch.setattr(sharded_state, "_free_bytes", lambda: 1)  # no room for a copy: training waits
    monkeypatch.setattr(pending, "write_whole", write)
    begun = begin(tmp_path, recipe, 3, training, Saver())
    assert begun.is_written
    assert open_checkpoint(begun.finish()).state.step == 3


def test_frozen_weights_are_not_copied(tmp_path: Path) -> None:
    model = Toy()
    model.linear.requires_grad_(False)
    tensors = sharded_state.training_tensors(model, make_optimizer(model, OptimConfig(lr=0.1)))
    copied = sharded_state.HostMemory().copy(tensors, sharded_state.frozen_names(model))
    assert copied is not None
    assert copied.keys() == tensors.keys()
    same = {name for name in tensors if copied[name].data_ptr() == tensors[name].data_ptr()}
    assert same == {"model.linear.weight", "model.linear.bias"}
    assert_equal(list(copied.values()), [tensors[name] for name in copied])


def test_safetensors_reads_every_kind_of_tensor_that_is_written(tmp_path: Path) -> None:
    given = {
        "a scalar": torch.tensor(3.0),
        "an empty one": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).T,
        **{f"{dtype}": torch.arange(7).to(dtype) for dtype in sharded_state._KINDS},
    }
    weights = {f"model.{name}": tensor for name, tensor in given.items()}
    model, optimizer = tmp_path / "model", tmp_path / "optimizer"
    tensors = weights | {"optimizer.a": torch.arange(9, dtype=torch.uint8)}
    assert sharded_state.write_whole(model, optimizer, tensors) == file_entries([model, optimizer])
    read = load_file(model)
    assert read.keys() == given.keys()
    assert_equal([read[name].double() for name in given], [tensor.double() for tensor in given.values()])
    assert [read[name].dtype for name in given] == [tensor.dtype for tensor in given.values()]
    assert load_file(optimizer)["a"].tolist() == list(range(9))
    save_file({name: tensor.contiguous() for name, tensor in given.items()}, tmp_path / "theirs")
    with safe_open(model, "pt") as ours, safe_open(tmp_path / "theirs", "pt") as theirs:
        assert ours.metadata() == theirs.metadata()


def test_everything_comes_back_bit_for_bit(save: Any, recipe: Recipe) -> None:
    torch.manual_seed(7)
    path = save(12)
    expected_next = torch.rand(3)
    assert path.name == "step_00000012"
    assert sorted(entry.name for entry in path.iterdir()) == sorted(FILES)
    model = Toy()
    optimizer = make_optimizer(model, OptimConfig(lr=0.1))
    loaded = open_checkpoint(path)
    assert loaded.state == TrainState(recipe, 12, 120, 1.5, "abc")
    loaded.load_training(model, optimizer)
    assert torch.equal(torch.rand(3), expected_next)
    for (name, theirs), ours in zip(save.model.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(theirs, ours), name
    theirs, ours = optimizer_tensors(save.model, save.optimizer), optimizer_tensors(model, optimizer)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert model.head.weight is model.embed.weight


def test_a_damaged_newest_is_an_error_that_names_the_older_one(save: Callable[..., Path], tmp_path: Path) -> None:
    older, broken, newest = save(1), save(2), save(3)
    assert find_latest(tmp_path).path == newest
    for path in (broken, newest):
        (path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=f"model.safetensors.*--resume {older}$"):
        find_latest(tmp_path)
    (older / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no older one is intact"):
        resolve_checkpoint(tmp_path)


def test_what_a_user_points_at(save: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no step_"):
        resolve_checkpoint(tmp_path)
    assert find_latest(tmp_path) is None
    path = save(5)
    assert resolve_checkpoint(tmp_path).path == resolve_checkpoint(path).path == path
    with pytest.raises(CheckpointError, match="no folder"):
        resolve_checkpoint(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["abandoned_step_00000001", "abandoned_step_00000001.1"])
def test_what_comes_into_a_checkpoint_while_it_is_deleted_stays(
    save: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    if name.endswith(".1"):
        save(1).rename(tmp_path / "abandoned_step_00000001")  # which takes the first name
    path = save(1)
    files = [file.name for file in path.iterdir()]
    (path / "thesis.tex").write_bytes(b"years of work")
    delete_files(path, [*files, "gone", "\ud800", "a" * 300])  # of a manifest of others, which lists anything
    save(2)
    assert (tmp_path / name / "thesis.tex").read_bytes() == b"years of work"


@pytest.mark.parametrize("name", ["step_00000004", "step_000000002"])
def test_a_renamed_checkpoint_is_named_with_the_step_that_it_is_of(
    save: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    path = save(2).rename(tmp_path / name)
    expected = rf"^checkpoint {path} was renamed: state\.json says step 2; name it step_00000002 again, or move it out"
    for use in (find_latest, resolve_checkpoint):
        with raises_one_line(expected, CheckpointError):
            use(tmp_path)
    [finding] = verify(tmp_path)
    assert (finding.is_right, "was renamed" in finding.line) == (False, True)
    assert open_checkpoint(path.rename(tmp_path / "kept")).state.step == 2, "a name that is of no step says nothing"
    assert find_latest(tmp_path) is None


def test_what_has_the_name_of_the_next_checkpoint_is_named_and_stays(save: Callable[..., Path], tmp_path: Path) -> None:
    save(1)
    theirs = save(2).rename(tmp_path / "step_00000003")
    before = {file.name: file.read_bytes() for file in theirs.iterdir()}
    with raises_one_line(rf"could not write .*has this checkpoint's name: move it away: '{theirs}'", CheckpointError):
        save(3)
    assert {file.name: file.read_bytes() for file in theirs.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]

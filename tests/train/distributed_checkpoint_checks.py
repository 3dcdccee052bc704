"""What jobs of four and of two processes check of their checkpoints; `test_train_distributed_checkpoint` runs it."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from tilemoe.config import ModelConfig, MoEConfig, ParallelConfig, RouterConfig
from tilemoe.data import load_tokenizer
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import save_hf
from tilemoe.parallel.mesh import build_meshes
from tilemoe.parallel.model import parallelize
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints import distributed as distributed_checkpoint
from tilemoe.train.checkpoints.distributed import PendingCheckpoint
from tilemoe.train.checkpoints.folder import (
    CheckpointError,
    TrainState,
    find_latest,
    list_checkpoints,
    open_checkpoint,
    save_checkpoint,
)
from tilemoe.train.checkpoints.initial import load_initial
from tilemoe.train.config import OptimConfig, load_recipe
from tilemoe.train.optim import make_optimizer, optimizer_tensors

RUN = "TILEMOE_TEST_RUN"  # names the folder that the jobs share
MODEL = ModelConfig(
    vocab_size=32, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, max_seq_len=8,
    moe=MoEConfig(8, 8, 4, 2, router=RouterConfig(selection_bias=True)), initializer_range=0.3,
)  # fmt: skip
EXACT = ParallelConfig(param_dtype=None, reduce_dtype=None)
MESHES = {
    "EP 2 x FSDP 2": replace(EXACT, expert=2),
    "FSDP": EXACT,
    "HSDP 2 x 2": replace(EXACT, replicate=2),
    "EP 4": replace(EXACT, expert=4),
}
Training = tuple[DecoderLM, torch.optim.Optimizer]


def run_dir() -> Path:
    return Path(os.environ[RUN])


def make(config: ParallelConfig, seed: int) -> Training:
    model = DecoderLM(MODEL, device="meta")
    parallelize(model, build_meshes(config, MODEL, "cpu"), device="cpu", generator=torch.Generator().manual_seed(seed))
    return model, make_optimizer(model, OptimConfig(lr=0.1))


def step(training: Training, number: int) -> None:
    """One optimiser step on tokens that torch's random numbers choose, different ones on each rank."""
    model, optimizer = training
    ids = torch.randint(32, (2, 9))
    out = model(ids[:, :-1], ids[:, 1:])
    assert out.loss is not None
    (out.loss / dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.update_selection_bias(out.tokens_per_expert, 0.01 * number)


def save(training: Training, number: int, keep_last: int = 9) -> Path:
    state = TrainState(load_recipe("smoke"), number, 10 * number, 1.5, "abc")
    return save_state(run_dir(), state, training, keep_last)


def save_state(folder: Path, state: TrainState, training: Training, keep_last: int) -> Path:
    options: dict[str, Any] = {"tokenizer": load_tokenizer("bytes"), "keep_last": keep_last}
    return PendingCheckpoint(folder, state, *training, **options, group=dist.new_group(backend="gloo")).finish()


def whole_state(training: Training) -> dict[str, Tensor]:
    """Everything in whole, as one process has it."""
    model, optimizer = training
    tensors = dict(model.state_dict()) | {f"optimizer.{k}": v for k, v in optimizer_tensors(model, optimizer).items()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def assert_state(training: Training, file: str) -> None:
    expected, got = torch.load(run_dir() / file), whole_state(training)
    assert expected.keys() == got.keys()
    assert_equal(got, expected)


def resumed(training: Training) -> Training:
    """``training``, with the state of step 2 that four processes wrote."""
    open_checkpoint(run_dir() / "step_00000002").load_training(*training)
    assert_state(training, "state_2.pt")
    return training


def check_save_on_four() -> None:
    torch.manual_seed(100 + dist.get_rank())
    training = make(MESHES["EP 2 x FSDP 2"], 0)
    for number in (1, 2, 3):
        step(training, number)
        if number < 3:
            path = save(training, number, keep_last=1)
            assert path.name == f"step_{number:08d}"
        state = whole_state(training)
        if dist.get_rank() == 0:
            torch.save(state, run_dir() / f"state_{number}.pt")
    dist.barrier()
    assert [path.name for path in list_checkpoints(run_dir())] == ["step_00000002"]  # the older one is dropped


def check_resume_on_the_same_mesh() -> None:
    """The step after a resumption is that of the run that was not interrupted, random numbers and all."""
    training = make(MESHES["EP 2 x FSDP 2"], 5)
    checkpoint = open_checkpoint(run_dir() / "step_00000002")
    assert (checkpoint.state.step, checkpoint.state.tokens) == (2, 20)
    torch.manual_seed(0)
    checkpoint.load_training(*training)
    assert_state(training, "state_2.pt")
    step(training, 3)
    assert_state(training, "state_3.pt")


def check_resume_on_other_meshes() -> None:
    for name in ("FSDP", "HSDP 2 x 2", "EP 4"):
        step(resumed(make(MESHES[name], 5)), 3)


def check_a_checkpoint_written_meanwhile() -> None:
    """It holds what was there when it was begun, whatever is trained until it is finished."""
    training = make(MESHES["EP 2 x FSDP 2"], 5)
    open_checkpoint(run_dir() / "step_00000002").load_training(*training)
    group = dist.new_group(backend="gloo")
    state = TrainState(load_recipe("smoke"), 9, 90, 1.5, "abc")
    options: dict[str, Any] = {"tokenizer": load_tokenizer("bytes"), "keep_last": 9, "group": group}
    pending = PendingCheckpoint(run_dir() / "other", state, *training, **options)
    step(training, 3)
    assert_state(training, "state_3.pt")
    assert not list_checkpoints(run_dir() / "other")
    dist.barrier()
    path = pending.finish()
    assert pending.is_written
    dist.barrier()
    open_checkpoint(path).load_training(*training)
    assert_state(training, "state_2.pt")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FileSystemWriter, "write_data", _full_disk)
        pending = PendingCheckpoint(run_dir() / "other", replace(state, step=10), *training, **options)
        with pytest.raises(CheckpointError, match=r"step_00000010 .*No space left.*step_00000009"):
            pending.finish()
    dist.barrier()


def check_a_failing_write() -> None:
    """One line in every process, wherever it failed, and the older checkpoint stays what it was."""
    training = make(MESHES["FSDP"], 0)
    for rank, owner, name in ((1, FileSystemWriter, "write_data"), (0, distributed_checkpoint, "publish")):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(owner, name, _full_disk)
            with pytest.raises(CheckpointError, match=r"could not write .*No space left.*step_00000002") as caught:
                save(training, 4)
        assert "\n" not in str(caught.value)
        dist.barrier()
        assert not list(run_dir().glob(".tmp-*"))
        assert [path.name for path in list_checkpoints(run_dir())] == ["step_00000002"]
        dist.barrier()
    assert find_latest(run_dir()) is not None
    dist.barrier()


def _full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def check_save_what_can_be_exported() -> None:
    """A model without a selection bias, which other packages' formats have no place for."""
    recipe = load_recipe("smoke")
    model_config = replace(MODEL, vocab_size=256, moe=MoEConfig(8, 8, 4, 2))
    recipe = replace(recipe, model=model_config, data=replace(recipe.data, seq_len=8))
    model = DecoderLM(model_config, device="meta")
    meshes = build_meshes(MESHES["EP 2 x FSDP 2"], model_config, "cpu")
    parallelize(model, meshes, device="cpu", generator=torch.Generator().manual_seed(3))
    training = (model, make_optimizer(model, OptimConfig(lr=0.1)))
    state = TrainState(recipe, 1, 10, 1.5, "abc")
    save_state(run_dir() / "export", state, training, keep_last=1)
    ids = torch.arange(8)[None]
    logits = model.eval()(ids).logits
    if dist.get_rank() == 0:
        torch.save(logits, run_dir() / "logits.pt")
    dist.barrier()


def check_start_from_a_model() -> None:
    """Of transformers' folder, a job's checkpoint and one process' checkpoint: each process gets its parts."""
    model_config = replace(MODEL, moe=MoEConfig(8, 8, 4, 2))
    whole = DecoderLM(model_config)
    whole.reset_parameters(torch.Generator().manual_seed(8))
    expected = whole.state_dict()
    folder = run_dir() / "initial"
    if dist.get_rank() == 0:
        save_hf(whole, folder / "hf")
        (folder / "hf" / "tokenizer.json").write_text("{}")  # is not read here
        recipe = load_recipe("smoke")
        recipe = replace(recipe, model=replace(model_config, vocab_size=256), data=replace(recipe.data, seq_len=8))
        save_checkpoint(
            folder / "run", TrainState(recipe, 1, 10, 1.5, "abc"), whole, make_optimizer(whole, OptimConfig(lr=0.1)),
            tokenizer=load_tokenizer("bytes"), keep_last=1,
        )  # fmt: skip
    dist.barrier()
    for config in MESHES.values():
        for source in ("hf", "run"):
            model = DecoderLM(model_config, device="meta")
            parallelize(model, build_meshes(config, model_config, "cpu"), device="cpu", generator=torch.Generator())
            load_initial(model, folder / source)
            for name, tensor in model.state_dict().items():
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert_equal(found, expected[name], (source, name))
    dist.barrier()


def check_resume_on_two() -> None:
    for config in (EXACT, replace(EXACT, expert=2)):
        training = make(config, 5)
        open_checkpoint(run_dir() / "step_00000002").load_training(*training)
        assert_state(training, "state_2.pt")
        step(training, 3)


ON_FOUR = (
    check_save_on_four, check_resume_on_the_same_mesh, check_resume_on_other_meshes,
    check_a_checkpoint_written_meanwhile, check_a_failing_write, check_save_what_can_be_exported,
    check_start_from_a_model,
)  # fmt: skip
ON_TWO = (check_resume_on_two,)

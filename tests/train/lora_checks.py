"""What jobs of four and of two processes check of adapters; `test_train_lora_distributed` runs it."""

from dataclasses import replace

import torch
import torch.distributed as dist
from distributed_checkpoint_checks import (
    EXACT,
    MESHES,
    MODEL,
    Training,
    assert_state,
    resumed,
    run_dir,
    save_state,
    step,
    whole_state,
)
from helpers import raises_one_line

from tilemoe.config import MoEConfig, ParallelConfig
from tilemoe.layers.lora import adapter_names, merge_lora
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import save_hf
from tilemoe.parallel.mesh import build_meshes
from tilemoe.parallel.model import parallelize
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints.folder import TrainState
from tilemoe.train.checkpoints.initial import load_initial
from tilemoe.train.checkpoints.restore import make_decoder
from tilemoe.train.config import LoRAConfig, OptimConfig, Recipe, load_recipe
from tilemoe.train.optim import make_optimizer, optimizer_tensors

CONFIG = replace(MODEL, vocab_size=256, moe=MoEConfig(8, 8, 4, 2))  # what transformers has a place for


def recipe() -> Recipe:
    smoke = load_recipe("smoke")
    return replace(smoke, model=CONFIG, data=replace(smoke.data, seq_len=8), lora=LoRAConfig(rank=3))


def make(config: ParallelConfig, seed: int) -> Training:
    """On the base that the first check has written, with adapters of ``seed``."""
    model = make_decoder(recipe(), device="meta")
    meshes = build_meshes(config, CONFIG, "cpu")
    parallelize(model, meshes, device="cpu", generator=torch.Generator().manual_seed(seed))
    load_initial(model, run_dir() / "base")
    return model, make_optimizer(model, OptimConfig(lr=0.1))


def base() -> DecoderLM:
    model = DecoderLM(CONFIG)
    model.reset_parameters(torch.Generator().manual_seed(8))
    return model


def check_save_on_four() -> None:
    """The base is that of transformers' folder, each process its part, and stays; the adapters alone have a state."""
    if dist.get_rank() == 0:
        save_hf(base(), run_dir() / "base")
    dist.barrier()
    torch.manual_seed(100 + dist.get_rank())
    training = make(MESHES["EP 2 x FSDP 2"], 0)
    expected = dict(base().state_dict())
    for number in (1, 2, 3):
        step(training, number)
        if number == 2:
            save_state(run_dir(), TrainState(recipe(), number, 20, 1.5, "abc"), training, keep_last=1)
        state = whole_state(training)
        assert_equal({name: state[name] for name in expected}, expected)
        if dist.get_rank() == 0:
            torch.save(state, run_dir() / f"state_{number}.pt")
    names = adapter_names(training[0])
    assert {name.rpartition(".")[0] for name in optimizer_tensors(*training)} == names
    assert all(state[name].any() for name in names)
    dist.barrier()


def check_resume_on_the_same_mesh() -> None:
    """The step after a resumption is that of the run that was not interrupted, random numbers and all."""
    training = make(MESHES["EP 2 x FSDP 2"], 5)
    torch.manual_seed(0)
    step(resumed(training), 3)
    assert_state(training, "state_3.pt")


def check_resume_on_other_meshes() -> None:
    for name in ("FSDP", "HSDP 2 x 2", "EP 4"):
        step(resumed(make(MESHES[name], 5)), 3)


def check_resume_on_two() -> None:
    for config in (EXACT, replace(EXACT, expert=2)):
        step(resumed(make(config, 5)), 3)


def check_begin_from_checkpoints_without_adapters() -> None:
    """One process' and a job's: the base is theirs, the adapters are as they were drawn."""
    whole = replace(recipe(), lora=None)
    plain = DecoderLM(CONFIG, device="meta")
    meshes = build_meshes(MESHES["EP 2 x FSDP 2"], CONFIG, "cpu")
    parallelize(plain, meshes, device="cpu", generator=torch.Generator().manual_seed(3))
    training = (plain, make_optimizer(plain, OptimConfig(lr=0.1)))
    save_state(run_dir() / "job", TrainState(whole, 1, 10, 1.5, "abc"), training, keep_last=1)
    expected = whole_state(training)
    dist.barrier()
    model, _ = make(MESHES["EP 2 x FSDP 2"], 0)
    drawn = {name: whole_state((model, training[1]))[name] for name in adapter_names(model)}
    load_initial(model, run_dir() / "job")
    found = whole_state((model, make_optimizer(model, OptimConfig(lr=0.1))))
    assert_equal(found, {name: expected[name] for name in plain.state_dict()} | drawn)


def check_shared_adapters_are_not_merged() -> None:
    """An expert of a shared weight is a copy: adding to it would change nothing, and the adapter would be gone."""
    for config in (EXACT, replace(EXACT, expert=2)):
        model, _ = make(config, 5)
        expected = whole_state((model, make_optimizer(model, OptimConfig(lr=0.1))))
        with raises_one_line("adapters cannot be merged while processes share the model; save a checkpoint"):
            merge_lora(model)
        assert_equal(whole_state((model, make_optimizer(model, OptimConfig(lr=0.1)))), expected)


ON_FOUR = (
    check_save_on_four, check_resume_on_the_same_mesh, check_resume_on_other_meshes,
    check_begin_from_checkpoints_without_adapters,
)  # fmt: skip
ON_TWO = (check_resume_on_two, check_shared_adapters_are_not_merged)

"""What jobs of four and of two processes check of their checkpoints; `test_train_distributed_checkpoint` runs it."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raises_one_line
from small_runs import begin
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tilemoe.config import ModelConfig, MoEConfig, ParallelConfig, RouterConfig
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.layers.lora import adapter_names, merge_lora, packed_weights
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import save_hf
from tilemoe.parallel.mesh import build_meshes
from tilemoe.parallel.model import parallelize
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints import distributed as distributed_checkpoint
from tilemoe.train.checkpoints import folder as folder_of_checkpoints
from tilemoe.train.checkpoints import pending, sharded_state
from tilemoe.train.checkpoints.distributed import JobSaver, require_shared, verified
from tilemoe.train.checkpoints.folder import (
    CheckpointError,
    find_latest,
    list_checkpoints,
    open_checkpoint,
)
from tilemoe.train.checkpoints.initial import load_initial
from tilemoe.train.checkpoints.names import step_dir
from tilemoe.train.checkpoints.pending import Saver
from tilemoe.train.checkpoints.restore import make_decoder
from tilemoe.train.checkpoints.sharded_state import copy_part
from tilemoe.train.config import LoRAConfig, OptimConfig, Recipe, load_recipe
from tilemoe.train.job.collective import of_all_ranks
from tilemoe.train.job.processes import Job
from tilemoe.train.optim import make_optimizer, optimizer_tensors, split_name

RUN = "TILEMOE_TEST_RUN"  # names the folder that the jobs share
MODEL = ModelConfig(
    vocab_size=32, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, max_seq_len=8,
    moe=MoEConfig(8, 8, 4, 2, router=RouterConfig(selection_bias=True)), initializer_range=0.3,
)  # fmt: skip
EXPORTED = replace(MODEL, vocab_size=256, moe=MoEConfig(8, 8, 4, 2))  # what transformers has a place for
WIDE = replace(EXPORTED, hidden_size=64, moe=MoEConfig(64, 64, 4, 2))  # as wide as blocks of 4 bit are
# At these sizes oneDNN sums the products of a matrix in the same order, however many there are. Six rows of q_proj: of
# four processes the last has none.
OF_MUON = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=3, num_heads=1, num_kv_heads=1, head_dim=6, max_seq_len=8,
    moe=MoEConfig(16, 16, 8, 2, router=RouterConfig(selection_bias=True), shared_intermediate_size=8),
    dense_intermediate_size=24, dense_layers=(0,), initializer_range=0.3,
)  # fmt: skip
# What is trained: its model and optimiser.
KINDS = {
    "adamw": (MODEL, OptimConfig(lr=0.1)),
    "adapters": (EXPORTED, OptimConfig(lr=0.1)),
    "in 4 and 8 bit": (WIDE, OptimConfig(lr=0.1, name="adamw8bit")),
    "muon": (OF_MUON, OptimConfig(lr=0.1, name="muon")),
}
# Of the kinds with adapters.
LORA = {"adapters": LoRAConfig(rank=3), "in 4 and 8 bit": LoRAConfig(rank=32, storage="nf4_double")}
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


def recipe_of(kind: str) -> Recipe:
    smoke, model = load_recipe("smoke"), KINDS[kind][0] if kind in LORA else EXPORTED
    return replace(smoke, model=model, data=replace(smoke.data, seq_len=8), lora=LORA.get(kind))


def make(kind: str, config: ParallelConfig | None, seed: int = 5) -> Training:
    """Shared as ``config`` says, None: whole. Adapters are of ``seed``, on the base that the first check wrote."""
    model_config, optim = KINDS[kind]
    device = "cpu" if config is None else "meta"
    model = make_decoder(recipe_of(kind), device=device) if kind in LORA else DecoderLM(model_config, device=device)
    if config is not None:
        meshes = build_meshes(config, model_config, "cpu")
        parallelize(model, meshes, device="cpu", generator=torch.Generator().manual_seed(seed))
    elif kind in LORA:
        model.reset_parameters(torch.Generator().manual_seed(seed))
    if kind in LORA:
        load_initial(model, run_dir() / f"base of {kind}")
    return model, make_optimizer(model, optim)


def base(kind: str = "adapters") -> DecoderLM:
    model = DecoderLM(KINDS[kind][0])
    model.reset_parameters(torch.Generator().manual_seed(8))
    return model


def trained(model: DecoderLM) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


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


def save(folder: Path, recipe: Recipe, number: int, training: Training, keep_last: int = 9) -> Path:
    return begin(folder, recipe, number, training, JobSaver(60), keep_last).finish()


def whole_state(training: Training) -> dict[str, Tensor]:
    """Everything in whole, as one process has it; gathered at once, sooner than each tensor by itself."""
    model, optimizer = training
    tensors = dict(model.state_dict()) | {f"optimizer.{k}": v for k, v in optimizer_tensors(model, optimizer).items()}
    shared = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    parts_of_ranks = of_all_ranks({name: part_of_rank(tensor) for name, tensor in shared.items()}) if shared else []
    for name, tensor in shared.items():
        tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        for parts in parts_of_ranks:
            place, part = parts[name]
            tensors[name][place] = part
    return tensors


def part_of_rank(tensor: DTensor) -> tuple[tuple[slice, ...], Tensor]:
    """Where it is in the whole, and what it is."""
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(map(lambda start, size: slice(start, start + size), starts, sizes)), tensor.to_local()


def assert_state(training: Training, kind: str, number: int) -> None:
    expected, got = torch.load(run_dir() / f"{kind}_{number}.pt"), whole_state(training)
    assert expected.keys() == got.keys()
    assert_equal(got, expected)


def resumed(kind: str, config: ParallelConfig | None) -> Training:
    """With the state of step 2 that four processes wrote."""
    training = make(kind, config)
    open_checkpoint(run_dir() / kind / "step_00000002").load_training(*training)
    assert_state(training, kind, 2)
    return training


def check_save_on_four() -> None:
    """Adapters' base is that of transformers' folder, each process its part, and stays; they alone have a state."""
    if dist.get_rank() == 0:
        for kind in LORA:
            save_hf(base(kind), run_dir() / f"base of {kind}")
    dist.barrier()
    for kind in KINDS:
        torch.manual_seed(100 + dist.get_rank())
        training = make(kind, MESHES["EP 2 x FSDP 2"], 0)
        for number in (1, 2, 3):
            step(training, number)
            if number < 3:
                path = save(run_dir() / kind, recipe_of(kind), number, training, keep_last=1)
                assert path.name == f"step_{number:08d}"
            if number > 1:
                state = whole_state(training)
                if dist.get_rank() == 0:
                    torch.save(state, run_dir() / f"{kind}_{number}.pt")
        dist.barrier()
        assert [path.name for path in list_checkpoints(run_dir() / kind)] == ["step_00000002"]  # the older is dropped
        if kind in LORA:
            expected = base(kind).state_dict()
            for weight, (module, names) in packed_weights(training[0]).items():
                stored = STORAGES[module.storage].quantize(expected.pop(weight)).tensors.values()
                expected |= dict(zip(names, stored, strict=True))
            assert_equal({name: state[name] for name in expected}, expected)
            names = adapter_names(training[0])
            assert {split_name(name)[0] for name in optimizer_tensors(*training)} == names
            assert all(state[name].any() for name in names)


def check_resume_on_the_same_mesh() -> None:
    """The step after a resumption is that of the run that was not interrupted, random numbers and all."""
    for kind in KINDS:
        torch.manual_seed(0)
        training = resumed(kind, MESHES["EP 2 x FSDP 2"])
        step(training, 3)
        assert_state(training, kind, 3)


def check_resume_on_other_meshes() -> None:
    for kind, names in {
        "adamw": ("FSDP", "HSDP 2 x 2", "EP 4"),
        "adapters": ("FSDP",),
        "in 4 and 8 bit": ("FSDP", "HSDP 2 x 2", "EP 4"),
        "muon": ("FSDP", "EP 4"),
    }.items():
        for name in names:
            training = resumed(kind, MESHES[name])
            if kind == "muon":
                weight = training[0].blocks[1].mlp.experts.w1
                assert training[1].state[weight]["momentum_buffer"].placements == weight.placements
            step(training, 3)


def check_steps_by_moments_of_a_byte() -> None:
    """To the bit those of one process that has the same gradients."""
    one, many = (make("in 4 and 8 bit", config) for config in (None, MESHES["EP 2 x FSDP 2"]))
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        for whole, part in zip(trained(one[0]), trained(many[0]), strict=True):
            whole.grad, part.grad = torch.randn(whole.shape, generator=generator), torch.empty_like(part)
            copy_part(part.grad, whole.grad.__getitem__)
        for _, optimizer in (one, many):
            optimizer.step()
    state = whole_state(many)
    assert state["optimizer.blocks.0.mlp.experts.up_a.exp_avg.codes"].any()
    assert_equal(state, whole_state(one))


def check_a_write_that_tells_places_in_its_file_alone() -> None:
    """As PyTorch 2.11's."""
    training, finish = resumed("adamw", MESHES["FSDP"]), FileSystemWriter.finish

    def finish_a_copy(writer: FileSystemWriter, metadata: Any, results: Any) -> None:
        finish(writer, replace(metadata), results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "finish", finish_a_copy)
        path = save(run_dir() / "old", recipe_of("adamw"), 2, training)
    dist.barrier()
    open_checkpoint(path).load_training(*training)
    assert_state(training, "adamw", 2)


def check_what_one_process_wrote() -> None:
    """Read by all, each its parts."""
    for kind in ("adamw", "in 4 and 8 bit", "muon"):
        if dist.get_rank() == 0:
            whole = make(kind, None)
            for parameter in trained(whole[0]):
                parameter.grad = torch.randn_like(parameter)
            whole[1].step()
            begin(run_dir() / "one" / kind, recipe_of(kind), 7, whole, Saver()).finish()
            torch.save(whole_state(whole), run_dir() / f"{kind}_7.pt")
        dist.barrier()
        for name in ("FSDP", "EP 2 x FSDP 2"):
            training = make(kind, MESHES[name])
            open_checkpoint(run_dir() / "one" / kind / "step_00000007").load_training(*training)
            assert_state(training, kind, 7)
            step(training, 8)


def check_a_checkpoint_written_meanwhile() -> None:
    """It holds what was there when it was begun, whatever is trained until it is finished."""
    torch.manual_seed(0)
    training = resumed("adamw", MESHES["EP 2 x FSDP 2"])
    saver, numbers, paths = JobSaver(60), (9, 10), []
    for number in numbers:  # the second copy takes the memory of the first
        begun = begin(run_dir() / "other", recipe_of("adamw"), number, training, saver)
        step(training, number - 6)
        paths.append(begun.finish())
        assert begun.is_written
        assert list_checkpoints(run_dir() / "other") == paths
    for path, number in zip(paths, (2, 3), strict=True):
        open_checkpoint(path).load_training(*training)
        assert_state(training, "adamw", number)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FileSystemWriter, "write_data", _full_disk)
        begun = begin(run_dir() / "other", recipe_of("adamw"), 11, training, saver)
        with pytest.raises(CheckpointError, match=r"step_00000011 .*No space left.*step_00000010"):
            begun.finish()
    dist.barrier()


def check_a_process_writes_several_files() -> None:
    """Of about as many bytes; where one of them fails it is the error of all, and there is no checkpoint."""
    torch.manual_seed(0)
    training, folder, create = resumed("muon", MESHES["FSDP"]), run_dir() / "several", FileSystem.create_stream

    def create_some(system: FileSystem, path: Path, mode: str) -> Any:
        return _full_disk() if path.name == "__1_6_0.distcp" else create(system, path, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_state, "_FILE_BYTES", 1000)
        path = save(folder, recipe_of("muon"), 2, training)
        patch.setattr(FileSystem, "create_stream", create_some)
        with raises_one_line(r"could not write .*rank 1: .*No space left.*_00000002", CheckpointError):
            save(folder, recipe_of("muon"), 4, training)
    sizes = [file.stat().st_size for file in sharded_state.files_of_rank(path, dist.get_rank())]
    assert len(sizes) == 8, sizes
    assert max(sizes) < 1.5 * min(sizes), sizes
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step_00000002"]
    checkpoint, other = open_checkpoint(path), make("muon", MESHES["EP 4"])
    with verified(checkpoint, Job(dist.get_rank(), 4)):
        checkpoint.load_training(*other)
    assert_state(other, "muon", 2)


def check_a_failing_write() -> None:
    """One line in every process, wherever it failed, and the older checkpoint stays what it was."""
    training, folder = make("adamw", MESHES["FSDP"]), run_dir() / "adamw"
    for rank, owner, name, fault in (
        (1, FileSystemWriter, "write_data", _full_disk),
        (1, distributed_checkpoint, "file_entries", _full_disk),
        (0, pending, "publish", _full_disk),
        (0, pending, "publish", _defect),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(owner, name, fault)
            with raises_one_line(r"could not write .*(rank \d: .*No space left|TypeError).*_00000002", CheckpointError):
                save(folder, recipe_of("adamw"), 4, training)
        dist.barrier()
        assert not list(folder.glob(".tmp-*"))
        assert [path.name for path in list_checkpoints(folder)] == ["step_00000002"]
        dist.barrier()
    assert find_latest(folder) is not None
    dist.barrier()


def _defect(*args: Any, **kwargs: Any) -> None:
    raise TypeError


def _full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def check_save_what_can_be_exported() -> None:
    """A model without a selection bias, which other packages' formats have no place for; adapters begin from it."""
    model = DecoderLM(EXPORTED, device="meta")
    meshes = build_meshes(MESHES["EP 2 x FSDP 2"], EXPORTED, "cpu")
    parallelize(model, meshes, device="cpu", generator=torch.Generator().manual_seed(3))
    training = (model, make_optimizer(model, OptimConfig(lr=0.1)))
    save(run_dir() / "export", recipe_of("adamw"), 1, training, keep_last=1)
    ids, expected = torch.arange(8)[None], whole_state(training)
    logits = model.eval()(ids).logits
    if dist.get_rank() == 0:
        torch.save(logits, run_dir() / "logits.pt")
    dist.barrier()
    adapted = make("adapters", MESHES["EP 2 x FSDP 2"], 0)
    before, names = whole_state(adapted), adapter_names(adapted[0])
    load_initial(adapted[0], run_dir() / "export")
    found = {name: tensor for name, tensor in whole_state(adapted).items() if not name.startswith("optimizer.")}
    assert_equal(found, {name: before[name] if name in names else expected[name] for name in found})
    dist.barrier()


def check_start_from_a_model() -> None:
    """Of transformers' folder and of one process' checkpoint: each process gets its parts."""
    whole, folder = base(), run_dir() / "initial"
    expected = whole.state_dict()
    if dist.get_rank() == 0:
        begin(folder, recipe_of("adamw"), 1, (whole, make_optimizer(whole, OptimConfig(lr=0.1))), Saver()).finish()
    dist.barrier()
    for config in MESHES.values():
        for source in (run_dir() / "base of adapters", folder):
            model = DecoderLM(EXPORTED, device="meta")
            parallelize(model, build_meshes(config, EXPORTED, "cpu"), device="cpu", generator=torch.Generator())
            load_initial(model, source)
            for name, tensor in model.state_dict().items():
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert_equal(found, expected[name], (source, name))
    dist.barrier()


def check_resume_on_two() -> None:
    for kind in KINDS:
        for config in (EXACT, replace(EXACT, expert=2)):
            step(resumed(kind, config), 3)


def check_shared_adapters_are_not_merged() -> None:
    """An expert of a shared weight is a copy: adding to it would change nothing, and the adapter would be gone."""
    for config in (EXACT, replace(EXACT, expert=2)):
        training = make("adapters", config)
        expected = whole_state(training)
        with raises_one_line("adapters of a sharded model cannot be merged; save a checkpoint"):
            merge_lora(training[0])
        assert_equal(whole_state(training), expected)


def check_one_folder_is_shared() -> None:
    rank, run = dist.get_rank(), run_dir() / "shared"
    require_shared(run, Job(rank, 2), 10)
    if rank == 0:  # the rank that clears up, and the next to write there
        assert not any(run.iterdir())
        step_dir(run, 0).mkdir()  # of a job that was stopped before its first step
    dist.barrier()
    require_shared(run, Job(rank, 2), 10)
    if rank == 0:
        assert list(run.iterdir()) == [step_dir(run, 0)]


def check_a_rank_that_cannot_write_is_named() -> None:
    rank, run = dist.get_rank(), run_dir() / "shared"
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Path, "touch", lambda path: os.mkdir("/"))
        with raises_one_line(r"shared: rank 1 on .* cannot write there \(File exists\); put it on"):
            require_shared(run, Job(rank, 2), 10)


def check_a_file_that_a_rank_does_not_see() -> None:
    folder, rank = run_dir(), dist.get_rank()
    file = folder / "__1_0.distcp"
    file.write_bytes(b"abc")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_checkpoint, "SEEN_WITHIN_SECONDS", 0.2)
        distributed_checkpoint._require_seen(folder, {file.name: {"bytes": 3}})
        with raises_one_line("rank 1 does not see all of __1_0.distcp; all hosts", OSError):
            distributed_checkpoint._require_seen(folder if rank == 0 else folder / "none", {file.name: {"bytes": 3}})
        with raises_one_line("rank 0 does not see all of __1_0.distcp; all hosts", OSError):
            distributed_checkpoint._require_seen(folder, {file.name: {"bytes": 4}})


def check_two_verify_while_they_read() -> None:
    """Each compares a file, the slower for longer than any other collective may take, and both name the damaged one."""
    path, job = run_dir() / "one" / "adamw" / "step_00000007", Job(dist.get_rank(), 2)
    training, real, compared = make("adamw", EXACT), folder_of_checkpoints.compared, []

    @contextlib.contextmanager
    def slow(folder: Path, files: dict[str, Any]) -> Iterator[None]:
        compared.append(sorted(files))
        with real(folder, files):
            yield
            time.sleep(2.5 * job.is_first)

    _set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_of_checkpoints, "compared", slow)
        checkpoint = open_checkpoint(path)
        with verified(checkpoint, job):
            checkpoint.load_training(*training)
    _set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
    assert compared == [[("model.safetensors", "optimizer.safetensors")[job.rank]]]
    assert_state(training, "adamw", 7)
    dist.barrier()
    if job.is_first:
        content = (path / "optimizer.safetensors").read_bytes()
        (path / "optimizer.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    dist.barrier()
    damaged = raises_one_line(r"is damaged: optimizer\.safetensors does not match its checksum", CheckpointError)
    with damaged, verified(checkpoint, job):
        if job.is_first:
            raise CheckpointError("what a reader says of it")


ON_FOUR = (
    check_save_on_four, check_resume_on_the_same_mesh, check_resume_on_other_meshes, check_what_one_process_wrote,
    check_a_checkpoint_written_meanwhile, check_a_failing_write, check_save_what_can_be_exported,
    check_start_from_a_model, check_steps_by_moments_of_a_byte,
    check_a_write_that_tells_places_in_its_file_alone, check_a_process_writes_several_files,
)  # fmt: skip
ON_TWO = (
    check_resume_on_two, check_shared_adapters_are_not_merged, check_one_folder_is_shared,
    check_a_rank_that_cannot_write_is_named, check_a_file_that_a_rank_does_not_see, check_two_verify_while_they_read,
)  # fmt: skip

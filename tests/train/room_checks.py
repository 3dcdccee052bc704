"""What jobs of two and of four processes check of steps that are repeated for want of room; `test_train_room` runs it.

Tokens cross by windows, in files, whose kernels are interpreted. On a GPU nobody looks whether logits are NaN.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_checkpoint_checks import whole_state
from file_window import windows_of_files
from helpers import raises_one_line, timeless

from tilemoe.config import MoEConfig, ParallelConfig, RouterConfig, TokenRounding
from tilemoe.dispatch import window
from tilemoe.dispatch.choose import Transports
from tilemoe.dispatch.window import Windows
from tilemoe.layers.experts import capacity_of
from tilemoe.models.generate import generate
from tilemoe.routing import topk
from tilemoe.testing import assert_equal
from tilemoe.train import room
from tilemoe.train.checkpoints.restore import build_shared_model
from tilemoe.train.config import DataConfig, OptimConfig, Recipe, TrainConfig, load_recipe
from tilemoe.train.datasets import prepare_data
from tilemoe.train.job.processes import Job
from tilemoe.train.loop import Trainer
from tilemoe.train.metrics import MetricsWriter, read_metrics
from tilemoe.train.progress import Reporter

FOLDER = "TILEMOE_TEST_FOLDER"
CPU = torch.device("cpu")
LAYERS, LENGTH = 2, 16  # a layer takes Triton's interpreter half a second
ROUTER = RouterConfig(selection_bias=True, aux_loss_coef=0.01, z_loss_coef=0.01)
ROWS = 4  # that there is room for, too few
MOE = MoEConfig(16, 8, 8, 2, router=ROUTER, initializer_range=0.3, rounding=TokenRounding("stochastic", tile=16))
Plant = Callable[[Trainer, Windows], None]


def folder() -> Path:
    return Path(os.environ[FOLDER])


def recipe(name: str, steps: int = 1, **parallel: Any) -> Recipe:
    smoke = load_recipe("smoke")
    model = replace(
        smoke.model, vocab_size=256, hidden_size=16, num_layers=LAYERS, num_heads=2, num_kv_heads=1, head_dim=8,
        max_seq_len=LENGTH, moe=MOE,
    )  # fmt: skip
    settings = TrainConfig(
        steps=steps, accumulation=2, out_dir=str(folder() / name), precision="fp32", log_every=1, eval_every=0,
        save_every=0, plot=False, sample_tokens=0, selection_bias_rate=0.01,
    )  # fmt: skip
    data = DataConfig(LENGTH, 1, str(folder() / "corpus"), cache_dir=str(folder() / "cache"), heldout_every=4)
    shared = ParallelConfig(param_dtype=None, reduce_dtype=None, **{"expert": dist.get_world_size(), **parallel})
    return replace(smoke, model=model, data=data, train=settings, optim=OptimConfig(lr=0.01), parallel=shared)


@contextmanager
def windows_in_files(share: float) -> Iterator[None]:
    """Their capacity: a ``share`` of the pairs that a rank sends."""

    def make(transports: Transports, device: torch.device) -> Windows:
        of_group = folder() / f"windows of {dist.get_global_rank(transports.group, 0)}"
        of_group.mkdir(exist_ok=True)
        found = windows_of_files(transports, device, of_group)
        found._capacity = share
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "SLACK_ROWS", 0)
        patch.setattr(window, "_ROUNDED", 1)
        patch.setattr(Transports, "_make", make)
        patch.setattr(topk, "_check_values", lambda logits: None)
        yield


def shrink(windows: Windows, rows: int) -> None:
    """As if there had been room for so many rows from the start."""
    windows._limits, windows._capacity, windows._usual = windows._limits._replace(capacity=rows), 0.0, rows
    for layer in windows._layers:
        layer.rows = min(layer.rows, rows)
    if windows._window is not None:
        windows._open(windows._limits)


class Said(Reporter):
    """Keeps what is said beside the lines of steps."""

    def __init__(self) -> None:
        super().__init__(None, 1)
        self.lines: list[str] = []

    def update(self, *numbers: object) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)


def trained(made: Recipe, plant: Plant | None = None) -> tuple[Trainer, list[str]]:
    """A whole run; ``plant`` does something before the forwards of each step and evaluation."""
    job, said = Job(dist.get_rank(), dist.get_world_size()), Said()
    data = prepare_data(made.data, made.data.tokenizer)
    if job.is_first:
        made.train.out_path.mkdir()
    dist.barrier()
    torch.manual_seed(job.rank)
    model = build_shared_model(made, CPU, job)
    for index, bias in enumerate(buffer for name, buffer in model.named_buffers() if "selection_bias" in name):
        bias[: bias.shape[0] // 2] += index * 0.3  # the later a layer, the more come to the first ranks
    trainer = Trainer(made, model, data, CPU, job)
    windows = capacity_of(model, CPU)
    assert isinstance(windows, Windows)
    if plant is not None:
        for name in ("_gradients", "_evaluate"):
            before(trainer, name, lambda: plant(trainer, windows))
    metrics = MetricsWriter(made.train.out_path) if job.is_first else None
    trainer.fit(metrics, said, lambda: False)
    trainer.finish_save()
    if metrics is not None:
        metrics.close()
    return trainer, said.lines


def before(trainer: Trainer, name: str, happens: Callable[[], None]) -> None:
    real = getattr(trainer, name)

    def planted(*arguments: Any) -> Any:
        happens()
        return real(*arguments)

    setattr(trainer, name, planted)


def assert_same_run(one: Trainer, other: Trainer) -> None:
    assert_equal(whole_state((one.model, one.optimizer)), whole_state((other.model, other.optimizer)))
    assert one.step == other.step
    if dist.get_rank() == 0:
        left, right = (timeless(trainer.run_dir) for trainer in (one, other))
        assert left == right
        assert sum(record["kind"] == "eval" for record in left) == 1


def once(steps: set[int], does: Callable[[Windows], None]) -> Plant:
    """At the first attempt of what follows these steps."""
    left = set(steps)

    def plant(trainer: Trainer, windows: Windows) -> None:
        if trainer.step in left:
            left.remove(trainer.step)
            does(windows)

    return plant


def assert_repeated_run_is_the_same(name: str, steps: int, **parallel: Any) -> list[str]:
    """Room for few rows in the last step, in the first group of processes alone if there are more, and in the
    evaluation after it; that run alone learns what its layers need.
    """
    with windows_in_files(share=float(dist.get_world_size())):
        whole, nothing = trained(recipe(f"{name} whole", steps, **parallel))
        state = torch.get_rng_state()

        def does(windows: Windows) -> None:
            if dist.get_rank() < windows.ranks:
                shrink(windows, ROWS)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(room, "_STEPS", 1)
            repeated, lines = trained(recipe(f"{name} repeated", steps, **parallel), once({steps - 1, steps}, does))
    assert nothing == [line for line in lines if re.match(r"step \d/", line)]
    assert_same_run(whole, repeated)
    assert torch.equal(torch.get_rng_state(), state)
    return [line for line in lines if "repeated" in line]


def check_a_step_with_too_little_room_is_repeated() -> None:
    lines = assert_repeated_run_is_the_same("two", 1)
    assert re.fullmatch(r"step 1 is repeated: a process had no room for its \d+ rows in layer 0", lines[0])
    assert lines[-1].startswith("a batch of the evaluation after step 1 is repeated: ")
    if dist.get_rank() == 0:
        record = next(read_metrics(folder() / "two repeated" / "metrics.jsonl"))
        assert record["repeats"] == sum(line.startswith("step 1 ") for line in lines)
        rows = record["most_rows"]
        assert ROWS < rows <= record["capacity"] <= rows + rows // 8, "not what NaN would have needed"
        assert len(record["rank_load"]) == LAYERS
        assert 1 < max(record["rank_load"]) <= 2


def check_one_group_of_two_repeats_a_step_that_both_take() -> None:
    """Weights and gradients stay whole between micro-batches, and blocks are computed twice."""
    kept = {"between_micro_batches": "weights_and_gradients", "reshard_after_forward": False}
    lines = assert_repeated_run_is_the_same("four", 2, expert=2, checkpointing="block", **kept)
    assert re.search(r": a process had no room for its .* rows in layer 0$", lines[0])


def check_generation_says_that_rows_did_not_fit() -> None:
    made, prompt = recipe("generation"), torch.arange(8)[None]
    with windows_in_files(share=2.0):
        model = build_shared_model(made, CPU, Job(dist.get_rank(), dist.get_world_size()))
        expected = generate(model, prompt, 2, temperature=0.0)
        windows = capacity_of(model, CPU)
        assert isinstance(windows, Windows)
        rows = windows.rows
        shrink(windows, 1)
        with raises_one_line(r"a process would have received \d+ rows in layer 0, more than it has room for: .* NaN"):
            generate(model, prompt, 2)
        windows.grow(rows)
        assert windows.rows == rows
        grown = windows._window
        windows.grow(rows)
        assert windows._window is grown, "there is room for all"
        assert torch.equal(generate(model, prompt, 2, temperature=0.0), expected)


ON_TWO = [check_a_step_with_too_little_room_is_repeated, check_generation_says_that_rows_did_not_fit]
ON_FOUR = [check_one_group_of_two_repeats_a_step_that_both_take]

"""Reading ahead: the same batches in any order they are asked for, early, and none of it visible to a run."""

import io
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tilemoe.data import prepare
from tilemoe.data.sampler import Batch
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe
from tilemoe.train.loop import Trainer
from tilemoe.train.prefetch import AHEAD, Prefetcher
from tilemoe.train.progress import PlainReporter

CPU = torch.device("cpu")
PATIENCE = 20.0  # seconds, of a test that would otherwise hang


def trainer_of(recipe: Recipe) -> Trainer:
    data = prepare(recipe.data.corpus, "bytes", recipe.data.cache_path, recipe.data.heldout_every)
    return Trainer(recipe, build_model(recipe, CPU), data, CPU)


class Reader:
    """Batches that hold their index; remembers which were read, and by whom."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.arrived = threading.Condition()

    def __call__(self, index: int) -> Batch:
        with self.arrived:
            self.read.append(index)
            self.threads.add(threading.current_thread())
            self.arrived.notify_all()
        return np.full((2, 3), index), np.full((2, 3), -index)

    def wait_until(self, done: Callable[[], bool]) -> bool:
        with self.arrived:
            return self.arrived.wait_for(done, PATIENCE)


def test_the_next_ones_are_read_before_they_are_asked_for() -> None:
    reader = Reader()
    prefetcher = Prefetcher(reader, CPU)
    for index in range(7):
        inputs, targets = prefetcher.batch(index)
        assert (inputs == index).all()
        assert (targets == -index).all()
        assert inputs.dtype == targets.dtype == torch.int64
        assert reader.wait_until(lambda last=index + AHEAD: reader.read[-1] == last)
    assert reader.read == list(range(7 + AHEAD)), "each once, in order"
    assert len(reader.threads - {threading.current_thread()}) == 1


@pytest.mark.parametrize("order", [[5, 6, 7], [0, 1, 9, 10, 2, 3], [3, 3, 4, 3]])
def test_any_order(order: list[int]) -> None:
    prefetcher = Prefetcher(Reader(), CPU)
    assert [int(prefetcher.batch(index)[0][0, 0]) for index in order] == order


def test_an_error_comes_with_its_own_batch_and_again() -> None:
    def read(index: int) -> Batch:
        if index == 2:
            raise ValueError("shard gone")
        return np.full((1, 1), index), np.full((1, 1), index)

    prefetcher = Prefetcher(read, CPU)
    assert [int(prefetcher.batch(index)[0]) for index in (0, 1)] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="shard gone"):
            prefetcher.batch(2)
    assert int(prefetcher.batch(3)[0]) == 3


def test_what_is_forgotten_is_not_read_and_comes_when_it_is_asked_for() -> None:
    read: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(index: int) -> Batch:
        read.append(index)
        if index == 1:
            begun.set()
            assert go_on.wait(PATIENCE)
        return np.full((1, 1), index), np.full((1, 1), index)

    prefetcher = Prefetcher(slow, CPU)
    prefetcher.batch(0)
    assert begun.wait(PATIENCE)
    prefetcher.forget()
    go_on.set()
    assert int(prefetcher.batch(9)[0]) == 9
    assert read[:3] == [0, 1, 9]
    prefetcher.forget()
    assert int(prefetcher.batch(10)[0]) == 10


def test_nothing_is_left_to_be_read_after_a_run(moe_recipe: Recipe) -> None:
    trainer = trainer_of(moe_recipe)
    assert trainer.fit(None, PlainReporter(io.StringIO(), 1), lambda: trainer.step == 2) is None
    assert not trainer._prefetcher._ahead


def test_its_thread_ends_with_it() -> None:
    reader = Reader()
    prefetcher = Prefetcher(reader, CPU)
    prefetcher.batch(0)
    (thread,) = reader.threads
    assert thread.is_alive()
    del prefetcher
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_trainer_trains_on_what_the_sampler_gives(moe_recipe: Recipe) -> None:
    """Also after its step was set back, as loading a checkpoint does."""
    trainer = trainer_of(moe_recipe)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    trainer.model.register_forward_pre_hook(lambda module, args: seen.append(args))
    for step in (0, 1, 2, 1, 2, 3):
        trainer.step = step
        trainer.train_step()
        for got, expected in zip(seen.pop(), trainer.sampler.batch(step), strict=True):
            assert got.tolist() == expected.tolist()


@pytest.mark.gpu
def test_batches_are_pinned_and_land_on_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    prefetcher = Prefetcher(Reader(), device)
    inputs, targets = prefetcher.batch(3)
    assert inputs.device == targets.device == device
    assert (inputs == 3).all()
    assert all(tensor.is_pinned() for future in prefetcher._ahead for tensor in future.result())

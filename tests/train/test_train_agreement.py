"""Processes of a job that differ, in settings, text or folder, are found before the first step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_in_threads, write_corpus
from processes import run
from small_runs import changed
from test_train_distributed import written

from tilemoe.data import prepare
from tilemoe.files import sha256_file
from tilemoe.models import sums
from tilemoe.models.sums import file_entries
from tilemoe.train.config import Recipe
from tilemoe.train.job import collective
from tilemoe.train.job.collective import DisagreementError, entries_of_hosts, require_same
from tilemoe.train.job.processes import Job
from tilemoe.train.run import settings_of_process

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("forks")]


@pytest.fixture
def recipe(moe_recipe: Recipe) -> Recipe:
    """For a job of two processes."""
    return replace(moe_recipe, train=replace(moe_recipe.train, save_every=2, timeout=15))


@dataclass(frozen=True)
class Elsewhere:
    """Rank 1 is in another folder, where relative paths lead to other files, as on another host."""

    folder: Path
    rank: int = 1

    @contextmanager
    def planted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            yield


@pytest.mark.dist
@pytest.mark.parametrize("differs", ["data.batch_size", "train.out_dir"])
def test_a_job_that_differs_ends_before_the_first_step(
    recipe: Recipe, differs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, with which it would wait for the limit of time; a relative folder."""
    theirs = recipe
    if differs == "data.batch_size":
        theirs = replace(recipe, data=replace(recipe.data, batch_size=2))
    for name, each in (("0", recipe), ("1", theirs)):
        (tmp_path / name).mkdir()
        written(each, tmp_path / name, out_dir="run", timeout=3)
    monkeypatch.chdir(tmp_path / "0")
    ended = run(["train", "--recipe", "recipe.json"], 2, 0, Elsewhere(tmp_path / "1"), tmp_path)
    assert (ended.code, ended.left) == (1, [])
    assert "Traceback" not in ended.err.partition("tilemoe: error")[0]
    if differs == "data.batch_size":
        [line] = ended.lines
        assert line.startswith("tilemoe: error: rank 0 of 2: data.batch_size is 4 in rank 0 and 2 in rank 1;")
        assert "exitcode  : 2 " in ended.err
        assert not Path("run").exists()
        return
    assert ended.lines, ended.err
    for line in ended.lines:
        assert "train.out_dir run: rank 1 on " in line
        assert line.endswith(
            "does not see what rank 0 has written there; put it on a file system to which all hosts can write"
        )
    assert not any(Path("run").iterdir())


def of_ranks(settings: list[dict[str, Any]]) -> list[str]:
    """What each rank finds of settings that are theirs."""
    store, found = dist.HashStore(), [""] * len(settings)

    def run(rank: int) -> None:
        try:
            require_same(store, Job(rank, len(settings)), settings[rank])
        except DisagreementError as error:
            found[rank] = str(error)

    run_in_threads(*(lambda rank=rank: run(rank) for rank in range(len(settings))))
    return found


def test_a_host_s_processes_hash_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes on one host and two on another: all get the entries of all files, or all the same error."""
    hosts = {"a": (0, 1, 2), "b": (3, 4)}
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    for host in hosts:
        (tmp_path / host).mkdir()
        for name in "pqrst":
            (tmp_path / host / name).write_text(name)
    here, barrier, given = threading.local(), threading.Barrier(len(host_of)), dict[int, Any]()
    hashed: list[Path] = []

    def gathered(value: Any, job: Job) -> list[Any]:
        given[job.rank] = value
        barrier.wait(10)
        values = [given[rank] for rank in sorted(given)]
        barrier.wait(10)
        return values

    def found_by_all() -> list[Any]:
        found: dict[int, Any] = {}

        def run(rank: int) -> None:
            here.host = host_of[rank]
            try:
                found[rank] = entries_of_hosts(list((tmp_path / here.host).iterdir()), Job(rank, len(host_of)))
            except DisagreementError as error:
                found[rank] = str(error).rpartition("/")[2]

        run_in_threads(*(partial(run, rank) for rank in host_of))
        return [found[rank] for rank in host_of]

    monkeypatch.setattr(collective, "objects_of_processes", gathered)
    monkeypatch.setattr(collective.socket, "gethostname", lambda: here.host)
    entries = file_entries(tmp_path.glob("a/*"))
    monkeypatch.setattr(sums, "sha256_file", lambda path, piece: hashed.append(path) or sha256_file(path))
    assert found_by_all() == [entries] * 5
    assert sorted(hashed) == sorted(tmp_path.glob("*/*"))
    (tmp_path / "b" / "q").write_text("other")
    for change, rank in ((lambda: None, 4), ((tmp_path / "b" / "q").unlink, 3)):
        change()
        assert {line[3:] for line in found_by_all()} == {f"q differs on the host of rank {rank}; copy it again"}


def test_whatever_differs_is_named_in_all_processes(moe_recipe: Recipe, tmp_path: Path) -> None:
    def settings(recipe: Recipe, corpus: Path | None = None) -> dict[str, Any]:
        spec = recipe.data.corpus if corpus is None else str(corpus)
        data = prepare(spec, "bytes", recipe.data.cache_path, recipe.data.heldout_every)
        there = replace(recipe, data=replace(recipe.data, corpus=spec))
        return settings_of_process(there, None, None, data, torch.device("cpu"))

    ours = settings(moe_recipe)
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    copied, other = (write_corpus(tmp_path / name, seed) for name, seed in (("same", 0), ("other", 1)))
    assert of_ranks([ours, ours, settings(moe_recipe, copied)]) == [""] * 3, "only the place of the text differs"
    for theirs, message in (
        (settings(changed(moe_recipe, train__seed=7)), "train.seed is 0 in rank 0 and 7 in"),
        (
            settings(changed(moe_recipe, model__moe__intermediate_size=24)),
            "model.moe.intermediate_size is 16 in rank 0 and 24 in rank 2",
        ),
        (settings(moe_recipe, other), "the digest of data.corpus is '"),
        (ours | {"tilemoe": "0.0.1"}, "tilemoe is '0.1.0, source "),
        (
            ours | {"the checkpoint to go on from": "step_00000004"},
            "the checkpoint to go on from is None in rank 0 and",
        ),
    ):
        found = of_ranks([ours, ours, theirs])
        assert found[0].startswith(message), found
        assert "in rank 2; start all" in found[0]
        assert len(set(found)) == 1, "all say the same"

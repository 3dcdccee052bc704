"""A job whose processes wait for each other in vain: each says in one line why, or which is where, in which collective.

Jobs are copies of this process under torchrun's agent, to one of which something happens in the second step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from file_window import windows_of_files
from filesystem import ALL
from processes import Ended, place_of, run
from writes import little

from tilemoe.config import ParallelConfig, to_dict
from tilemoe.dispatch import collective
from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.dispatch.choose import Transports
from tilemoe.kernels.expert_parallel import triton_window
from tilemoe.ops import experts
from tilemoe.routing import topk
from tilemoe.train.job.watch import GO_ON

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("interpreter")]
LAYERS, TIMEOUT_S = 3, 4
LIMIT = f"no process has advanced within train.timeout ({TIMEOUT_S} s)"
SECONDS = 30  # in which all have ended whom nothing keeps; train.timeout is longer there
Plant = Callable[[Any, str, Callable[..., Any]], None]
HIT = LAYERS + 2  # of the calls that each layer makes once in a step: that of blocks.1 in the second


@pytest.fixture
def go(corpus: Path, tmp_path: Path) -> Callable[..., Ended]:
    """A job of two processes or more, with the experts divided or not, that has four steps to go."""

    def job(expert: int = 2, timeout: int = TIMEOUT_S) -> Ended:
        base = little("bytes", corpus)
        assert base.model.moe is not None
        moe = replace(base.model.moe, num_experts=8, router=replace(base.model.moe.router, aux_loss_coef=0.1))
        settings = replace(
            base.train, steps=4, save_every=0, eval_every=0, plot=False, tensorboard=False, sample_tokens=0,
            precision="fp32", device="cpu", threads=1, timeout=timeout, out_dir=str(tmp_path / "run"),
        )  # fmt: skip
        data = replace(base.data, heldout_every=40, batch_size=2, cache_dir=str(tmp_path / "cache"))
        model = replace(base.model, num_layers=LAYERS, moe=moe)
        recipe = replace(base, model=model, data=data, train=settings, parallel=ParallelConfig(expert=expert))
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps(to_dict(recipe)))
        return run(["train", "--recipe", path], max(expert, 2), 0, None, tmp_path)

    return job


@pytest.fixture
def happens(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """In rank 1 a function, which each layer calls once in a step, is another one in blocks.1 in the second step."""

    def plant(owner: Any, name: str, instead: Callable[..., Any]) -> None:
        real, calls = getattr(owner, name), 0

        def function(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            is_hit = calls == HIT and os.environ["RANK"] == "1"
            return (instead if is_hit else real)(*arguments, **options)

        monkeypatch.setattr(owner, name, function)

    return plant


def some(cases: dict[str, tuple[Any, ...]]) -> list[Any]:
    """All, or every second of the selection."""
    return [pytest.param(*case, id=name) for name, case in [*cases.items()][:: 1 if ALL else 2]]


def told(line: str) -> list[str]:
    """What both processes say."""
    return [f"tilemoe: error: rank {rank} of 2: {line}; {GO_ON}" for rank in (0, 1)]


def hang(*arguments: Any, **options: Any) -> None:
    time.sleep(600)


LEFT_OUT = (topk, "sum_over_ranks", lambda counts, group: counts)  # the collective of an auxiliary loss
WAITS = {
    "auxiliary loss-experts divided": (
        *LEFT_OUT, 2, "rank 0 is in blocks.1.mlp, in all_reduce; rank 1 is in blocks.1.mlp.experts, in all_gather",
    ),
    "auxiliary loss-experts whole": (
        *LEFT_OUT, 1, "rank 0 is in blocks.1.mlp, in all_reduce; rank 1 is in blocks.2, in all_gather",
    ),
    "hangs-in the backward": (
        experts, "down_proj_dgrad_dact", hang, 2,
        "rank 0 is in the backward, in all_to_all; rank 1 is in the backward",
    ),
    "hangs-before an exchange": (
        AllToAllDispatcher, "combine", hang, 2,
        "rank 0 is in blocks.1.mlp.experts, in all_to_all; rank 1 is in blocks.1.mlp.experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "instead", "expert", "places"), some(WAITS))
def test_who_waits_where(
    owner: Any,
    name: str,
    instead: Callable[..., Any],
    expert: int,
    places: str,
    go: Callable[..., Ended],
    happens: Plant,
) -> None:
    happens(owner, name, instead)
    ended = go(expert)
    assert sorted(ended.lines) == told(f"ranks 0, 1 hang in step 2: {LIMIT}; {places}"), ended.err
    assert (ended.code, ended.left) == (1, [])


MOMENTS = {"out of memory-tokens there": ("plan_of",), "out of memory-sizes under way": ("all_gather",)}


@pytest.mark.parametrize("name", some(MOMENTS))
def test_one_process_out_of_memory_in_dispatch(
    name: str, go: Callable[..., Ended], happens: Plant, tmp_path: Path
) -> None:
    """The others, which wait for its tokens, are told; nobody waits for the limit."""
    full = "CUDA out of memory. Tried to allocate 2.00 GiB"

    def fails(*arguments: Any, **options: Any) -> None:
        (tmp_path / "reached").touch()
        raise torch.OutOfMemoryError(full)

    happens(collective, name, fails)
    ended = go(timeout=80)
    assert sorted(ended.lines) == [
        f"tilemoe: error: rank 0 of 2: rank 1 failed: {full}; {GO_ON}",
        f"tilemoe: error: rank 1 of 2: out of memory; lower data.batch_size or data.seq_len ({full})",
    ], ended.err
    assert (ended.code, ended.left) == (1, [])
    assert time.time() - (tmp_path / "reached").stat().st_mtime < SECONDS


@pytest.mark.parametrize(
    "place",
    some({"SIGTERM-while it asks why": ("train.job.watch:Watch.verdict",), "SIGTERM-later": ("cli.main:one_line",)}),
)
def test_a_process_that_fails_says_why_though_torchrun_ends_it(
    place: str, go: Callable[..., Ended], happens: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sends SIGTERM when rank 1 has ended, which is when rank 0 finds out."""

    def fails(*arguments: Any) -> None:
        raise ValueError("made up")

    def signalled(*arguments: Any) -> Any:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    happens(AllToAllDispatcher, "combine", fails)
    owner, name = place_of(place)
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, signalled)
    ended = go(timeout=80)
    lines = [f"rank 0 of 2: rank 1 failed: made up; {GO_ON}", "rank 1 of 2: made up"]
    assert sorted(ended.lines) == [f"tilemoe: error: {line}" for line in lines], ended.err


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens cross by windows, which wait for the other ranks' flags without a limit of their own: those of files."""
    monkeypatch.setattr(Transports, "_make", partialmethod(windows_of_files, folder=tmp_path))
    interpreter.improve()


@pytest.mark.thorough
@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("ends", [True, False], ids=["window-peer killed", "window-peer hangs"])
def test_who_waits_for_a_flag_that_nobody_sets(
    ends: bool, go: Callable[..., Ended], happens: Plant, tmp_path: Path
) -> None:
    def comes_not(*arguments: Any) -> None:
        (tmp_path / "reached").touch()
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        hang()

    happens(AllToAllDispatcher, "combine", comes_not)
    ended = go(timeout=80 if ends else TIMEOUT_S)
    places = "rank 0 is in blocks.1.mlp.experts; rank 1 is in blocks.1.mlp.experts"
    gone = "rank 1 is gone: it was killed or it crashed, torchrun's report says how"
    expected = told(gone)[:1] if ends else told(f"ranks 0, 1 hang in step 2: {LIMIT}; {places}")
    assert sorted(ended.lines) == expected, ended.err
    assert (ended.code, ended.left) == (1, [])
    assert time.time() - (tmp_path / "reached").stat().st_mtime < SECONDS


# Before which launch of a kernel a process dies, in the first step; the forward has two exchanges in each layer.
PHASES = {
    "enter": ("enter_kernel", 2),
    "put": ("put_kernel", 3),
    "agree": ("agree_kernel", 2),
    "receive": ("receive_kernel", 2),
    "pull": ("pull_rows_kernel", 2),
    "combine": ("pull_sums_kernel", 2),
    "backward-put": ("put_kernel", 2 * LAYERS + 1),
    "backward-pull": ("pull_rows_kernel", LAYERS + 2),
    "backward-scores": ("pull_scores_kernel", 1),
}


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize(
    ("kernel", "launch"),
    [
        pytest.param(*phase, id=name, marks=() if name == "backward-pull" else pytest.mark.thorough)
        for name, phase in PHASES.items()
    ],
)
def test_a_process_dies_in_an_exchange(
    kernel: str, launch: int, go: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four; each of the others ends within seconds, with one line or by torchrun's signal."""
    real, launches = triton_window.launch_of, 0

    def launch_of(which: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal launches
        launches += which is getattr(triton_window, kernel)
        if launches == launch and os.environ["RANK"] == "1":
            (tmp_path / "reached").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(which, *arguments, **options)

    monkeypatch.setattr(triton_window, "launch_of", launch_of)
    ended = go(expert=4, timeout=80)
    gone = f"rank 1 is gone: it was killed or it crashed, torchrun's report says how; {GO_ON}"
    assert ended.lines, ended.err
    assert {*ended.lines} <= {f"tilemoe: error: rank {rank} of 4: {gone}" for rank in (0, 2, 3)}, ended.err
    assert len({*ended.lines}) == len(ended.lines)
    assert (ended.code, ended.left) == (1, [])
    assert time.time() - (tmp_path / "reached").stat().st_mtime < SECONDS

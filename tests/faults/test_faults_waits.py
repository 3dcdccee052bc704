"""A job whose processes wait for each other in vain: each says in one line why, or which is where, in which collective.

Jobs are copies of this process under torchrun's agent, to one of which something happens in the second step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ended, run
from writes import little

from tilemoe.config import ParallelConfig, to_dict
from tilemoe.dispatch import exchange
from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.ops import experts
from tilemoe.routing import topk

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, TIMEOUT_S = 3, 4
HIT = LAYERS + 2  # of the calls that each layer makes once in a step: that of blocks.1 in the second


@pytest.fixture
def go(corpus: Path, tmp_path: Path) -> Callable[..., Ended]:
    """A job of two processes, with the experts divided or not, that has four steps to go."""

    def job(expert: int = 2, timeout: int = TIMEOUT_S) -> Ended:
        base = little("bytes", corpus)
        assert base.model.moe is not None
        moe = replace(base.model.moe, router=replace(base.model.moe.router, aux_loss_coef=0.1))
        settings = replace(
            base.train, steps=4, save_every=0, eval_every=0, plot=False, tensorboard=False, sample_tokens=0,
            precision="fp32", device="cpu", threads=1, timeout=timeout, out_dir=str(tmp_path / "run"),
        )  # fmt: skip
        data = replace(base.data, heldout_every=40, batch_size=2, cache_dir=str(tmp_path / "cache"))
        model = replace(base.model, num_layers=LAYERS, moe=moe)
        recipe = replace(base, model=model, data=data, train=settings, parallel=ParallelConfig(expert=expert))
        path = tmp_path / "recipe.json"
        path.write_text(json.dumps(to_dict(recipe)))
        return run(["train", "--recipe", path], 2, 0, None, tmp_path)

    return job


@pytest.fixture
def happens(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Callable[..., Any]], None]:
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


def hang(*arguments: Any, **options: Any) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("place", "instead", "expert", "expected"),
    [
        pytest.param(
            (topk, "sum_over_ranks"), lambda counts, group: counts, 2,
            "ranks 0, 1 hang in step 2: {limit}; rank 0 is in blocks.1.mlp, in all_reduce; "
            "rank 1 is in blocks.1.mlp.experts, in all_gather",
            id="auxiliary loss-experts divided",
        ),
        pytest.param(
            (topk, "sum_over_ranks"), lambda counts, group: counts, 1,
            "ranks 0, 1 hang in step 2: {limit}; rank 0 is in blocks.1.mlp, in all_reduce; "
            "rank 1 is in blocks.2, in all_gather",
            id="auxiliary loss-experts whole",
        ),
        pytest.param(
            (AllToAllDispatcher, "combine"), hang, 2,
            "ranks 0, 1 hang in step 2: {limit}; rank 0 is in blocks.1.mlp.experts, in all_to_all; "
            "rank 1 is in blocks.1.mlp.experts",
            id="combine-hangs",
        ),
        pytest.param(
            (experts, "down_proj_dgrad_dact"), hang, 2,
            "ranks 0, 1 hang in step 2: {limit}; rank 0 is in the backward, in all_to_all; rank 1 is in the backward",
            id="backward-hangs",
        ),
    ],
)  # fmt: skip
def test_who_waits_where(
    place: tuple[Any, str],
    instead: Callable[..., Any],
    expert: int,
    expected: str,
    go: Callable[..., Ended],
    happens: Callable[[Any, str, Callable[..., Any]], None],
) -> None:
    happens(*place, instead)
    ended = go(expert)
    limit = f"no process has moved within train.timeout ({TIMEOUT_S} s)"
    line = f"{expected.format(limit=limit)}; go on from the last checkpoint with --resume auto"
    assert sorted(ended.lines) == [f"tilemoe: error: rank {rank} of 2: {line}" for rank in (0, 1)], ended.err
    assert (ended.code, ended.left) == (1, [])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("place_sent", id="out of memory-sizes under way"),
        pytest.param("plan_received", id="out of memory-tokens under way"),
    ],
)
def test_one_process_out_of_memory_in_dispatch(
    name: str, go: Callable[..., Ended], happens: Callable[[Any, str, Callable[..., Any]], None], tmp_path: Path
) -> None:
    """The others, which wait for its tokens, are told; nobody waits for the limit."""
    full = "CUDA out of memory. Tried to allocate 2.00 GiB"

    def fails(*arguments: Any) -> None:
        (tmp_path / "reached").touch()
        raise torch.OutOfMemoryError(full)

    happens(exchange, name, fails)
    ended = go(timeout=80)
    seconds = time.time() - (tmp_path / "reached").stat().st_mtime
    assert sorted(ended.lines) == [
        f"tilemoe: error: rank 0 of 2: rank 1 failed: {full}; go on from the last checkpoint with --resume auto",
        f"tilemoe: error: rank 1 of 2: out of memory; lower data.batch_size or data.seq_len ({full})",
    ], ended.err
    assert (ended.code, ended.left) == (1, [])
    assert seconds < 20

"""Which transport a group gets, and how many rows a way counts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tilemoe.dispatch import symmetric
from tilemoe.dispatch.choose import Transports
from tilemoe.dispatch.pull import Pull
from tilemoe.dispatch.symmetric import why_unsupported
from tilemoe.dispatch.transport import Collective, Way

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BETWEEN = ((0, 5, 2), (7, 0, 1), (3, 4, 0))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of one process, which is enough to ask for a transport."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def see_gpus(patch: pytest.MonkeyPatch, count: int, *, peers: bool = True) -> None:
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
    patch.setattr(torch.version, "hip", None)


def test_ways() -> None:
    way = Way(BETWEEN, here=1, own=6)
    assert (way.out, way.into, way.first_there, way.most_out) == ([7, 0, 1], [5, 0, 4], [0, 7, 3], 8)
    back = way.back()
    assert (back.out, back.into, back.first_there, back.most_out) == ([5, 0, 4], [7, 0, 1], [0, 5, 2], 10)
    assert (back.own, back.here, back.back()) == (6, 1, way)


def test_without_gpus_the_collective(group: dist.ProcessGroup) -> None:
    transports = Transports(group)
    assert isinstance(transports.of(CPU), Collective)
    assert transports.of(CPU) is transports.of(CPU), "made once"
    with pytest.raises(ValueError, match=r"exchange='symmetric': symmetric memory needs NVIDIA GPUs; pass 'auto' or"):
        Transports(group, "symmetric").of(CPU)


def test_an_unknown_one(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="exchange must be one of auto, collective, symmetric; got 'nccl'"):
        Transports(group, "nccl")


@pytest.mark.parametrize(
    ("gpus", "peers", "word"), [(0, True, "see the GPUs of all ranks"), (2, False, "read each other's memory")]
)
def test_reasons_against_symmetric_memory(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, gpus: int, peers: bool, word: str
) -> None:
    see_gpus(monkeypatch, gpus, peers=peers)
    assert word in (why_unsupported(group, GPU) or "")
    assert isinstance(Transports(group).of(GPU), Collective)
    with pytest.raises(ValueError, match="exchange='symmetric'"):
        Transports(group, "symmetric").of(GPU)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ([("here", None)], None),
        ([("there", None)], "symmetric memory needs all ranks on one host"),
        ([("here", "only I see why")], "only I see why"),
    ],
)
def test_all_ranks_get_one_answer(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, others: list[Any], reason: str | None
) -> None:
    see_gpus(monkeypatch, 2)
    monkeypatch.setattr(symmetric.socket, "gethostname", lambda: "here")
    for told in (lambda mine: [mine, *others], lambda mine: [*others, mine]):
        monkeypatch.setattr(symmetric, "_told", lambda group, mine, told=told: told(mine))
        assert why_unsupported(group, GPU) == reason


def test_symmetric_memory_where_it_is_possible(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2)
    assert isinstance(Transports(group).of(GPU), Pull)
    assert isinstance(Transports(group, "symmetric").of(GPU), Pull)
    assert isinstance(Transports(group, "collective").of(GPU), Collective)

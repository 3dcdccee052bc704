"""Which transport a group gets, and what a window has room for. Windows at work: window_checks.py."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from tilemoe.dispatch import window
from tilemoe.dispatch.base import LayerRoom
from tilemoe.dispatch.choose import Transports
from tilemoe.dispatch.collective import Collective
from tilemoe.dispatch.window import Windows, symmetric_memory, why_unsupported
from tilemoe.kernels.expert_parallel.triton_window import HEADER_BYTES, MAX_RANKS, Limits, layout_of, most_received
from tilemoe.ops.window import OpenWindow

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    patch.setattr("tilemoe.runtime.device.why_no_triton", lambda device: None)


def test_without_gpus_the_collective(group: dist.ProcessGroup) -> None:
    transports = Transports(group)
    assert isinstance(transports.of(CPU), Collective)
    assert transports.of(CPU) is transports.of(CPU), "made once"
    with pytest.raises(ValueError, match=r"exchange='symmetric': symmetric memory needs NVIDIA GPUs; pass 'auto' or"):
        Transports(group, "symmetric").of(CPU)


@pytest.mark.parametrize(
    ("gpus", "peers", "ranks", "word"),
    [
        (0, True, 1, "see the GPUs of all ranks"),
        (2, False, 1, "read each other's memory"),
        (32, True, MAX_RANKS + 1, f"more than {MAX_RANKS} ranks"),
    ],
)
def test_reasons_against_symmetric_memory(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, gpus: int, peers: bool, ranks: int, word: str
) -> None:
    see_gpus(monkeypatch, gpus, peers=peers)
    monkeypatch.setattr(window, "all_gather_object", lambda group, mine: [mine])
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
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
    monkeypatch.setattr(window.socket, "gethostname", lambda: "here")
    for told in (lambda mine: [mine, *others], lambda mine: [*others, mine]):
        monkeypatch.setattr(window, "all_gather_object", lambda group, mine, told=told: told(mine))
        assert why_unsupported(group, GPU) == reason


def test_symmetric_memory_where_it_is_possible(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2)
    assert isinstance(Transports(group).of(GPU), Windows)
    assert isinstance(Transports(group, "symmetric").of(GPU), Windows)
    assert isinstance(Transports(group, "collective").of(GPU), Collective)


def test_the_regions_of_a_window() -> None:
    """One after the other, on boundaries of 128 bytes, each with room for the most there can be."""
    limits, ranks = Limits(tokens=300, pairs=2400, capacity=3600, score_words=2, row_bytes=1028), 3
    layout = layout_of(limits, ranks)
    sizes = [
        4 * (2 * ranks + 2), 4 * ranks * 300, 4 * 2400 * 3, 300 * 1028, 8 * 3600,
        most_received(limits, ranks, 3600) * 1028,
    ]  # fmt: skip
    assert layout.sizes >= HEADER_BYTES
    assert not any(begin % 128 for begin in layout)
    assert all(0 <= end - begin - size < 128 for (begin, end), size in zip(pairwise(layout), sizes, strict=True))
    assert most_received(limits, ranks, 3600) == 900, "each token once"
    assert most_received(limits, ranks, 700) == 700, "none without a pair"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the memory that windows of this process, rank 0 of three, have taken."""
    monkeypatch.setattr(window.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(window.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(window, "all_gather_object", lambda group, mine: [mine, (1000, 8000, 0, 1, 2048), mine])
    return []


def windows(opened: list[int], **options: Any) -> Windows:
    def allocate(group: Any, device: torch.device, size: int) -> window.Memory:
        opened.append(size)
        return (torch.empty(0), None), [0, 0, 0]

    layers = [LayerRoom(), LayerRoom()]
    return Windows(SimpleNamespace(group_name="three"), CPU, layers, allocate, **options)  # type: ignore[arg-type]


def test_what_a_window_has_room_for(opened: list[int]) -> None:
    """For the largest batch of any rank so far, and for pairs by ``capacity``, or as many as were asked for."""
    own = windows(opened, capacity=1.25)
    limits = own.with_room(300, 2400, 1, 512).view.limits
    assert limits == (1280, 10112, 13568, 1, 2048), "a quarter more tokens, and of pairs what capacity says and slack"
    assert own.with_room(1280, 10000, 1, 2048).view.limits is limits
    wider = own.with_room(300, 2400, 2, 4096).view.limits
    assert wider[3:] == (2, 4096)
    own.grow(24000)
    assert own.rows == 27008, "an eighth more"
    own.grow(10**6)
    every = own.with_room(1, 8, 1, 512).view
    assert own.rows >= 3 * every.limits.pairs, "all of all ranks"
    own.grow(10**6)
    assert opened == sorted(opened)
    assert len(opened) == 4
    assert opened[-1] == every.layout.bytes
    assert windows([], max_tokens=5000).with_room(300, 2400, 1, 512).view.limits.tokens == 5120


def test_what_a_layer_has_room_for(opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A share more than it received, on a grid of 1/128 of the pairs; in a window that only `learn` widens."""
    own = windows(opened, capacity=1.25)
    own.with_room(300, 2400, 1, 512)
    first, other = own._layers
    assert (first.rows, int(first.index)) == (own.rows, 0) == (13568, 0), "nothing is known"
    own.learn([8000, 0], most=9000)
    assert [first.rows, other.rows] == [8320, 1], "8,200, of the grid of 128; an empty layer has room, too"
    own.grow(8400, layer=0)
    assert [first.rows, other.rows, len(opened)] == [9472, 1, 1], "an eighth more, in that layer alone"
    own.learn([20000, 10], most=22000)
    assert [first.rows, other.rows, own.rows, len(opened)] == [20608, 128, 22656, 2]
    own.learn([10**6, 10], most=10**6)
    assert first.rows == own.rows == 3 * 10112, "all of all ranks"
    own.forget()
    assert [first.rows, other.rows] == [3 * 10112, 13568]
    monkeypatch.setattr(window, "all_gather_object", lambda group, mine: [mine, (2000, 16000, 0, 1, 2048), mine])
    own.with_room(300, 2400, 1, 4096)
    assert first.rows == other.rows == own._usual > 13568, "what layers received of fewer tokens says nothing"


def test_an_exchange_on_another_stream_follows_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """But in the capture of a graph, which could not wait for it."""
    waits: list[tuple[str, str]] = []

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            waits.append((self, other))

    view = SimpleNamespace(state=SimpleNamespace(is_cuda=True, device=GPU))
    opened = OpenWindow("planted", view, None)  # type: ignore[arg-type]
    assert not opened.is_captured
    for stream, captures in (("a", False), ("a", False), ("b", False), ("c", True), ("b", False), ("a", False)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: Stream(stream))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        opened.follow()
    assert waits == [("b", "a"), ("a", "b")]
    assert opened.is_captured


def test_a_window_lives_as_long_as_graphs_may_read_it(opened: list[int]) -> None:
    own = windows(opened)
    for is_captured in (False, True):
        first = own.with_room(300, 2400, 1, 512)
        first.is_captured, known = is_captured, ref(first)
        del first
        own.grow(own.rows + 1)
        assert (known() is not None) == is_captured


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks say which of them has none, and what to do; also those that have."""
    import torch.distributed._symmetric_memory as symm_mem

    text = "expert-parallel rank 2 cannot allocate 4096 bytes .*: CUDA driver error; take smaller batches, or"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(symm_mem, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(window, "all_gather_object", lambda group, mine: [None, mine, "CUDA driver error"])
    with pytest.raises(RuntimeError, match=text):
        symmetric_memory(None, GPU, 4096)  # type: ignore[arg-type]

    def refuse(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA driver error\nand much more")

    monkeypatch.setattr(symm_mem, "empty", refuse)
    monkeypatch.setattr(window, "all_gather_object", lambda group, mine: [None, None, mine])
    with pytest.raises(RuntimeError, match=text):
        symmetric_memory(None, GPU, 4096)  # type: ignore[arg-type]

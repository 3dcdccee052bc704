"""Which transport a group gets, how many rows a way counts, and what a window in symmetric memory asks of CUDA."""

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tilemoe.dispatch import symmetric
from tilemoe.dispatch.choose import Transports
from tilemoe.dispatch.symmetric import Pull, why_unsupported
from tilemoe.dispatch.transport import Collective, Way

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


def test_without_gpus_the_collective(group: dist.ProcessGroup) -> None:
    transports = Transports(group)
    assert isinstance(transports.of(CPU), Collective)
    assert transports.of(CPU) is transports.of(CPU), "made once"
    with pytest.raises(ValueError, match=r"exchange='symmetric': symmetric memory needs NVIDIA GPUs; pass 'auto' or"):
        Transports(group, "symmetric").of(CPU)


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
        monkeypatch.setattr(symmetric, "_all_gather_object", lambda group, mine, told=told: told(mine))
        assert why_unsupported(group, GPU) == reason


def test_symmetric_memory_where_it_is_possible(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2)
    assert isinstance(Transports(group).of(GPU), Pull)
    assert isinstance(Transports(group, "symmetric").of(GPU), Pull)
    assert isinstance(Transports(group, "collective").of(GPU), Collective)


RANKS, HERE, BASE = 3, 1, 1 << 40
SECOND_GPU = torch.device("cuda", 1)
SLOT = 1 << 21


class Cuda:
    """Streams and events that note who waits for what, and the driver's three calls."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.caller = self.stream("caller")
        self.copies = self.stream("copies")

    def stream(self, name: str) -> Any:
        stream = SimpleNamespace(cuda_stream=name, name=name)
        stream.wait_event = lambda event: self.log.append(("waits", name, event.of))
        stream.record_event = lambda: SimpleNamespace(of=name)
        return stream

    def event(self) -> Any:
        event = SimpleNamespace(of="nobody")
        event.record = lambda stream: setattr(event, "of", stream.name)
        return event

    def copy(self, target: int, source: int, size: int, stream: str) -> None:
        self.log.append(("copies", stream, target, source, size))

    def write(self, stream: str, address: int, value: int) -> None:
        self.log.append(("writes", stream, address, value))

    def wait(self, stream: str, address: int, value: int) -> None:
        self.log.append(("awaits", stream, address, value))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    functions = {
        "current_stream": lambda device: {SECOND_GPU: cuda.caller}[device], "Event": cuda.event,
        "empty_cache": lambda: None, "synchronize": lambda device: cuda.log.append(("synchronize",)),
        "device": lambda device: nullcontext(),
    }  # fmt: skip
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(symmetric, "_copying_stream", lambda device: cuda.copies)
    monkeypatch.setattr(symmetric, "_driver", lambda: cuda)
    monkeypatch.setattr(symmetric, "_all_gather_object", lambda group, mine: [mine] * RANKS)
    monkeypatch.setattr(symmetric.dist, "get_rank", lambda group: HERE)
    monkeypatch.setattr(symmetric.dist, "get_world_size", lambda group: RANKS)
    monkeypatch.setattr(symmetric.dist, "barrier", lambda group: cuda.log.append(("barrier",)))
    monkeypatch.setattr(symmetric.symm_mem, "empty", lambda size, dtype, device: torch.full((size,), 7, dtype=dtype))
    handle = SimpleNamespace(buffer_ptrs=[BASE * (1 + rank) for rank in range(RANKS)])
    monkeypatch.setattr(symmetric.symm_mem, "rendezvous", lambda memory, group: handle)
    return cuda


def transport() -> Pull:
    return Pull(HERE, RANKS, lambda slot_bytes: symmetric.SymmetricWindow(None, SECOND_GPU, slot_bytes))  # type: ignore[arg-type]


def flag(of_rank: int, from_rank: int) -> int:
    return BASE * (1 + of_rank) + 2 * SLOT + 4 * from_rank


def test_an_exchange(cuda: Cuda) -> None:
    """In order: after the caller's work, laid, told, all awaited, fetched; the caller waits for the copies."""
    way = Way(((0, 3, 1), (2, 0, 4), (5, 6, 0)), HERE, 0)
    leaving, arriving = torch.zeros(6, 10), torch.zeros(9, 10)
    pull = transport()
    for turn in (1, 2, 3):
        arrival = pull.send(leaving, arriving, way)
        if turn == 1:  # the window was made: flags are 0 before anyone may tell
            assert cuda.log[:3] == [("synchronize",), ("barrier",), ("synchronize",)]
            del cuda.log[:3]
        slot = turn % 2 * SLOT
        assert cuda.log == [
            ("waits", "copies", "caller"),
            ("copies", "copies", 2 * BASE + slot, leaving.data_ptr(), 240),
            ("writes", "copies", flag(0, HERE), turn),
            ("writes", "copies", flag(2, HERE), turn),
            ("awaits", "copies", flag(HERE, 0), turn),
            ("awaits", "copies", flag(HERE, 2), turn),
            ("copies", "copies", arriving.data_ptr() + 120, 3 * BASE + slot + 5 * 40, 240),
            ("copies", "copies", arriving.data_ptr(), BASE + slot, 120),
        ]
        cuda.log.clear()
        arrival.wait()
        assert cuda.log == [("waits", "caller", "copies")]
        del arrival
        assert len(cuda.log) == 1, "it was awaited"
        cuda.log.clear()


def test_how_much_memory_windows_take(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator does not count it: 2.5 to 3 times the most bytes that a rank sends at once, one window alone,
    that before given back first. A slot's size is a multiple of 2 MiB.
    """
    taken: list[weakref.ref[torch.Tensor]] = []
    real = symmetric._memory_of_all

    def memory_of_all(*arguments: Any) -> torch.Tensor:
        assert all(memory() is None for memory in taken)
        memory = real(*arguments)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(symmetric, "_memory_of_all", memory_of_all)
    pull, most, before = transport(), 0, 0
    for rows in (1, 7, 900, 901, 800, 1200, 5000, 5200, 4, 9000):
        way = Way(((0, rows, 0), (1, 0, 0), (0, 0, 0)), HERE, 0)  # another rank sends the most
        pull.send(torch.zeros(1, 1 << 10), torch.zeros(rows, 1 << 10), way).wait()
        most = max(most, rows << 12)
        size = taken[-1]().nbytes  # type: ignore[union-attr]
        assert 2 * most <= size <= 3 * most + 2 * SLOT + 4 * RANKS
        assert len(taken) == before or size >= 2.5 * most
        before = len(taken)
    assert 3 < len(taken) < 10, "it grew, but not with each batch"


def test_no_room(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks say which of them has none, and what to do; also those that have."""
    text = "rank 2 of those that share experts has no 4194316 bytes .*: CUDA driver error; take smaller batches, or"
    monkeypatch.setattr(symmetric, "_all_gather_object", lambda group, mine: [None, mine, "CUDA driver error"])
    with pytest.raises(RuntimeError, match=text):
        symmetric.SymmetricWindow(None, SECOND_GPU, SLOT)  # type: ignore[arg-type]

    def refuse(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA driver error\nand much more")

    monkeypatch.setattr(symmetric.symm_mem, "empty", refuse)
    monkeypatch.setattr(symmetric, "_all_gather_object", lambda group, mine: [None, None, mine])
    with pytest.raises(RuntimeError, match=text):
        symmetric.SymmetricWindow(None, SECOND_GPU, SLOT)  # type: ignore[arg-type]

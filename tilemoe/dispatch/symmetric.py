"""The transport through symmetric memory: each rank writes its rows to memory that all ranks read, and reads theirs.

W ranks · a window is memory of every rank that all of a group can read, with two slots for rows, used in turn

One exchange: a rank copies what it sends into its slot, sets its flags, waits until all ranks have set theirs, and
copies its rows from every other rank's slot. It may write a slot again two exchanges later: a rank that has set its
flags for the exchange in between has, by the order of its own work, fetched its rows from the slot before.

Copy engines move the rows, and stream operations make ranks wait for each other: neither takes a multiprocessor. NCCL's
kernels do, and wait for one while a persistent GEMM holds all of them.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from tilemoe.dispatch.transport import Arrival, Way

SLOTS = 2
_ROOM = 1 << 21  # bytes: a slot's size is a multiple
T = TypeVar("T")
_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_FLAG_BYTES = 4


def why_unsupported(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the group's ranks cannot exchange rows like this, in a few words; None if they can.

    All ranks must call it. Each tells the others what it sees, so all get the same answer.
    """
    found = _all_gather_object(group, (socket.gethostname(), _why_unsupported_here(group, device)))
    if len({host for host, _ in found}) > 1:
        return "symmetric memory needs all ranks on one host"
    return next((reason for _, reason in found if reason is not None), None)


def _why_unsupported_here(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return "symmetric memory needs NVIDIA GPUs"
    gpus = range(torch.cuda.device_count())
    if len(gpus) < dist.get_world_size(group):
        return "symmetric memory needs every process to see the GPUs of all ranks"
    if not all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b):
        return "symmetric memory needs GPUs that read each other's memory"
    return None


def _all_gather_object(group: dist.ProcessGroup, mine: T) -> list[T]:
    """All-gather of an object: each rank's, in rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


class Pull:
    """The `Transport` over a window from ``open_window(slot_bytes)``; a larger one replaces it when rows outgrow it."""

    def __init__(self, here: int, ranks: int, open_window: Callable[[int], SymmetricWindow]) -> None:
        self._here, self._ranks, self._open = here, ranks, open_window
        self._window: SymmetricWindow | None = None
        self._turn = 0

    def send(self, leaving: Tensor, arriving: Tensor, way: Way) -> Arrival:
        row = arriving.element_size() * arriving.shape[1:].numel()
        window = self._with_room(way.most_out * row)
        self._turn += 1
        with window.begin():
            window.put(self._turn, leaving)
            window.set_flags(self._turn)
            window.wait_for_all(self._turn)
            start_of = list(accumulate(way.into, initial=0))
            # Each rank begins with its neighbour, so that no rank's memory is read by all at once.
            for step in range(1, self._ranks):
                rank = (self._here + step) % self._ranks
                if way.into[rank]:
                    first, start, count = way.first_there[rank] * row, start_of[rank] * row, way.into[rank] * row
                    window.fetch(self._turn, rank, first, arriving, start, count)
            return window.arrival()

    def _with_room(self, slot_bytes: int) -> SymmetricWindow:
        """All ranks know the same ``slot_bytes``, so they make a new window together."""
        if self._window is None or self._window.slot_bytes < slot_bytes:
            # More than needed, since the next batches route differently and opening a window stops the device.
            room = slot_bytes + slot_bytes // 4
            if self._window is not None:
                room = max(room, self._window.slot_bytes + self._window.slot_bytes // 2)
                self._window.close()
                self._window = None  # freed before more memory is allocated
            self._window = self._open(-(-room // _ROOM) * _ROOM or _ROOM)
            self._turn = 0
        return self._window


class SymmetricWindow:
    """A window in PyTorch's symmetric memory, for GPUs of one host: `SLOTS` times ``slot_bytes`` of each rank. All
    ranks open and close it together.

    After the slots there is a flag for each rank: the last turn for which its rows are ready. Turns count from 1.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int) -> None:
        """RuntimeError on all ranks: one has no room for it."""
        self.slot_bytes, self._group, self._device = slot_bytes, group, device
        self._here, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._others = [rank for rank in range(ranks) if rank != self._here]
        self._flags_at = SLOTS * slot_bytes
        self._memory = _memory_of_all(group, self._flags_at + _FLAG_BYTES * ranks, device)
        self._memory[self._flags_at :].zero_()
        self._handle = symm_mem.rendezvous(self._memory, group)
        self._addresses: list[int] = list(self._handle.buffer_ptrs)
        self._stream, self._entry = _copying_stream(device), torch.cuda.Event()
        self._caller = torch.cuda.current_stream(device)
        self.close()  # waits until all flags are 0

    def begin(self) -> AbstractContextManager[object]:
        """Operations in the block run after the caller's work so far, and beside its later work."""
        self._caller = torch.cuda.current_stream(self._device)
        self._entry.record(self._caller)
        self._stream.wait_event(self._entry)
        return torch.cuda.device(self._device)  # the driver's calls apply to the current device

    def put(self, turn: int, rows: Tensor) -> None:
        """Copy ``rows`` into this rank's slot for ``turn``."""
        if rows.nbytes:
            _driver().copy(self._slot(self._here, turn), rows.data_ptr(), rows.nbytes, self._stream.cuda_stream)

    def set_flags(self, turn: int) -> None:
        """Set this rank's flag for ``turn`` in every other rank's memory, after the work before it."""
        for rank in self._others:
            _driver().write(self._stream.cuda_stream, self._flag(rank, self._here), turn)

    def wait_for_all(self, turn: int) -> None:
        """Later work waits until every other rank has set its flag for ``turn``."""
        for rank in self._others:
            _driver().wait(self._stream.cuda_stream, self._flag(self._here, rank), turn)

    def fetch(self, turn: int, rank: int, first: int, rows: Tensor, start: int, count: int) -> None:
        """Copy ``count`` bytes from byte ``first`` of another rank's slot to byte ``start`` of ``rows``."""
        source = self._slot(rank, turn) + first
        _driver().copy(rows.data_ptr() + start, source, count, self._stream.cuda_stream)

    def arrival(self) -> Arrival:
        """The handle of all copies begun so far; the stream that called `begin` waits for it."""
        return _OnStream(self._stream, self._caller)

    def close(self) -> None:
        """Wait until no rank uses the window; collective."""
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        torch.cuda.synchronize(self._device)

    def _slot(self, rank: int, turn: int) -> int:
        """Address, in this process, of a rank's slot."""
        return self._addresses[rank] + turn % SLOTS * self.slot_bytes

    def _flag(self, of_rank: int, from_rank: int) -> int:
        """Address, in this process, of the flag in ``of_rank``'s memory that ``from_rank`` sets."""
        return self._addresses[of_rank] + self._flags_at + _FLAG_BYTES * from_rank


class _OnStream:
    """The arrival of a stream's work so far; the caller's stream waits for it."""

    def __init__(self, stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> None:
        self._caller, self._is_awaited = caller, True
        self._event = stream.record_event()
        self._is_awaited = False

    def wait(self) -> None:
        self._caller.wait_event(self._event)
        self._is_awaited = True

    def __del__(self) -> None:
        """After an error nobody has waited; the copies' memory must not be reused before they end."""
        if not self._is_awaited:
            self.wait()


def _memory_of_all(group: dist.ProcessGroup, size: int, device: torch.device) -> Tensor:
    """(size) uint8 that other processes can map. RuntimeError on all ranks if one has no room."""
    torch.cuda.empty_cache()  # it is not from the caching allocator, which may hold all free memory
    memory, problem = None, None
    try:
        memory = symm_mem.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        problem = (str(error).splitlines() or ["no reason given"])[0]
    problems = _all_gather_object(group, problem)
    if memory is None or any(problems):
        rank, found = next((rank, found) for rank, found in enumerate(problems) if found)
        raise RuntimeError(
            f"rank {rank} of those that share experts has no {size} bytes of symmetric memory for what it sends: "
            f"{found}; take smaller batches, or exchange='collective' (--parallel.exchange collective)"
        )
    return memory


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


class _Driver:
    """Three calls of CUDA's driver on raw addresses. PyTorch lacks the last two. Its own copy of a tensor's slice takes
    the host ten times as long, and a layer makes a dozen copies.
    """

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._copy, self._write = driver.cuMemcpyDtoDAsync_v2, driver.cuStreamWriteValue32_v2
        self._wait = driver.cuStreamWaitValue32_v2
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Each address is in this GPU's memory, or in one's that it can access."""
        _check(self._copy(target, source, size, stream))

    def write(self, stream: int, address: int, value: int) -> None:
        """Write once all earlier work of the stream is done and visible to other GPUs."""
        _check(self._write(stream, address, value, 0))

    def wait(self, stream: int, address: int, value: int) -> None:
        """Wait until the value there is at least ``value`` (32 bits, by cyclic difference)."""
        _check(self._wait(stream, address, value, _WAIT_UNTIL_AT_LEAST))


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"an exchange through symmetric memory failed with CUDA's error {result}")


@cache
def _driver() -> _Driver:
    return _Driver()

"""The processes of a job watch each other: if one dies, fails or hangs, every other one reports which.

A process that waits for a lost one cannot report it: NCCL waits in the GPU's driver, where Python handles no signal,
and torchrun kills such a process silently after half a minute. So each process has a thread with a connection to rank
0's thread. The system closes the connection however a process dies. Over it the thread sends its process' progress and,
if that has stopped, the module it is in, from the Python frames of its training thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed.distributed_c10d import Store

from tilemoe.train.job.processes import Job

BEAT = 0.5  # seconds between two polls
GRACE = 2.0  # seconds that the training thread has to end by itself after a process is lost
GO_ON = "go on from the last checkpoint with --resume auto"
_BACKLOG = 4096  # processes that may connect at the same time
_LONGEST = 1 << 14  # bytes of a message
_MOST_PLACES = 4  # that the report of a hanging job names
# A function of PyTorch, FSDP or ours that waits for other processes has one of these in its name.
_WAITS: tuple[str, ...] = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "barrier")
_WAITS += ("wait_tensor", "wait_for_unshard", "values_of_processes")


class Progress:
    """How far a process has come: its ``step``, and ``marks``, which count up as long as it moves.

    names: of modules, by their id.
    """

    def __init__(self) -> None:
        """Must be called in the thread that trains."""
        self.marks, self.step = 0, 0
        self.names: dict[int, str] = {}
        self._thread = threading.get_ident()

    def mark(self) -> None:
        self.marks += 1

    def place(self) -> str:
        """The module that the training thread is in, or "the backward", and the collective it waits in; "" if neither
        is known. A GPU's backward runs in another thread, so nothing more than "the backward" is known there.

        Do not call it while the process moves: it keeps a frame's local variables alive as long as the frame.
        """
        frame, module, waits = sys._current_frames().get(self._thread), "", ""
        while frame is not None and not module:
            function = frame.f_code.co_name
            waits = waits or next((word for word in _WAITS if word in function), "")
            module = "the backward" if function == "backward" else self.names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        return ", in ".join(filter(None, (module, waits)))


class Watch:
    """This process' watching thread; it runs until `stop`.

    Args:
        timeout: seconds after which the job is given up: because no process moves although all have begun, or because
            a process' thread sends nothing, as when the process or its host is stopped.
    """

    def __init__(self, job: Job, store: Store, timeout: float) -> None:
        """All processes must make one. OSError: rank 0 cannot be reached."""
        self.progress = Progress()
        self._job, self._timeout = job, timeout
        self._verdict, self._word = "", secrets.token_hex(8)
        self._found, self._ended = threading.Event(), threading.Event()
        self._marks = dict.fromkeys(range(job.world_size), (0, 0))  # (marks, step) of each rank, as rank 0 knows them
        self._places: dict[int, str] = {}  # of each rank; "" unless it has not moved for half of the timeout
        self._own, self._own_since = (0, 0), time.monotonic()  # this process' marks, and when they last changed
        self._moved = time.monotonic()  # in rank 0: when any process last moved; in others: when rank 0 was last heard
        self._heard = dict.fromkeys(self._marks, self._moved)  # when rank 0 last heard each rank, even without progress
        self._told = 0.0  # when this process last sent its progress
        self._server: socket.socket | None = None
        self._links: dict[Connection, int] = {}  # in rank 0: to all others; in others: to rank 0
        if job.is_first:
            self._server = _listen()
            store.set("watch", f"{self._server.getsockname()[1]} {self._word}")
        else:
            self._links[connect(store, job)] = 0
        self._thread = threading.Thread(target=self._run, name="tilemoe-watch", daemon=True)
        self._thread.start()

    def verdict(self, seconds: float) -> str:
        """Which process is lost, and why; waits up to ``seconds`` to learn it. "": nothing is known."""
        self._found.wait(seconds)
        return self._verdict

    def stop(self, failure: str | None) -> None:
        """Leave the job. ``failure``: None: this process is done; "": another's failure ended it; else its error."""
        self._ended.set()
        self._thread.join()
        if failure is None:
            self._tell({"done": True})
        elif self._job.is_first:
            self._tell({"lost": f"rank 0 failed: {failure}" if failure else self._verdict or "a process is lost"})
        elif failure:
            self._tell({"failed": failure})

    def _run(self) -> None:
        while (self._server or self._links) and not self._ended.is_set():
            own = self.progress.marks, self.progress.step
            if own != self._own:
                self._own, self._own_since = own, time.monotonic()
            is_late = time.monotonic() - self._own_since > self._timeout / 2
            place = self.progress.place() if is_late else ""
            if self._job.is_first:
                self._note(0, own, place)
            if time.monotonic() - self._told >= BEAT:  # else every message would trigger another at once
                self._told = time.monotonic()
                self._tell({"marks": own, "place": place})
            verdict = self._look() or self._standing_still()
            if verdict:  # a rank 0 that was suspended reads it when it resumes
                self._tell({"lost": verdict})
                self._speak(verdict)

    def _look(self) -> str:
        """Read messages for one `BEAT`. Returns which process is lost, "" if none is."""
        for ready in wait([*filter(None, [self._server]), *self._links], BEAT):
            if isinstance(ready, Connection):
                lost = self._read(ready)
                if lost:
                    return lost
            elif self._server is not None:
                self._accept(self._server)
        return ""

    def _accept(self, server: socket.socket) -> None:
        accepted, _ = server.accept()
        link = Connection(accepted.detach())
        hello = receive(link)
        if hello is None or hello.get("word") != self._word:  # not of this job
            link.close()
        else:
            self._links[link] = int(hello["rank"])

    def _read(self, link: Connection) -> str:
        rank, message = self._links[link], receive(link)
        if message is None:
            return f"rank {rank} is gone: it was killed or it crashed, torchrun's report says how"
        if "failed" in message:
            return f"rank {rank} failed: {message['failed']}"
        if "done" in message:
            del self._links[link], self._marks[rank], self._heard[rank]
            link.close()
        elif not self._job.is_first:
            self._moved = time.monotonic()
        elif "marks" in message:
            self._note(rank, tuple(message["marks"]), message.get("place", ""))
        return str(message.get("lost", ""))

    def _note(self, rank: int, marks: tuple[int, int], place: str = "") -> None:
        self._heard[rank], self._places[rank] = time.monotonic(), place
        if self._marks[rank] != marks:
            self._marks[rank], self._moved = marks, time.monotonic()

    def _standing_still(self) -> str:
        """A text that names the hanging ranks, if no process has moved for the timeout; else "".

        They are the least advanced of the silent ranks. If no rank is silent, they are the least advanced of all ranks,
        once all have begun. A rank other than 0 hears only rank 0, so it can only report that rank 0 hangs.
        """
        if time.monotonic() - self._moved <= self._timeout:
            return ""
        if not self._job.is_first:
            return f"rank 0 hangs: nothing was heard from it within train.timeout ({self._timeout:g} s)"
        since = time.monotonic() - self._timeout
        if min(self._heard.values()) > since and min(self._marks.values()) <= (0, 0):
            return ""
        places = {rank: (self._heard[rank] > since, marks) for rank, (marks, _) in self._marks.items()}
        who = [rank for rank, place in places.items() if place == min(places.values())]
        names = f"rank {who[0]} hangs" if len(who) == 1 else f"ranks {', '.join(map(str, who))} hang"
        step = self._marks[who[0]][1]
        limit = f"no process has advanced within train.timeout ({self._timeout:g} s)"
        return "; ".join([f"{names} in step {step}: {limit}", *self._told_places(who)])

    def _told_places(self, who: list[int]) -> list[str]:
        """Texts that say where ranks are, those of ``who`` first; ranks in the same place share a text."""
        ranks_of_place: dict[str, list[int]] = {}
        for rank in [*who, *sorted(self._marks.keys() - set(who))]:
            if place := self._places.get(rank):
                ranks_of_place.setdefault(place, []).append(rank)
        told = []
        for place, ranks in [*ranks_of_place.items()][:_MOST_PLACES]:
            told.append(f"rank {ranks[0]} {f'and {len(ranks) - 1} more are' if ranks[1:] else 'is'} in {place}")
        return told

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):  # a process that is gone need not know
                send(link, message)

    def _speak(self, verdict: str) -> None:
        """Print ``verdict`` and end this process, unless its training thread ends within `GRACE`."""
        self._verdict = verdict
        self._found.set()
        if self._ended.wait(GRACE):
            return
        sys.stdout.flush()
        print(f"tilemoe: error: {self._job.name}: {verdict}; {GO_ON}\n", end="", file=sys.stderr, flush=True)
        os._exit(2)


def connect(store: Store, job: Job) -> Connection:
    """Connect to rank 0's `Watch`."""
    port, word = store.get("watch").decode().split()
    made = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), timeout=60)
    made.settimeout(None)  # what `Connection` reads must block
    link = Connection(made.detach())
    send(link, {"rank": job.rank, "word": word})
    return link


def send(link: Connection, message: dict[str, Any]) -> None:
    link.send_bytes(json.dumps(message).encode())


def receive(link: Connection) -> dict[str, Any] | None:
    """The next message; None: the other end is closed, or sent something that is no message."""
    try:
        message = json.loads(link.recv_bytes(_LONGEST)) if link.poll(GRACE) else None
    except (OSError, EOFError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _listen() -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    except (OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", 0), backlog=_BACKLOG)

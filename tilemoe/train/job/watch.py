"""The processes of a job look after each other: one that dies, fails or stands still is named by every other.

Who waits for a lost process cannot speak: NCCL waits within the GPU's driver, where Python handles no signal, and
torchrun ends such a process without a word after half a minute. So a thread of each process holds a connection to rank
0's thread. The system closes it however a process dies, and it tells how far its process has come.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.distributed_c10d import Store

from tilemoe.train.job.processes import Job

_BEAT = 0.5  # seconds between two looks
_GRACE = 2.0  # seconds that the training thread has to end by itself, once a process is lost
_BACKLOG = 4096  # processes that connect at the same time
_LONGEST = 1000  # characters of another process' error
GO_ON = "go on from the last checkpoint with --resume auto"


class Progress:
    """How far a process has come: marks count up while it moves, wherever in its ``step`` it is."""

    def __init__(self) -> None:
        self.marks, self.step = 0, 0

    def mark(self) -> None:
        self.marks += 1


class Watch:
    """This process' thread, from `start` to `stop`.

    Args:
        timeout: seconds after which a job that has begun and in which nobody moves is given up.
    """

    def __init__(self, job: Job, store: Store, timeout: float) -> None:
        """All processes make one. OSError: rank 0's cannot be reached."""
        self.progress = Progress()
        self._job, self._timeout = job, timeout
        self._verdict = ""
        self._found, self._ended = threading.Event(), threading.Event()
        self._hub = _Hub(job, store) if job.is_first else None
        self._link = None if job.is_first else _Link(_connect(store, job))
        self._thread = threading.Thread(target=self._run, name="tilemoe-watch", daemon=True)
        self._thread.start()

    def verdict(self, seconds: float) -> str:
        """What is known of a lost process, waited for that long; "" if nothing is."""
        self._found.wait(seconds)
        return self._verdict

    def stop(self, failure: str | None) -> None:
        """This process leaves: it is done, or what it failed of; "" if another's failure is why."""
        self._ended.set()
        self._thread.join()
        if self._hub is not None:
            lost = f"rank 0 failed: {failure}" if failure else self._verdict or "a process is lost"
            self._hub.tell_all({"done": True} if failure is None else {"lost": lost})
        elif self._link is not None and failure != "":
            with contextlib.suppress(OSError):  # rank 0 may have gone first
                self._link.send({"done": True} if failure is None else {"failed": failure})

    def _run(self) -> None:
        look = self._look_at_all if self._hub is not None else self._look_at_first
        while not self._ended.is_set():
            verdict = look()
            if verdict is None:
                return
            if verdict:
                self._speak(verdict)

    def _look_at_all(self) -> str | None:
        """Of rank 0: "" as long as all is well."""
        assert self._hub is not None
        self._hub.note(0, {"marks": self.progress.marks, "step": self.progress.step})
        lost = self._hub.look() or self._hub.standing_still(self._timeout)
        if lost:
            self._hub.tell_all({"lost": lost})
        return lost

    def _look_at_first(self) -> str | None:
        """Of the others: "" as long as all is well, None where rank 0 is done."""
        assert self._link is not None
        try:
            self._link.send({"marks": self.progress.marks, "step": self.progress.step})
            messages = self._link.receive(_BEAT)
        except OSError:
            messages = None
        if messages is None:
            return _gone(0)
        for message in messages:
            if "done" in message:
                return None
            if "lost" in message:
                return str(message["lost"])
        return ""

    def _speak(self, verdict: str) -> None:
        """End the process, unless its training thread finds out by itself."""
        self._verdict = verdict
        self._found.set()
        if self._ended.wait(_GRACE):
            return
        sys.stdout.flush()
        print(f"tilemoe: error: {self._job.name}: {verdict}; {GO_ON}\n", end="", file=sys.stderr, flush=True)
        os._exit(2)


class _Link:
    """One end of a connection: messages are lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._rest = connection, b""

    def send(self, message: dict[str, Any]) -> None:
        self.connection.settimeout(_GRACE)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> list[dict[str, Any]] | None:
        """What came within ``seconds``; None where the other end is closed. OSError: it was reset."""
        self.connection.settimeout(seconds)
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class _Hub:
    """Rank 0's end of all connections."""

    def __init__(self, job: Job, store: Store) -> None:
        self._job, self._word = job, secrets.token_hex(8)
        self._links: dict[int, _Link] = {}
        self._marks: dict[int, tuple[int, int]] = dict.fromkeys(range(job.world_size), (0, 0))  # (marks, step)
        self._moved = time.monotonic()  # when any process last did
        self._selector = selectors.DefaultSelector()
        self._server = _server()
        self._selector.register(self._server, selectors.EVENT_READ)
        store.set("watch", f"{self._server.getsockname()[1]} {self._word}")

    def note(self, rank: int, message: dict[str, Any]) -> None:
        found = int(message["marks"]), int(message["step"])
        if self._marks.get(rank) != found:
            self._marks[rank], self._moved = found, time.monotonic()

    def look(self) -> str:
        """Read what came within a beat; which process is lost, if one is."""
        for key, _ in self._selector.select(_BEAT):
            if key.fileobj is self._server:
                self._accept()
            else:
                lost = self._read(key.data)
                if lost:
                    return lost
        return ""

    def standing_still(self, timeout: float) -> str:
        """Who has come least far, if nobody has moved for so long, all of them having begun."""
        if not self._marks or min(self._marks.values()) == (0, 0) or time.monotonic() - self._moved <= timeout:
            return ""
        least = min(marks for marks, _ in self._marks.values())
        who = [rank for rank, (marks, _) in self._marks.items() if marks == least]
        step = self._marks[who[0]][1]
        names = f"rank {who[0]} hangs" if len(who) == 1 else f"ranks {', '.join(map(str, who))} hang"
        return f"{names} in step {step}: no process has moved within train.timeout ({timeout:g} s)"

    def tell_all(self, message: dict[str, Any]) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # whoever is gone need not know
                link.send(message)

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        link = _Link(connection)
        hello = _first_message(link)
        if not isinstance(hello, dict) or hello.get("word") != self._word:  # a stranger
            connection.close()
            return
        rank = int(hello["rank"])
        self._links[rank] = link
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def _read(self, rank: int) -> str:
        try:
            messages = self._links[rank].receive(_BEAT)
        except OSError:
            messages = None
        for message in messages or ():
            if "failed" in message:
                return f"rank {rank} failed: {message['failed']}"
            if "done" in message:
                self._forget(rank)
                return ""
            self.note(rank, message)
        return _gone(rank) if messages is None else ""

    def _forget(self, rank: int) -> None:
        link = self._links.pop(rank)
        self._marks.pop(rank)
        self._selector.unregister(link.connection)
        link.connection.close()


def _first_message(link: _Link) -> Any:
    """None where none comes."""
    deadline = time.monotonic() + _GRACE
    messages: list[dict[str, Any]] | None = []
    with contextlib.suppress(OSError, ValueError):
        while messages == [] and time.monotonic() < deadline:
            messages = link.receive(_GRACE)
    return messages[0] if messages else None


def _server() -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    except (OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", 0), backlog=_BACKLOG)


def _connect(store: Store, job: Job) -> socket.socket:
    port, word = store.get("watch").decode().split()
    connection = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), timeout=60)
    connection.sendall(json.dumps({"rank": job.rank, "word": word}).encode() + b"\n")
    return connection


def told(error: BaseException) -> str:
    """Of an error, what other processes are told."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def _gone(rank: int) -> str:
    return f"rank {rank} is gone: it was killed or it crashed, torchrun's report says how"


@contextlib.contextmanager
def watched(
    job: Job, store: Store, timeout: float, is_lost_process: Callable[[BaseException], bool]
) -> Iterator[Watch]:
    """A `Watch` for the block. An error that leaves it is told to the other processes, unless it comes of a lost one:
    then it is waited a moment for word of that.
    """
    watch = Watch(job, store, timeout)
    try:
        yield watch
    except BaseException as error:
        is_theirs = is_lost_process(error)
        known = watch.verdict(_GRACE if is_theirs else 0.0)
        watch.stop("" if known or is_theirs else told(error))
        raise
    watch.stop(None)

"""Rank 0's end of the connections that the processes of a job watch each other by; whole jobs are watched elsewhere."""

import socket
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tilemoe.train.job.processes import Job
from tilemoe.train.job.watch import Connection, Watch, connect, receive, send


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return dist.HashStore()


@pytest.fixture
def first(store: dist.HashStore) -> Iterator[Watch]:
    """Rank 0's, which does not end this process."""
    watch = Watch(Job(0, 3), store, 60.0)
    yield watch
    watch.stop("")


@pytest.fixture
def links(first: Watch, store: dist.HashStore) -> Iterator[dict[int, Connection]]:
    """Of ranks 1 and 2."""
    found = {rank: connect(store, Job(rank, 3)) for rank in (1, 2)}
    wait_for(first, {1, 2})
    yield found
    for link in found.values():
        link.close()


def wait_for(first: Watch, ranks: set[int]) -> None:
    deadline = time.monotonic() + 10
    while set(first._links.values()) != ranks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_a_job_that_stands_still_the_least_far_is_named(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "_run", lambda watch: None)
    watch = Watch(Job(0, 3), store, 0.01)
    marks = {0: (7, 2), 1: (5, 2), 2: (0, 0)}
    for _ in range(2):
        for rank, of_rank in marks.items():
            watch._note(rank, of_rank)
        time.sleep(0.02)
    for rank, of_rank in marks.items():
        watch._note(rank, of_rank)
    assert watch._standing_still() == "", "rank 2 has not begun: it may be loading still"
    time.sleep(0.02)
    for rank in (0, 1):
        watch._note(rank, marks[rank])
    assert watch._standing_still().startswith("rank 2 hangs in step 0"), "nor is it heard of"
    watch._note(2, (7, 3))
    assert watch._standing_still() == ""
    time.sleep(0.02)
    assert watch._standing_still() == "rank 1 hangs in step 2: no process has advanced within train.timeout (0.01 s)"
    watch._note(1, (6, 2))
    assert watch._standing_still() == ""
    watch._note(1, (7, 2))
    time.sleep(0.02)
    assert watch._standing_still().startswith("ranks 0, 1, 2 hang in step 2")
    for rank in (0, 1):  # say that they are where they were
        watch._note(rank, (7, 2))
    assert watch._standing_still().startswith("rank 2 hangs in step 3")


def test_a_stranger_is_shown_the_door(first: Watch, links: dict[int, Connection], store: dist.HashStore) -> None:
    port = int(store.get("watch").split()[0])
    for words in (b"GET ", b"[1]\n", b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
    link = Connection(socket.create_connection(("127.0.0.1", port)).detach())
    send(link, {"rank": 1, "word": "guessed"})
    assert receive(link) is None
    assert set(first._links.values()) == {1, 2}
    assert first.verdict(0) == ""


def test_a_first_process_that_is_stopped_is_named(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by SIGSTOP: its thread says nothing. When it goes on it is told, instead of blaming the others."""
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "_run", lambda watch: None)
        first = Watch(Job(0, 2), store, 60.0)
    second = Watch(Job(1, 2), store, 0.7)
    assert second.verdict(0.3) == ""
    expected = "rank 0 hangs: nothing was heard from it within train.timeout (0.7 s)"
    assert second.verdict(10) == expected
    second.stop("")
    assert first._server is not None
    first._accept(first._server)
    found = ""
    while not found:
        found = first._look()
    assert found == expected


def test_who_says_goodbye_is_not_missed(first: Watch, links: dict[int, Connection]) -> None:
    send(links[1], {"done": True})
    links[1].close()
    wait_for(first, {2})
    assert first.verdict(1.2) == ""

"""Rank 0's end of the connections that the processes of a job watch each other by; whole jobs are watched elsewhere."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tilemoe.train.job.processes import Job
from tilemoe.train.job.watch import Watch, _connect, _Hub, _Link


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return dist.HashStore()


@pytest.fixture
def hub(store: dist.HashStore) -> _Hub:
    return _Hub(Job(0, 3), store)


@pytest.fixture
def links(hub: _Hub, store: dist.HashStore) -> Iterator[dict[int, _Link]]:
    """Of ranks 1 and 2."""
    found = {rank: _Link(_connect(store, Job(rank, 3))) for rank in (1, 2)}
    while len(hub._links) < 2:
        assert hub.look() == ""
    yield found
    for link in found.values():
        link.connection.close()


def test_a_connection_that_closes_is_a_process_that_is_gone(hub: _Hub, links: dict[int, _Link]) -> None:
    links[2].send({"marks": 1, "step": 1})
    assert hub.look() == ""
    links[2].connection.close()
    assert hub.look().startswith("rank 2 is gone: ")


def test_who_says_goodbye_is_not_missed(hub: _Hub, links: dict[int, _Link]) -> None:
    links[1].send({"done": True})
    links[1].connection.close()
    for _ in range(2):
        assert hub.look() == ""
    assert set(hub._links) == {2}


def test_an_error_is_passed_on(hub: _Hub, links: dict[int, _Link]) -> None:
    links[1].send({"marks": 3, "step": 1})
    links[1].send({"failed": "no room"})
    assert hub.look() == "rank 1 failed: no room"
    hub.tell_all({"lost": "rank 1 failed: no room"})
    assert links[2].receive(5) == [{"lost": "rank 1 failed: no room"}]


def test_of_a_job_that_stands_still_the_least_far_is_named(hub: _Hub, links: dict[int, _Link]) -> None:
    marks = {0: 7, 1: 5, 2: 7}
    for rank in (0, 1):
        hub.note(rank, {"marks": marks[rank], "step": 2})
    time.sleep(0.02)
    assert hub.standing_still(0.01) == "", "rank 2 has not begun: it may be loading still"
    hub.note(2, {"marks": 7, "step": 3})
    assert hub.standing_still(60) == ""
    time.sleep(0.02)
    assert hub.standing_still(0.01) == "rank 1 hangs in step 2: no process has moved within train.timeout (0.01 s)"
    hub.note(1, {"marks": 6, "step": 2})
    assert hub.standing_still(0.01) == ""
    hub.note(1, {"marks": 7, "step": 2})
    time.sleep(0.02)
    assert hub.standing_still(0.01).startswith("ranks 0, 1, 2 hang in step 2")


def test_a_stranger_is_shown_the_door(hub: _Hub, links: dict[int, _Link], store: dist.HashStore) -> None:
    port = int(store.get("watch").split()[0])
    for words in (json.dumps({"rank": 1, "word": "guessed"}).encode() + b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            assert hub.look() == ""
            assert stranger.recv(1) == b""
    assert set(hub._links) == {1, 2}


def test_two_processes_that_are_done_leave_in_peace(store: dist.HashStore) -> None:
    first, second = (Watch(Job(rank, 2), store, 60.0) for rank in (0, 1))
    for watch in (first, second):
        watch.progress.mark()
    assert second.verdict(0.1) == ""
    first.stop(None)
    second.stop(None)
    assert first.verdict(0) == second.verdict(0) == ""


def test_a_failing_first_process_is_named_by_the_others(store: dist.HashStore) -> None:
    first, second = (Watch(Job(rank, 2), store, 60.0) for rank in (0, 1))
    while not first._hub._links:  # type: ignore[union-attr]
        time.sleep(0.01)
    first.stop("no room")
    assert second.verdict(5) == "rank 0 failed: no room"
    second.stop("")

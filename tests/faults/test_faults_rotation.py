"""A command reads a run's folder while a training writes a newer checkpoint there and drops the one that is being read.

That happens at each call that the command makes in the folder, once. Of a run it then reads one of the two; of a
checkpoint that is gone, or of a folder that is removed, it says so in one line.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from filesystem import ALL, Calls
from writes import WRITES

from tilemoe.cli.main import main
from tilemoe.train import run as train_run
from tilemoe.train.checkpoints import sharded_state

pytestmark = pytest.mark.usefixtures("one_thread")
COMMANDS = {
    "verify": ["verify", "{}"],
    "eval": ["eval", "--checkpoint", "{}", "--batches", "1"],
    "generate": ["generate", "--checkpoint", "{}", "--prompt", "a", "--max-new-tokens", "9"],
    "export": ["export", "--checkpoint", "{}", "--out", "{made}"],
    "plan": ["plan", "--checkpoint", "{}", "--json"],
    "resume": ["train", "--resume", "{}"],  # up to where it goes on
    "train": ["train", "--recipe", "smoke", "--init-from", "{}", "--train.steps", "1", "--train.out-dir", "{made}"],
}
ON_CORPUS = {
    "eval": ["--corpus", "{corpus}"],
    "train": ["--data.corpus", "{corpus}", "--data.batch-size", "1", "--train.sample-tokens", "0", "--train.no-plot"],
}
FIRST = "step_00000001"
KINDS = ("checkpoint", "distributed checkpoint")[: 2 if ALL else 1]
EVERY = 1 if ALL else 6  # call


class Turn:
    """At call ``number`` of the block in ``folder``, ``happens``; ``is_over``: there were fewer calls."""

    def __init__(self, folder: Path, number: int, happens: Callable[[], object]) -> None:
        self.is_over, self._calls, self._number, self._happens = True, 0, number, happens
        self._folder = Calls(folder, None)

    def _seen(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(target: Any = ".", *arguments: Any, **options: Any) -> Any:
            if self._folder.relative(target) is not None:
                self._calls += 1
                if self._calls == self._number + 1:
                    self.is_over = False
                    self._happens()
            return real(target, *arguments, **options)

        return function

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        places = [(os, name) for name in ("open", "stat", "scandir", "listdir")]
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (*places, (io, "open"), (builtins, "open"), (sharded_state, "safe_open")):
                patch.setattr(owner, name, self._seen(getattr(owner, name)))
            yield


class Run:
    """The folder of a run with a checkpoint of step 1, which becomes one of step 2."""

    def __init__(self, kind: str, corpus: Path, folder: Path) -> None:
        self.path, self.made = folder / "run", folder / "made"
        self._begun, self._corpus, self._write = folder / "begun", corpus, WRITES[kind](corpus)
        self._write.begin(self._begun)

    def start(self) -> None:
        for path in (self.path, self.made):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._begun, self.path)

    def rotate(self) -> None:
        with self._write.context():
            self._write.write(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def answer(self, command: str, path: Path, turn: Turn | None = None) -> tuple[int, list[str], str]:
        """A command's exit code, what it finds, and what it complains of."""
        out, err = io.StringIO(), io.StringIO()
        words = [*COMMANDS[command], *ON_CORPUS.get(command, [])]
        code = 0
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.nullcontext() if turn is None else turn.watched(),
            pytest.MonkeyPatch.context() as patch,
            contextlib.suppress(SystemExit),
        ):
            if command == "resume":
                patch.setattr(train_run, "train", lambda recipe, checkpoint, *_: train_run.Stopped(0))
            code = main([word.format(path, made=self.made, corpus=self._corpus) for word in words])
        weights = [hashlib.sha256(file.read_bytes()).hexdigest() for file in self.made.rglob("model.safetensors")]
        shutil.rmtree(self.made, ignore_errors=True)
        printed = [] if command == "train" else out.getvalue().splitlines()  # a training tells times
        return code, [*printed, *weights], err.getvalue()


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {kind: Run(kind, corpus, tmp_path_factory.mktemp("rotation")) for kind in KINDS}


def wrong_with(command: str, answer: tuple[int, list[str], str], right: list[list[str]], is_read: bool) -> str | None:
    """What is wrong with a command's answer; None: nothing. ``is_read``: nothing keeps the command from an answer."""
    code, found, complaint = answer
    wrong = "damaged|Errno" if command != "train" else "damaged"  # a file that it names may be gone later
    if code == 0:
        return None if found in right else f"it finds {found}"
    if is_read or code != 2 or complaint.count("\n") != 1 or re.search(wrong, complaint):
        return f"exit code {code}: {complaint}"
    return None


@pytest.mark.parametrize("name", [FIRST, "", "removed"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call(
    kind: str, command: str, name: str, runs: dict[str, Run], record_property: Callable[[str, Any], None]
) -> None:
    run = runs[kind]
    path = run.path / name.replace("removed", "")
    happens = run.remove if name == "removed" else run.rotate
    run.start()
    first = run.answer(command, path)
    run.rotate()
    right, wrong = [first[1], run.answer(command, run.path)[1]], []
    assert right[0] != right[1] or command == "plan"
    if command == "verify":
        right.append([f"{run.path / FIRST}: deleted meanwhile, perhaps by a training"])
    is_read = path == run.path and happens == run.rotate and command != "train"
    for number in count(step=EVERY):
        run.start()
        turn = Turn(run.path, number, happens)
        found = wrong_with(command, run.answer(command, path, turn), right, is_read)
        if turn.is_over:
            break
        if found is not None:
            wrong.append(f"at call {number}: {found}")
    record_property("cases", number // EVERY)
    assert number > 1
    if wrong:
        pytest.fail(f"{len(wrong)} of {number}\n" + "\n".join(wrong[:30]), pytrace=False)

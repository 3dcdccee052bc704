"""Whatever becomes of a file that is read, it gives what was written, or one line says which file is wrong.

Each case reads in a copy of this process that may take so much time and memory, and that must neither run what a file
names nor write anywhere: an audit hook of Python's sees it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from copies import Copy
from filesystem import ALL, complaint
from mutations import mutations
from reads import READS, Read

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("forks")]
MUTATIONS, SELECTED = 300, 3  # of each file
SECONDS, MORE_MEMORY = 60, 4 << 30  # that a reading may take
_RUNS = frozenset({"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect"})
_CHANGES = frozenset(
    {
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.chmod",
        "os.truncate",
        "shutil.rmtree",
    }
)


class Intact:
    def __init__(self, read: Read, corpus: Path, folder: Path) -> None:
        self.folder, self.read = folder / "intact", read
        self.folder.mkdir()
        read.make(self.folder, corpus)
        self.content = read.read(self.folder)
        assert read.read(self.folder) == self.content


@pytest.fixture(scope="module")
def intact(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Intact]:
    return cache(lambda kind: Intact(READS[kind], corpus, tmp_path_factory.mktemp("reads")))


def spoil(folder: Path, read: Read, name: str, what: str, content: bytes | None) -> None:
    file = folder / name
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    if read.sign is not None:
        read.sign(folder)


def forbidden(seen: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that notes what no reading may do."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _RUNS | _CHANGES:
            seen.append(f"{event} {arguments[:2]}")
        elif (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            seen.append(f"open for writing {arguments[0]}")
        elif event == "pickle.find_class":
            seen.append(f"unpickles {arguments[:2]}")

    return hook


def read_apart(folder: Path, intact: Intact) -> tuple[str, str]:
    """What comes of reading: "same", "other" or "refused" with the line; "wrong" with what is wrong."""
    answer = folder.with_name("answer")

    def work() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        answer.write_text(json.dumps(_answer(folder, intact)))

    code = Copy(work).finish(SECONDS)
    return tuple(json.loads(answer.read_text())) if code == 0 else ("wrong", f"it crashed or hung: exit code {code}")


def _answer(folder: Path, intact: Intact) -> tuple[str, str]:
    seen: list[str] = []
    sys.addaudithook(forbidden(seen))
    try:
        content = intact.read.read(folder)
        outcome = ("same" if content == intact.content else "other", "")
    except Exception as error:
        outcome = ("refused", str(error))
        if wrong := complaint(error, folder):
            outcome = ("wrong", wrong)
    return ("wrong", f"it did {seen[0]}") if seen else outcome


def chosen(read: Read, folder: Path, name: str) -> list[tuple[str, bytes | None]]:
    """The mutations of a file: so many that differ, or of the selection some of its first, others for each file."""
    others = [(folder / other).read_bytes() for other in read.files if other != name] or [b"PK\3\4"]
    every = mutations(name, (folder / name).read_bytes(), others)
    return list(islice(every, MUTATIONS) if ALL else islice(every, len(name) % 7, 7 * SELECTED, 7))


def wrong_with(outcome: str, line: str, read: Read, name: str) -> str | None:
    """What is wrong with what came of a reading; None: nothing."""
    if outcome == "wrong":
        return line
    if read.is_sealed and outcome == "other":
        return "it gives other content than was written"
    is_named = Path(name).name in line or read.sign is not None or not read.is_sealed or len(read.files) == 1
    return None if outcome != "refused" or is_named else f"the file is not named: {line}"


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, read in READS.items() for name in read.files])
def test_mutated(
    kind: str, name: str, intact: Callable[[str], Intact], tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    whole, wrong = intact(kind), {}
    every = chosen(whole.read, whole.folder, name)
    for what, content in every:
        folder = tmp_path / "files"
        shutil.copytree(whole.folder, folder)
        spoil(folder, whole.read, name, what, content)
        found = wrong_with(*read_apart(folder, whole), whole.read, name)
        if found is not None:
            wrong[what] = found
        shutil.rmtree(folder)
    record_property("cases", len(every))
    record_property("kind", f"{kind}, {Path(name).name}")
    assert len(every) == (MUTATIONS if ALL else SELECTED)
    if wrong:
        pytest.fail(
            f"{len(wrong)} of {len(every)}\n" + "\n".join(f"{w}: {wrong[w]}" for w in [*wrong][:30]), pytrace=False
        )

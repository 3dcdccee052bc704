"""Runs of the fuzzing, the faults, the cells and the soak that are interrupted: what was judged is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import every_cell
import faults
import fuzz
import gpu_tests
import pytest
import soak
import versions

from tilemoe.bench import record

TORCH = "tests/fuzz/test_fuzz_routings.py::test_torch_backend"
TESTS = """
import os, signal
def test_good(): pass
def test_signalled():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
def test_never(): pass
"""
CODE = """
import sys, json, pytest
sys.path.insert(0, sys.argv[1])
from gpu_tests import Outcomes, interrupt_once, unfinished
interrupt_once()
outcomes = Outcomes()
code = pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[2]], plugins=[outcomes])
print("FOUND" + json.dumps([outcomes.by_test, unfinished(code)]))
"""


def test_a_signal_and_more_after_it_leave_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-c", CODE, str(Path(gpu_tests.__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    by_test, said = json.loads(done.stdout.split("FOUND")[1])
    assert by_test == {"test_them.py::test_good": "passed"}
    assert said == {"unfinished": "pytest exited with 2"}


@pytest.fixture
def pretend(results: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a benchmark whose tests come to these ends, and gives the arguments that pytest gets."""

    def run(benchmark: ModuleType, options: list[str], tests: dict[str, Any], code: int = 0) -> list[str]:
        given: list[str] = []

        def main(arguments: list[str], plugins: list[Any]) -> int:
            given.extend(arguments)
            for name, cases in tests.items():
                wrong = isinstance(cases, str)
                properties = [*cases.items()] if isinstance(cases, dict) else [] if wrong else [("cases", cases)]
                plugins[0].pytest_runtest_logreport(
                    SimpleNamespace(
                        nodeid=name, when="call", outcome="failed" if wrong else "passed", failed=wrong, longrepr="",
                        longreprtext=f"E {cases}", user_properties=properties,
                    )
                )  # fmt: skip
            return code

        monkeypatch.setattr(benchmark, "interrupt_once", lambda: None)
        monkeypatch.setattr(pytest, "main", main)
        monkeypatch.setattr(sys, "argv", ["it", *options])
        benchmark.main() if benchmark is fuzz else benchmark.main(options)
        return given

    return run


def test_fuzzing_goes_on_with_what_is_left(pretend: Callable[..., list[str]]) -> None:
    assert f"--deselect={TORCH}[0]" not in pretend(fuzz, ["--seed", "3"], {f"{TORCH}[0]": 5, f"{TORCH}[1]": 5}, 2)
    row = record.rows("fuzz")[0]
    assert (row["parts"], row["unfinished"]) == ({TORCH: {"0": 5, "1": 5}}, "pytest exited with 2")
    given = pretend(fuzz, ["--seed", "3"], {f"{TORCH}[2]": 5, f"{TORCH}[3]": "AssertionError: off"})
    assert {f"--deselect={TORCH}[{part}]" for part in "01"} <= {*given}
    assert "unfinished" not in record.rows("fuzz")[1]
    given = pretend(fuzz, ["--seed", "3"], {f"{TORCH}[2]": 5, "tests/fuzz/test_x.py::test_several": 7})
    assert f"--deselect={TORCH}[2]" in given, "and once more, as by two machines at once"
    assert f"--deselect={TORCH}[3]" not in given, "it found a mismatch"
    assert not any(option.startswith("--deselect") for option in pretend(fuzz, ["--seed", "4"], {f"{TORCH}[0]": 5}))
    lines = [line.split() for line in fuzz.report().splitlines()[1:]]
    commit = record.rows("fuzz")[0]["commit"]
    assert lines == [[commit, "test_torch_backend", "20", "2", "1"], [commit, "test_several", "7", "1", "0"]]


def test_another_commit_has_not_judged_them(pretend: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("1" * 12, "2" * 12, "2" * 12 + "+dirty"):
        monkeypatch.setenv(record.COMMIT_VARIABLE, commit)
        for _ in range(2 if commit.endswith("dirty") else 1):
            given = pretend(fuzz, ["--seed", "3"], {f"{TORCH}[0]": 5})
            assert f"--deselect={TORCH}[0]" not in given


@pytest.mark.parametrize("benchmark", [fuzz, faults, every_cell])
def test_what_judged_nothing_is_not_recorded(benchmark: ModuleType, pretend: Callable[..., list[str]]) -> None:
    with pytest.raises(SystemExit, match="nothing is recorded"):
        pretend(benchmark, [], {}, 5)
    assert record.rows(benchmark.__name__) == []


def test_faults_until_then_are_counted_by_kind(pretend: Callable[..., list[str]]) -> None:
    tests = {
        "tests/faults/test_faults_files.py::test_every_call[checkpoint-EIO]": 3,
        "tests/faults/test_faults_reads.py::test_mutated[model-a.json]": {"cases": 5, "kind": "model, a.json"},
        "tests/faults/test_faults_reads.py::test_mutated[model-b.json]": {"cases": 5, "kind": "model, b.json"},
    }
    pretend(faults, [], tests, 2)
    row = record.rows("faults")[0]
    assert row["faults_of_kind"] == {"files: checkpoint": 3, "reads: model, a.json": 5, "reads: model, b.json": 5}
    assert (row["faults"], row["unfinished"]) == (13, "pytest exited with 2")


def test_cells_until_then_are_counted_by_kernel(pretend: Callable[..., list[str]]) -> None:
    test = "tests/kernels/test_hopper_cells.py::test_cell[{}]"
    of = {"up": "up_proj_act geglu interleaved", "down": "down_proj_dgrad_dact relu none"}
    tests = {
        test.format(1): {"cells": 1, "family": of["up"], "spills": 26, "cached": True},
        test.format(2): {"cells": 1, "family": of["up"], "spills": 3, "cached": True},
        test.format(3): {"cells": 2, "family": of["down"], "spills": 0, "cached": False},
        "tests/kernels/test_hopper_cells.py::test_a_weight_by_pointer_is_seen": {},
    }
    pretend(every_cell, [], tests, 2)
    row = record.rows("every_cell")[0]
    assert row["cells"] == {"up_proj_act": 2, "down_proj_dgrad_dact": 2}
    assert (row["compiled"], row["from_cache"]) == (3, 2)
    assert row["spill_loads_of_family"] == {of["up"]: 26}
    assert (row["passed"], row["unfinished"]) == (4, "pytest exited with 2")


class Interrupted:
    """A soak of which a round takes no time, interrupted in the one of this number."""

    def __init__(self, last: int) -> None:
        self.trainer, self.rounds = SimpleNamespace(step=0), self._rounds(last)
        self.round = self.rounds.__next__

    def _rounds(self, last: int) -> Iterator[float]:
        for number in count():
            if number == last:
                raise KeyboardInterrupt
            self.trainer.step += 60
            yield 1.5


def test_an_interrupted_soak_is_judged_where_there_are_rounds_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "measured", lambda device: {"threads": 3.0})
    monkeypatch.setattr(soak, "Soak", lambda device, folder: Interrupted(12))
    row = soak.soak(soak.torch.device("cpu"), minutes=60)
    assert (row["rounds"], row["steps"], row["growing"]) == (12, 720, [])
    assert row["unfinished"].startswith("interrupted after 0.0 min")
    monkeypatch.setattr(soak, "Soak", lambda device, folder: Interrupted(8))
    with pytest.raises(SystemExit, match="8 of at least 9 rounds: nothing is recorded"):
        soak.soak(soak.torch.device("cpu"), minutes=60)


def test_other_releases_are_recorded_with_what_failed(pretend: Callable[..., list[str]]) -> None:
    name = "tests/layers/test_layers_moe.py::test_it"
    given = pretend(versions, ["tests/layers"], {f"{name}[0]": 1, f"{name}[1]": "AssertionError: off"}, 1)
    assert given[-1] == "tests/layers"
    assert given[given.index("-m") + 1] == "not gpu"
    (row,) = record.rows("versions")
    assert (row["passed"], row["failed"], row["torch"]) == (1, 1, record.version("torch"))
    assert row["transformers"] == record.version("transformers")
    assert row["not_passed"] == {f"{name}[1]": "failed: E AssertionError: off"}
    assert "unfinished" not in row
    with pytest.raises(SystemExit, match="no test ran and nothing is recorded"):
        pretend(versions, ["tests/nowhere"], {}, 4)
    assert len(record.rows("versions")) == 1

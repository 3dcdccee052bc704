"""Runs of tests that are recorded: every outcome, what an interrupted run got to, and what counts as a case."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import record_tests

from tilemoe.bench import record

TESTS = """
import os, signal, pytest
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.fixture
def broken(): raise RuntimeError("no luck")
def test_error(broken): pass
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_signalled():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
def test_never(): pass
"""


def test_a_signal_and_more_after_it_leave_what_was_found(results: Path) -> None:
    (results / "pytest.ini").write_text("[pytest]\n")
    file = results / f"{record_tests.SANITIZER}.py"
    file.write_text(TESTS)
    arguments = ["-q", "-c", str(results / "pytest.ini"), str(file)]
    command = [sys.executable, str(Path(record_tests.__file__).resolve()), "versions", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (row,) = record.rows("versions")
    assert (row["unfinished"], done.returncode) == ("pytest exited with 2", 2), done.stderr
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 2, 1)
    assert row["arguments"] == arguments
    assert row["transformers"] == record.version("transformers")
    reasons = {name.split("::")[-1]: reason for name, reason in row["not_passed"].items()}
    assert reasons.keys() == {"test_bad", "test_error", "test_skipped"}
    assert "not here" in reasons["test_skipped"]
    assert "no luck" in done.stdout  # said when it happens, not only at the end


@pytest.fixture
def pretend(results: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a kind of tests that come to these ends, and gives the arguments that pytest gets."""

    def run(arguments: list[str], tests: dict[str, Any], code: int = 0) -> list[str]:
        given: list[str] = []

        def main(command: list[str], plugins: list[Any]) -> int:
            given.extend(command)
            for name, said in tests.items():
                outcome, text = ("failed", said) if isinstance(said, str) else ("passed", "")
                properties = {} if text else {"cases": said} if isinstance(said, int) else said
                report = SimpleNamespace(nodeid=name, when="call", outcome=outcome, longrepr="", longreprtext=text)
                report.user_properties = list(properties.items())
                plugins[0].pytest_runtest_logreport(report)
            return code

        monkeypatch.setattr(record_tests, "interrupt_once", lambda: None)
        monkeypatch.setattr(pytest, "main", main)
        assert record_tests.main(arguments) == code
        return given

    return run


FUZZ = "tests/fuzz/test_fuzz_routings_values.py::test_triton_backends"
WRONG = "def judge\nE   AssertionError: off\nE   case=Layer(\nE     seed=0)\nfile.py:1"


def test_fuzzing_goes_on_with_what_is_left(pretend: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUZZ", "FUZZ_SEED", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # what is set is put back
    seed = ["fuzz", "--seed", "3"]
    assert f"--deselect={FUZZ}[0]" not in pretend(seed, {f"{FUZZ}[0]": 5, f"{FUZZ}[1]": 5}, 2)
    given = pretend([*seed, "-k", "x"], {f"{FUZZ}[2]": 5, f"{FUZZ}[3]": WRONG, f"{FUZZ}[interpreter-4]": 7})
    assert given[-3:-1] == ["-k", "x"]
    assert {f"--deselect={FUZZ}[{part}]" for part in "01"} <= {*given}
    first, second = record.rows("fuzz")
    assert (first["parts"], first["unfinished"]) == ({FUZZ: {"0": 5, "1": 5}}, "pytest exited with 2")
    assert second["cases"] == {"test_triton_backends": 5, "test_triton_backends_interpreter": 7}
    assert second["mismatches"] == {f"{FUZZ}[3]": "AssertionError: off case=Layer( seed=0)"}
    given = pretend(seed, {f"{FUZZ}[3]": 5})
    assert f"--deselect={FUZZ}[2]" in given
    assert f"--deselect={FUZZ}[3]" not in given, "it found a mismatch"
    assert not any(each.startswith("--deselect") for each in pretend(["fuzz", "--seed", "4"], {f"{FUZZ}[0]": 5}))
    for commit in ("1" * 12, "2" * 12 + "+dirty", "2" * 12 + "+dirty"):
        monkeypatch.setenv(record.COMMIT_VARIABLE, commit)
        assert not any(each.startswith("--deselect") for each in pretend(seed, {f"{FUZZ}[0]": 5}))


def test_faults_are_counted_by_kind(pretend: Callable[..., list[str]]) -> None:
    tests = {
        "tests/faults/test_faults_files.py::test_every_call[checkpoint-EIO]": 3,
        "tests/faults/test_faults_reads.py::test_mutated[model-a.json]": {"cases": 5, "kind": "model, a.json"},
        "tests/faults/test_faults_reads.py::test_mutated[model-b.json]": {"cases": 5, "kind": "model, b.json"},
        "tests/faults/test_faults_reads.py::test_what_is_enumerated": {},
    }
    pretend(["faults"], tests, 2)
    (row,) = record.rows("faults")
    assert row["faults_of_kind"] == {"files: checkpoint": 3, "reads: model, a.json": 5, "reads: model, b.json": 5}
    assert (row["faults"], row["passed"], row["unfinished"]) == (13, 4, "pytest exited with 2")


def test_gpu_tests_need_a_gpu_and_have_a_verdict_of_the_sanitizer(
    pretend: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_tests.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA GPU here"):
        record_tests.main(["gpu"])
    monkeypatch.setattr(record_tests.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "provenance", dict)
    test = f"tests/kernels/{record_tests.SANITIZER}.py::test_racecheck"
    given = pretend(["gpu", "-m", "gpu and dist"], {test: {}, "tests/kernels/test_x.py::test_y": {}})
    assert given.index("gpu and dist") > given.index("gpu and not dist"), "the last counts"
    files = [Path(each).stem for each in given if each.endswith(".py")]
    assert files[0] == record_tests.SANITIZER
    assert "test_nf4_gpu" in files
    (row,) = record.rows("gpu_tests")
    assert row["sanitizer"] == {"racecheck": "passed"}
    assert row["passed_of_file"] == {f"tests/kernels/{record_tests.SANITIZER}.py": 1, "tests/kernels/test_x.py": 1}


@pytest.mark.parametrize("kind", record_tests.KINDS)
def test_what_judged_nothing_is_not_recorded(
    kind: str, pretend: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_tests.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="none of these tests ran and nothing is recorded; pytest exited with 5"):
        pretend([kind], {}, 5)
    assert record.rows(record_tests.KINDS[kind].name) == []

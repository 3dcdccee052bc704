"""Tests that run in another process are cases of the session that asks for them."""

import os
from pathlib import Path

import pytest

CASES = """
import os
import pytest

pytestmark = pytest.mark.process("fake_driver")

@pytest.fixture(scope="module")
def opened():
    assert "OPENED" not in os.environ
    os.environ["OPENED"] = "1"
    yield os.getpid()
    del os.environ["OPENED"]

@pytest.mark.parametrize("number", [1, 2])
def test_passes(number, opened):
    assert os.environ["TEST_PROCESS"] == "fake_driver"
    assert opened == os.getpid() != {parent}

def test_fails(opened):
    print("said before")
    assert opened == 0, "the reason"

@pytest.fixture
def broken():
    raise RuntimeError("no set-up")

def test_has_no_setup(broken): ...

def test_is_skipped():
    pytest.skip("for want of time")

@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail():
    assert 0

def test_kills_its_process():
    os.abort()

@pytest.mark.thorough
def test_after(opened): ...
"""


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of tests with the plugin alone."""
    tests = str(Path(__file__).parent)
    pytester.makeconftest(f"import sys\nsys.path.append({tests!r})\npytest_plugins = 'process_cases'")
    pytester.makeini("[pytest]\nmarkers = process(name): elsewhere\n    gpu: a GPU\n    thorough: long\n")
    return pytester


@pytest.fixture
def cases(folder: pytest.Pytester) -> pytest.Pytester:
    folder.makepyfile(test_apart=CASES.replace("{parent}", str(os.getpid())))
    return folder


def run(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return folder.runpytest_inprocess(*arguments)


def test_every_outcome_is_reported_by_case(cases: pytest.Pytester) -> None:
    result = run(cases, "-rA")
    result.assert_outcomes(passed=3, failed=2, errors=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_fails*fake_driver*",
            "*AssertionError: the reason*",
            "*Captured stdout call*",
            "said before",
            "PASSED test_apart.py::test_passes[[]fake_driver-1]",
            "PASSED test_apart.py::test_passes[[]fake_driver-2]",
            "PASSED test_apart.py::test_after[[]fake_driver]",
            "SKIPPED*for want of time",
            "XFAIL test_apart.py::test_is_expected_to_fail[[]fake_driver]*",
            "ERROR test_apart.py::test_has_no_setup[[]fake_driver] - RuntimeError: no set-up",
            "FAILED test_apart.py::test_fails[[]fake_driver]*the reason*",
            "FAILED test_apart.py::test_kills_its_process[[]fake_driver]*",
        ]
    )
    result.stdout.fnmatch_lines(["*the process ended, exit code -6; its last lines:", "*Fatal Python error: Aborted"])


def test_a_file_that_cannot_be_imported_is_an_error_that_says_why(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_broken='import pytest\npytestmark = pytest.mark.process("fake_driver")\nimport nowhere\n')
    result = run(folder)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ERROR collecting test_broken.py*", "*No module named 'nowhere'*"])


def test_a_file_for_gpus_too_is_collected_in_both(folder: pytest.Pytester) -> None:
    folder.makepyfile(
        test_both="""
        import os, pytest
        pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu]
        PLACES = ["host"] if os.environ.get("TRITON_INTERPRET") == "1" else ["cuda"]
        @pytest.mark.parametrize("place", PLACES)
        def test_it(place):
            assert place == "host"
        """
    )
    result = run(folder, "--collect-only", "-q")
    result.stdout.fnmatch_lines(["test_both.py::test_it[[]interpreter-host]", "test_both.py::test_it[[]cuda]"])
    run(folder, "-m", "not gpu").assert_outcomes(passed=1, deselected=1)

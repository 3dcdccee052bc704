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


BOTH = """
import os, pytest
pytestmark = [pytest.mark.process("fake_driver"), pytest.mark.gpu]
PLACES = ["there"] if "TEST_PROCESS" in os.environ else ["here"]
@pytest.mark.parametrize("place", PLACES)
def test_it(place): ...
"""
BROKEN = """
import pytest
pytestmark = pytest.mark.process("fake_driver")
import nowhere
"""


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of tests with the plugin alone."""
    tests = str(Path(__file__).parent)
    pytester.makeconftest(f"import sys\nsys.path.append({tests!r})\npytest_plugins = 'process_cases'")
    pytester.makeini("[pytest]\nmarkers = process(name): elsewhere\n    gpu: a GPU\n    thorough: long\n")
    pytester.makepyfile(test_apart=CASES.replace("{parent}", str(os.getpid())), test_both=BOTH, test_broken=BROKEN)
    return pytester


def test_every_outcome_is_reported_by_case(folder: pytest.Pytester) -> None:
    """A file for GPUs, too, is collected here as well, as such; one that cannot be imported says why."""
    result = folder.runpytest_inprocess("-rA", "-m", "not gpu", "--continue-on-collection-errors")
    result.assert_outcomes(passed=4, failed=2, errors=2, skipped=1, xfailed=1, deselected=1)
    result.stdout.fnmatch_lines(["*ERROR collecting test_broken.py*", "*No module named 'nowhere'*"])
    result.stdout.fnmatch_lines(
        [
            "*test_fails*fake_driver*",
            "*AssertionError: the reason*",
            "*Captured stdout call*",
            "said before",
            "PASSED test_apart.py::test_passes[[]fake_driver-1]",
            "PASSED test_apart.py::test_passes[[]fake_driver-2]",
            "PASSED test_apart.py::test_after[[]fake_driver]",
            "PASSED test_both.py::test_it[[]fake_driver-there]",
            "SKIPPED*for want of time",
            "XFAIL test_apart.py::test_is_expected_to_fail[[]fake_driver]*",
            "ERROR test_apart.py::test_has_no_setup[[]fake_driver] - RuntimeError: no set-up",
            "FAILED test_apart.py::test_fails[[]fake_driver]*the reason*",
            "FAILED test_apart.py::test_kills_its_process[[]fake_driver]*",
        ]
    )
    result.stdout.fnmatch_lines(["*the process ended, exit code -6; its last lines:", "*Fatal Python error: Aborted"])

"""What is recorded of a run of the GPU tests, on tests of our own."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_tests
import pytest

TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.fixture
def broken(): raise RuntimeError("no luck")
def test_error(broken): pass
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
"""
CODE = """
import sys, json, pytest
sys.path.insert(0, sys.argv[1])
from gpu_tests import Outcomes
outcomes = Outcomes()
pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[2]], plugins=[outcomes])
print("SUMMARY" + json.dumps(outcomes.summary()))
"""


def test_each_outcome_is_counted_and_what_did_not_pass_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / f"{gpu_tests.SANITIZER}.py").write_text(TESTS)
    here = Path(gpu_tests.__file__).parent
    command = [sys.executable, "-c", CODE, str(here), str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(out.split("SUMMARY")[1])
    counts = {key: found[key] for key in ("passed", "failed", "skipped")}
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert list(found["passed_of_file"].values()) == [1]
    assert found["sanitizer"] == {"good": "passed", "bad": "failed", "error": "failed", "skipped": "skipped"}
    reasons = {name.split("::")[-1]: reason for name, reason in found["not_passed"].items()}
    assert reasons.keys() == {"test_bad", "test_error", "test_skipped"}
    assert "not here" in reasons["test_skipped"]
    assert "no luck" in out  # said when it happens, not only at the end


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py"])
    with pytest.raises(SystemExit, match="no CUDA GPU here"):
        gpu_tests.main()

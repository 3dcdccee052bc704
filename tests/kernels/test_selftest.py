"""The self-test of a backend that never ran on its GPU: what it finds, and what one that hangs or crashes comes to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_selftests
import triton
from helpers import HANGS, raises_one_line

from tilemoe.cli import doctor_checks
from tilemoe.files import digest_of_sources
from tilemoe.kernels.choose import choose_experts
from tilemoe.kernels.experts import registry, selftest
from tilemoe.kernels.experts.blackwell.backend import BlackwellBackend
from tilemoe.kernels.experts.hopper import backend as hopper_backend
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.runtime import tracing
from tilemoe.runtime.device import Device, nvidia_smi
from tilemoe.runtime.verdict import Verdict, verdict_of
from tilemoe.testing.selftest import problem

CPU, B200 = torch.device("cpu"), torch.device("cuda", 0)
KEY = {"gpu": "B200", "driver": "580.1"}
ENVIRONMENT = dict(os.environ)
HaveGpu = Callable[[str, tuple[int, int]], None]
WRONG = "balanced (d, n (16, 8), torch.bfloat16, swiglu, concatenated): AssertionError: dw1: RMS-re"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEMOE_CACHE", str(tmp_path))
    for cached in (selftest.why_not, tracing._warn):
        cached.cache_clear()
    yield tmp_path
    selftest.why_not.cache_clear()


def saying(verdict: Verdict, first: str = "") -> list[str]:
    """A command that notes that it ran, does what ``first`` says and ends with a verdict."""
    text = json.dumps(asdict(verdict))
    return [sys.executable, "-c", f"open('ran', 'a').write('x')\n{first}\nprint('noise')\nprint({text!r})"]


def judged(command: list[str], seconds: float = HANGS, **options: Any) -> Verdict:
    return verdict_of("toy", options.pop("key", KEY), command, ENVIRONMENT, seconds, **options)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often `saying` ran."""
    monkeypatch.chdir(tmp_path)
    return lambda: len(Path("ran").read_text()) if Path("ran").exists() else 0


def is_alive(pid: int) -> bool:
    """Whether the process runs. One that has ended, and that its parent has not reaped yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("verdict", [Verdict(None), Verdict("dw1 is off")], ids=["right", "wrong"])
def test_a_verdict_is_kept_for_its_key_and_reached_again_when_asked(verdict: Verdict, runs: Any, cache: Path) -> None:
    command = saying(verdict)
    turns: list[dict[str, Any]] = [{}, {"key": KEY | {"driver": "580.2"}}, {"again": True}]
    for number, options in enumerate(turns, start=1):
        for _ in range(1 if "again" in options else 2):
            assert judged(command, **options).why == verdict.why
        assert runs() == number
    kept = json.loads(min((cache / "verdicts").glob("toy-*.json")).read_text())
    assert kept["why"] == verdict.why
    assert kept["key"]["gpu"] == "B200"


@pytest.mark.parametrize("damaged", ["", "[]", '{"why": 3, "is_kept": true, "seconds": 1}', "{"])
def test_a_damaged_file_is_replaced(damaged: str, runs: Any, cache: Path) -> None:
    judged(saying(Verdict("old")))
    (path,) = (cache / "verdicts").glob("toy-*.json")
    path.write_text(damaged)
    assert judged(saying(Verdict(None))).why is None
    assert json.loads(path.read_text())["why"] is None
    assert runs() == 2


def test_what_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, file=open('pids', 'w', 1)); "
    code += "import os; print(os.getpid(), file=open('pids', 'a')); time.sleep(1000)"
    found = judged(["sh", "-c", f'cd {tmp_path} && exec {sys.executable} -c "{code}"'], seconds=2)
    assert (found.why, found.is_kept) == ("it did not end within 2 s and was killed", True)
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    end = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("first", "why", "is_kept"),
    [
        ("import os; os.kill(os.getpid(), 9)", "it ended by SIGKILL: it printed nothing", True),
        ("import os; os.abort()", "it ended by SIGABRT: ", True),
        ("import os; os._exit(3)", "it ended with status 3: it printed nothing", False),
        ("import nowhere", "it ended with status 1: ModuleNotFoundError: No module named 'nowhere'", False),
    ],
)
def test_what_crashes_is_no_pass(first: str, why: str, is_kept: bool, runs: Any) -> None:
    """A signal is of the kernels and is kept; what Python itself ends with is of the installation and is not."""
    for _ in range(2):
        found = judged(saying(Verdict(None), first))
        assert found.why is not None
        assert found.why.startswith(why)
    assert found.is_kept == is_kept
    assert runs() == (1 if is_kept else 2)


def test_processes_of_a_host_try_once(runs: Any) -> None:
    found: list[Verdict] = []
    command = saying(Verdict(None), "import time; time.sleep(0.5)")
    threads = [threading.Thread(target=lambda: found.append(judged(command))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.why for each in found] == [None] * 4
    assert runs() == 1


def test_who_waits_does_so_for_a_bounded_time_and_a_killed_process_holds_nothing(runs: Any, cache: Path) -> None:
    judged(saying(Verdict(None)))
    (path,) = (cache / "verdicts").glob("toy-*.json")
    holding = "import sys, time; from tilemoe.files import only_one_process; from pathlib import Path\n"
    holding += "with only_one_process(Path(sys.argv[1])):\n  print('held', flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", holding, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        found = judged(saying(Verdict(None)), seconds=0.1, again=True)
        holder.kill()
    assert found == Verdict(f"{path}: another process has held its lock for 0.2 s", is_kept=False)
    assert judged(saying(Verdict("now it is off")), again=True).why == "now it is off"
    assert runs() == 2


def test_a_hindrance_counts_where_nothing_is_kept_and_a_folder_that_is_none(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged(saying(Verdict(None)), hindrance="exclusive") == Verdict("exclusive", is_kept=False)
    assert runs() == 0
    judged(saying(Verdict(None)))
    assert judged(saying(Verdict(None)), hindrance="exclusive").why is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEMOE_CACHE", str(tmp_path / "file"))
    found = judged(saying(Verdict(None)))
    assert found.why is not None
    assert found.why.endswith("set TILEMOE_CACHE to a folder that can")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toys by name, until the test ends."""
    toys = {toy.name: toy for toy in (toy_selftests.Wrong, toy_selftests.NotRepeatable, toy_selftests.NotAdding)}
    monkeypatch.setattr(registry, "_BACKENDS", registry._BACKENDS | toys)
    yield
    registry._made.cache_clear()


@pytest.mark.usefixtures("registered")
def test_wrong_numbers_and_other_bits_are_found() -> None:
    assert str(problem(toy_selftests.Wrong(), CPU)).startswith(WRONG)
    assert "AssertionError: accumulated dw2 is off by 5" in str(problem(toy_selftests.NotAdding(), CPU))
    assert "AssertionError: not repeatable, run 1: " in str(problem(toy_selftests.NotRepeatable(), CPU))


@pytest.mark.parametrize(("name", "why"), [("Right", "None"), ("Wrong", WRONG)])
def test_the_self_test_is_run_once_in_its_process(
    name: str, why: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this very package, though another lies in the present folder."""
    (cache / "tilemoe").mkdir()
    (cache / "tilemoe" / "__main__.py").write_text("raise SystemExit('another')")
    monkeypatch.chdir(cache)
    for _ in range(2):
        found = selftest.verdict(f"toy_selftests:{name}", CPU)
        assert str(found.why).startswith(why)
        assert found.is_kept
    (path,) = (cache / "verdicts").glob("toy*.json")
    kept = json.loads(path.read_text())
    assert kept["seconds"] == found.seconds
    assert kept["key"]["triton"] == triton.__version__


def test_too_little_memory_says_nothing_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, of which no alarm is asked."""
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    found = doctor_checks.judge("toy_selftests:OutOfMemory", "cpu", 7)
    assert found == Verdict("cpu has too little free memory for it", is_kept=False)
    assert alarms == [7]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str] | None]:
    """What nvidia-smi answers, of a B200 that is not here."""
    answers: list[list[str] | None] = [["580.1", "Default"]]
    b200 = SimpleNamespace(name="B200", major=10, minor=0, uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: b200)
    monkeypatch.setattr(selftest, "nvidia_smi", lambda *fields, gpu: answers[-1] if gpu == "GPU-12-34" else None)
    return answers


def test_a_gpu_for_one_process_is_not_tried(asked: list[list[str] | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the verdict is there, from before."""
    tried = list[Any]()
    monkeypatch.setattr(selftest, "verdict_of", lambda *given: tried.append(given) or Verdict(None))
    assert selftest.why_not("blackwell", B200) is None
    asked.append(["580.1", "Exclusive_Process"])
    selftest.verdict("blackwell", B200)
    (name, key, command, environment, seconds, hindrance, _), (*_, in_exclusive_mode, _) = tried
    assert key.items() > {"gpu": "B200", "capability": "10.0", "driver": "580.1", "backend": "blackwell"}.items()
    assert command[-6:] == ["--backend", "blackwell", "--device", "cuda:0", "--seconds", str(seconds)]
    assert (name, environment[selftest.SETTING], hindrance) == ("blackwell", "untested", None)
    assert "whose compute mode is Exclusive_Process; run nvidia-smi -c DEFAULT" in in_exclusive_mode
    asked.append(None)
    assert selftest.verdict("blackwell", B200) == Verdict("nvidia-smi does not report the driver's version", False)


def test_the_sources_are_in_the_key(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("one")
    before = digest_of_sources(tmp_path)
    (tmp_path / "kernel.py").write_text("another")
    assert digest_of_sources(tmp_path) != before


def test_nvidia_smi_is_asked_by_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\n[ "$4" = GPU-1 ] && echo 580.1, Default || exit 6')
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert nvidia_smi("driver_version", "compute_mode", gpu="GPU-1") == ["580.1", "Default"]
    assert nvidia_smi("driver_version") is None


@pytest.fixture
def selftests(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """The last of them is what each self-test says."""
    verdicts = [Verdict(None)]
    monkeypatch.setattr(selftest, "verdict", lambda backend, device: verdicts[-1])
    return verdicts


@pytest.mark.parametrize(
    ("version", "setting", "verdict", "name", "said"),
    [
        ("3.9.0", None, None, "triton", "the Blackwell kernels are untested; TILEMOE_BLACKWELL=1 uses them if they"),
        ("3.9.0", "1", None, "blackwell", "TILEMOE_BLACKWELL turns them on"),
        ("3.9.0", "1", "dw1 is off", "triton", "their self-test has not passed: dw1 is off; tilemoe doctor"),
        ("3.9.0", "untested", "dw1 is off", "blackwell", "TILEMOE_BLACKWELL turns them on"),
        ("3.8.0", "1", None, "triton", "the Blackwell kernels need Triton 3.6.x or 3.9.x, not 3.8.0"),
        ("3.6.0", "1", None, "torch", "Triton 3.6.0 can be wrong on capability 10.x: pip install 'triton>=3.7.1'"),
        ("3.6.0", None, None, "torch", "Triton 3.6.0 can be wrong on capability 10.x"),
    ],
)
def test_blackwell_kernels_serve_where_they_are_turned_on_and_passed(
    have_gpu: HaveGpu,
    selftests: list[Verdict],
    version: str,
    setting: str | None,
    verdict: str | None,
    name: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the portable kernels, or PyTorch, and one warning for all calls, if they were asked for."""
    have_gpu(version, (10, 0))
    selftests.append(Verdict(verdict))
    monkeypatch.delenv(selftest.SETTING, raising=False)
    if setting is not None:
        monkeypatch.setenv(selftest.SETTING, setting)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype, widths in ((torch.bfloat16, ()), (torch.bfloat16, (64, 32)), (torch.float16, (128, 64))):
            chosen = choose_experts(B200, dtype, widths)
            assert chosen.name == chosen.impl.name == name
            assert said in chosen.reason
        assert choose_experts(B200, torch.float32).name == "torch"
        if name != "torch":
            assert choose_experts(B200, torch.bfloat16, (36, 20)).name == "torch"
    lines = [str(warning.message) for warning in caught]
    expected = f"TILEMOE_BLACKWELL=1: the Blackwell kernels are not used: {said}"
    assert len(lines) == (setting == "1" and name != "blackwell")
    assert all(line.startswith(expected) for line in lines)
    named = backend_named("blackwell").why_unsupported(B200, torch.bfloat16)
    assert (named is None) == ((verdict is None and version == "3.9.0") or setting == "untested")


def test_other_ranks_of_a_host_say_nothing_and_who_names_the_kernels_is_refused(
    have_gpu: HaveGpu, selftests: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpu("3.9.0", (10, 0))
    selftests.append(Verdict("it did not end within 600 s and was killed"))
    monkeypatch.setenv(selftest.SETTING, "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_experts(B200, torch.bfloat16).name == "triton"
    monkeypatch.setattr(hopper_backend, "device_of", lambda t: Device(100, 227 * 1024, 148))
    rows, plan = SimpleNamespace(device=B200, dtype=torch.bfloat16), SimpleNamespace(capacity=8)
    device_of_kernel = BlackwellBackend()._device
    why = "their self-test has not passed: it did not end within .* s and was killed; .*"
    with raises_one_line(f"kernels='blackwell': {why} pass kernels=None or"):
        device_of_kernel("down_proj", rows, plan, 64, 32)  # type: ignore[arg-type]
    selftests.append(Verdict(None))
    selftest.why_not.cache_clear()
    assert device_of_kernel("down_proj", rows, plan, 64, 32) is not None  # type: ignore[arg-type]


def test_a_setting_that_is_none_is_named(have_gpu: HaveGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpu("3.9.0", (10, 0))
    monkeypatch.setenv(selftest.SETTING, "yes")
    with raises_one_line("TILEMOE_BLACKWELL must be 0, 1 or untested, got 'yes'"):
        choose_experts(B200, torch.bfloat16)

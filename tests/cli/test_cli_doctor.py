"""``tilemoe doctor``: what it says of this machine, and of one where something is wrong."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilemoe.bench import record
from tilemoe.cli import doctor_checks
from tilemoe.cli.doctor import _gemms
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.models.presets import MOE_PRESETS
from tilemoe.runtime.verdict import Verdict

CPU = torch.device("cpu")
Run, Fails = Callable[..., tuple[int, str, str]], Callable[..., str]


def test_it_says_what_serves_and_why_and_that_it_works(run: Run, fails: Fails) -> None:
    status, out, _ = run("doctor")
    assert status == 0
    assert f"torch {torch.__version__.partition('+')[0]}" in out
    assert "experts in bfloat16: torch (plain PyTorch" in out
    assert "router: torch (Triton does not run on cpu)" in out
    assert "plan: torch (" in out
    no = "no, PyTorch's matrix products add in an order that depends on the number of rows"
    for what in ("the experts by torch", "the experts by torch_fp8", "experts in NF4 by torch"):
        assert f"  batch invariance of {what}: {no}\n" in out
    assert f"batch invariance of the router's logits: {no}" in out
    assert "self-test, cpu, torch.float32, kernels torch: output and gradients agree with the reference\n" in out
    assert out.splitlines()[-1] == "usable"
    assert "--tokens must be >= 1" in fails("doctor", "--tokens", "0")
    assert "--preset must be one of" in fails("doctor", "--preset", "nope")


def test_json_is_a_row_of_results_with_what_the_lines_say(run: Run) -> None:
    status, out, _ = run("doctor", "--preset", "qwen3-next", "--tokens", "64", "--json")
    assert (status, out.count("\n")) == (0, 1)
    row = json.loads(out)
    assert {"commit", "time", "gpu", "python", "torch", "triton"} <= row.keys()
    assert (row["preset"], row["tokens"], row["usable"]) == ("qwen3-next-80b-a3b", 64, True)
    assert row["packages"]["torch"] == torch.__version__
    lines = run("doctor", "--preset", "qwen3-next", "--tokens", "64")[1].splitlines()
    for device, its in row["devices"].items():
        at = lines.index(f"{device}: {its['hardware']}") + 1
        assert lines[at : at + len(its["choices"])] == [f"  {choice}" for choice in its["choices"]]
    assert [finding["line"] for finding in row["findings"]] == lines[-1 - len(row["findings"]) : -1]
    assert 0 < row["self_test_seconds"] < 60


def test_a_bug_report_has_the_machine_in_a_block(run: Run, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEBUG", "1")
    monkeypatch.setenv("API_TOKEN", "hidden")
    status, out, _ = run("doctor", "--report", "--no-self-test")
    before, block, after = out.split("```")
    assert (status, before.count("### "), after) == (0, 2, "\n")
    assert f"commit {record.commit()}" in block
    assert "\nTRITON_DEBUG=1\n" in block
    assert "experts in bfloat16: torch (plain PyTorch" in block
    assert "hidden" not in out
    assert "leave one of them out" in fails("doctor", "--report", "--json")


def test_json_of_a_machine_that_is_not_usable_or_not_tried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("doctor", "--json", "--no-self-test")
    found = json.loads(out)
    assert (status, found["usable"], found["self_test_seconds"]) == (0, None, None)
    monkeypatch.setattr(doctor_checks, "driver", lambda: "580.1")
    status, out, err = run("doctor", "--json", "--no-self-test")
    found = json.loads(out)
    assert (status, found["usable"], found["driver"]) == (2, False, "580.1")
    assert [finding["is_fatal"] for finding in found["findings"]] == [True]
    assert found["findings"][0]["advice"].startswith("install a PyTorch")
    assert err.startswith("tilemoe: error: 1 of the findings")


def test_wrong_numbers_end_with_exit_status_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchBackend.up_proj_wgrad

    def wrong(self: TorchBackend, *args: Any) -> Tensor:
        return 1.01 * right(self, *args)

    monkeypatch.setattr(TorchBackend, "up_proj_wgrad", wrong)
    status, out, err = run("doctor")
    assert status == 2
    assert "WRONG (AssertionError: dw1: RMS-relative error" in out
    assert "what to do: pass kernels='torch'" in out
    assert err == "tilemoe: error: 1 of the findings above keep this machine from being used; do what they say\n"


def test_what_is_off_on_a_machine_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with a Triton on which the Hopper kernels have not run, and a cache that cannot be written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(doctor_checks, "select_kernels", lambda *_: SimpleNamespace(name="triton", reason="3.5"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor_checks, "has_triton", lambda: True)
    kernels, cache = doctor_checks.environment("580")
    assert "the Hopper kernels are not used (3.5)" in kernels.line
    assert (str(kernels.advice)[:25], kernels.is_fatal) == ("pip install triton==3.6.0", False)
    assert cache.is_fatal
    monkeypatch.setattr(doctor_checks, "has_triton", lambda: False)
    missing, _ = doctor_checks.environment("580")
    assert missing.line.startswith("Triton is not installed")


def test_a_b200_with_too_old_a_triton_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    for name, is_there, said in (
        ("torch", True, ["cuda:0: the Triton kernels are not used (3.6)"]),
        ("torch", False, ["Triton is not installed: on cuda:0 PyTorch's slower kernels serve"]),
        ("triton", True, []),
    ):
        monkeypatch.setattr(
            doctor_checks, "select_kernels", lambda *_, its=name: SimpleNamespace(name=its, reason="3.6")
        )
        monkeypatch.setattr(doctor_checks, "has_triton", lambda its=is_there: its)
        found = [finding for finding in doctor_checks.environment("580") if "Triton" in finding.line]
        assert [finding.line for finding in found] == said
        assert {finding.advice for finding in found} <= {"pip install 'triton>=3.7.1'"}


def test_recorded_speeds_are_the_newest_of_the_results() -> None:
    for gpu, told in doctor_checks.recorded_speeds().items():
        row = record.newest("layer", "case", mode=told["mode"], gpu=gpu, contestant="tilemoe")[told["case"]]
        assert (told["forward_ms"], told["backward_ms"]) == (row["forward_ms"]["median"], row["backward_ms"]["median"])
        assert told["commit"] == row["commit"]


@pytest.mark.parametrize("why", [None, "it was killed"])
def test_a_b200_is_told_how_the_kernels_that_never_ran_did(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again, as someone asks; what does not pass makes nothing unusable."""
    asked: list[Any] = []
    monkeypatch.setattr(doctor_checks, "verdict", lambda *given, **options: asked.append(options) or Verdict(why))
    found = doctor_checks.unproven(torch.device("cuda", 0))
    result = (
        "passed in 0 s; TILEMOE_BLACKWELL=1 lets them serve" if why is None else f"NOT PASSED ({why}); other kernels"
    )
    assert f"cuda:0, kernels blackwell, compiled and emulated but never run by their authors: {result}" in found.line
    assert (asked, found.is_fatal) == ([{"again": True}], False)
    assert "tilemoe bench confirm" in str(found.advice)


def test_a_gemm_has_its_hopper_kernel_or_why_not() -> None:
    lines = _gemms(MOE_PRESETS["olmoe-1b-7b"])
    assert len(lines) == 6
    assert lines[0] == "up_proj_act: gemm_gather_act:up_proj_act_kernel, tile 128 x 256, 4 stages"
    assert lines[-1] == "up_proj_wgrad: triton (dh is wider than 2047)"


def test_one_backend_is_tested_in_this_process_by_name(run: Run, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(doctor_checks, "problem", lambda backend, device: f"{backend.name} on {device}")
    status, out, _ = run("doctor", "--backend", "torch", "--device", "cpu")
    assert (status, json.loads(out)["why"]) == (0, "torch on cpu")
    assert "kernels must be None or one of" in fails("doctor", "--backend", "nope", "--device", "cpu")
    for missing in ("nowhere:Class", "tilemoe:Nothing", "tilemoe:MoEConfig"):
        message = fails("doctor", "--backend", missing, "--device", "cpu")
        assert f"--backend {missing}: " in message
        assert "give a name, or module:Class of a Backend" in message
    assert "--device cuda:99: torch sees " in fails("doctor", "--backend", "torch", "--device", "cuda:99")
    assert "--seconds must be" in fails("doctor", "--backend", "torch", "--seconds", "0")
    assert "--device and --seconds are for --backend" in fails("doctor", "--device", "cpu")

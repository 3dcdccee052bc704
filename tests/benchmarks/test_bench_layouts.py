"""The layouts benchmark on CPU, by the host's clock: what its gate stops, its rows and its matrix."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import layouts
import profiles
import pytest
import torch
from layout_gate import Cell
from torch import Tensor

import tilemoe
from tilemoe.bench import gpu_time, record, timing
from tilemoe.shape import MoEShape

SHAPE = MoEShape(192, 32, 24, 6, 2)
QUICK = ("--device", "cpu", "--rounds", "2", "--milliseconds", "0.1", "--spell", "0.1")


@pytest.fixture(autouse=True)
def toys(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "TOYS", {"toy": SHAPE})


def made(cell: Cell) -> layouts.Layers:
    torch.manual_seed(0)
    return layouts.Layers(SHAPE, torch.device("cpu"), torch.bfloat16, None)


KNOWN = [name for name, cell in layouts.CELLS.items() if cell.activation in tilemoe.config.ACTIVATIONS]


@pytest.mark.parametrize("name", KNOWN)
def test_each_cell_passes_its_gate(name: str) -> None:
    cell = layouts.CELLS[name]
    verdict, _ = layouts.check(made(cell), cell, torch.float64)
    assert verdict.problem is None
    names = {"o", "dx", "dscores", "dw1", "dw2"} | ({"db1", "db2"} if cell.bias else set())
    assert verdict.errors.keys() == verdict.eager.keys() == names


def spoilt(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    right = tilemoe.moe
    return lambda **operands: change(right(**operands))


WRONG = {
    "zeros": (lambda out: out * 0, "o is off by"),
    "rounded once more than eager": (lambda out: out.to(torch.float8_e4m3fn).to(out.dtype), "o is off by"),
    "rows of other tokens": (lambda out: out.roll(1, dims=0), "o is off by"),
    "not a number": (lambda out: out * float("nan"), "is off by nan"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_cell_is_recorded_and_not_timed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, what = WRONG[wrong]
    monkeypatch.setattr(tilemoe, "moe", spoilt(change))
    monkeypatch.setattr(gpu_time, "rounds", None)  # nobody may call it
    layouts.main([*QUICK, "--cells", "plain,bias"])
    assert all(what in row["problem"] for row in record.rows("layouts"))
    assert not any("fwd_ms" in row for row in record.rows("layouts"))


def test_biases_and_gate_and_up_the_other_way_round_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tilemoe.moe
    monkeypatch.setattr(tilemoe, "moe", lambda **given: right(**{**given, "gate_up": "concatenated"}))
    layers = made(Cell())
    assert "off by" in str(layouts.check(layers, Cell(gate_up="interleaved"), torch.float32)[0].problem)
    monkeypatch.setattr(tilemoe, "moe", lambda **given: right(**{**given, "b2": given["b2"] * 1.1}))
    assert "off by" in str(layouts.check(layers, Cell(bias=True), torch.float32)[0].problem)


def test_an_error_beyond_eager_s_is_wrong_below_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tilemoe.moe
    monkeypatch.setattr(tilemoe, "moe", lambda **given: 1.01 * right(**given))
    problem = layouts.check(made(Cell()), Cell(), torch.float32)[0].problem
    assert problem is not None
    assert "eager PyTorch by" in problem


def test_a_gradient_with_other_strides_is_reported() -> None:
    layers = made(Cell())
    assert not layouts.check(layers, Cell(), torch.float32)[1]

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, w: Tensor) -> Tensor:
            return w.view_as(w)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad.transpose(1, 2).contiguous().transpose(1, 2)

    right = tilemoe.moe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilemoe, "moe", lambda **given: right(**{**given, "w1": Copied.apply(given["w1"])}))
        assert layouts.check(layers, Cell(), torch.float32)[1]


def test_rows_and_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    layouts.main([*QUICK, "--cells", "plain,transposed,gpt-oss,relu2,geglu"])
    rows = {row["cell"]: row for row in record.rows("layouts")}
    assert list(rows) == ["plain", "transposed", "gpt-oss", "relu2", "geglu"]
    for row in rows.values():
        assert row["problem"] is None
        assert row["held"] == (row["ratio_fwd"] <= row["bounds"][0] and row["ratio_bwd"] <= row["bounds"][1])
        assert row["errors"].keys() == row["eager_errors"].keys()
        assert {"size", "dtype", "kernels", "copies", "plain_fwd_ms", "commit", "gpu"} <= row.keys()
    assert rows["plain"]["ratio_fwd"] == 1.0
    assert rows["geglu"]["bounds"] == [1.08, 1.15]
    capsys.readouterr()
    layouts.main(["--report"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| bf16 | toy |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in rows]
    assert lines[2].endswith(" ms |")


def test_ungated_cells_are_compared_per_flop() -> None:
    layers = made(Cell())
    found = {"plain": [[2.0, 4.0]] * 2, "relu2": [[2.0, 4.0]] * 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_time, "rounds", lambda steps, *others: found)
        options = argparse.Namespace(rounds=2, spell=0.0, milliseconds=0.0)
        row = layouts.measure(layers, ["relu2"], options)["relu2"]
    assert (row["ratio_fwd"], row["ratio_bwd"]) == (1.5, 1.5)  # two thirds of the FLOPs in the same time


def test_kernels_of_a_cell_stand_beside_the_plain_layer_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "of_kernels", lambda work: [(str(work()), 5.0, 10)])
    layouts.main([*QUICK, "--kernels", "transposed"])
    printed = capsys.readouterr().out
    assert "toy plain: 1.000 ms of kernels a step" in printed
    assert "toy transposed: 1.000 ms of kernels a step" in printed
    assert not (record.RESULTS / "layouts.jsonl").exists()


def test_an_unknown_cell_is_named() -> None:
    with pytest.raises(SystemExit, match="no cell called 'turnd'; known are all, plain"):
        layouts.main([*QUICK, "--cells", "turnd"])


def test_a_window_has_the_lead_that_its_host_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching takes 2 ms, computing 1: the sleep covers what the host falls behind by in the whole window."""
    slept: list[float] = []
    monkeypatch.setattr(gpu_time, "sleep", slept.append)

    def step() -> list[timing.Event]:
        time.sleep(2e-3)
        return [SimpleNamespace(elapsed_time=lambda other: 1.0)] * 2

    assert gpu_time.rounds({"a": step}, 1, 4.0, 6.0) == {"a": [[1.0]]}
    assert slept[-1] >= 1.5 * (2.0 + 10 * 1.0)

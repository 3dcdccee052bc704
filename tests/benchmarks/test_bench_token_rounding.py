"""Token rounding's benchmark on toy cases: what it measures, records and refuses to time, without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import token_rounding
import torch

import tilemoe
from tilemoe.bench import peers, record, timing
from tilemoe.config import ROUNDING_MODES, TokenRounding
from tilemoe.routing.topk import Routing, route

TOY = ["--device", "cpu", "--rounds", "1", "--cases", "toy-E8"]


@pytest.fixture(autouse=True)
def short(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SUSTAINED_MS", 1.0)


def test_a_toy_is_measured_recorded_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    token_rounding.main([*TOY, "--modes", "nearest,down"])
    rows = {row["contestant"]: row for row in record.rows("token_rounding")}
    assert list(rows) == ["top-K", "nearest", "down"]
    for row in rows.values():
        assert (row["case"], row["kernels"], row["kernel_set"]) == ("toy-E8", "chosen", "torch")
        for what in (*token_rounding.WHOLE, *token_rounding.PARTS, "total"):
            assert row[f"{what}_ms"]["median"] > 0
        assert row["rows"] == rows["top-K"]["rows"] + row["added"] - row["dropped"]
        assert row["host_ms"] > 0
    assert rows["top-K"]["waste_percent"] > rows["nearest"]["waste_percent"] == rows["down"]["added"] == 0
    assert rows["top-K"]["total_speedup"] == 1.0
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if ": round " not in line]
    assert lines == [f"toy-E8 chosen {name}" for name in rows]


def layer_of(mode: str) -> tuple[tilemoe.MoE, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shape = token_rounding.TOYS["toy-E8"]
    weights = peers.make_weights(shape, torch.device("cpu"), torch.float32)
    layer = token_rounding.build(shape, weights, TokenRounding(mode, 16), None)  # type: ignore[arg-type]
    x = torch.randn(shape.num_tokens, shape.hidden_size)
    return layer, x, torch.randn_like(x)


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_a_right_contestant_is_timed(mode: str) -> None:
    layer, x, do = layer_of(mode)
    assert token_rounding.problem_of(layer, x, do) is None


def _spoilt(change: Callable[[Routing], Routing]) -> Callable[..., Routing]:
    """`route`, whose second result in a check, that of the reference, is right."""
    calls: list[int] = []

    def found(logits: torch.Tensor, cfg: tilemoe.MoEConfig, **more: object) -> Routing:
        calls.append(1)
        routing = route(logits, cfg, **more)  # type: ignore[arg-type]
        return change(routing) if len(calls) == 1 else routing

    return found


def _swapped(routing: Routing) -> Routing:
    """The first row is another token's."""
    token_of_row = routing.plan.token_of_row.clone()
    token_of_row[0] = (token_of_row[:16].max() + 1) % 256
    return replace(routing, plan=replace(routing.plan, token_of_row=token_of_row))


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is 1% too large."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dx: torch.Tensor) -> torch.Tensor:
        return 1.01 * dx


WRONG_ROUTING = {
    "a tile or more": lambda r: replace(r, tokens_per_expert=r.tokens_per_expert + 16),
    "no multiple of the tile": lambda r: replace(r, tokens_per_expert=r.tokens_per_expert + 1),
    "the scores are not": lambda r: replace(r, scores=1.01 * r.scores),
    "pairs are not those of plain PyTorch": _swapped,
    "gradient of the logits is off": lambda r: replace(r, scores=_Scaled.apply(r.scores)),
}


@pytest.mark.parametrize("message", WRONG_ROUTING)
def test_wrong_routing_is_not_timed(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, _ = layer_of("nearest")
    logits = layer.router(x).logits.detach()
    monkeypatch.setattr(tilemoe, "route", _spoilt(WRONG_ROUTING[message]))
    monkeypatch.setattr(token_rounding, "MAX_OTHER_PAIRS", 0)
    assert message in str(token_rounding.problem_of_routing(logits, layer.cfg))


def test_wrong_experts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, do = layer_of("nearest")
    routing = route(layer.router(x).logits.detach(), layer.cfg)
    arguments = (layer, x, do, routing.plan, routing.scores)
    assert token_rounding.problem_of_experts(*arguments) is None
    right, calls = tilemoe.moe, []

    def wrong(*args: object, **more: object) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = right(*args, **more)  # type: ignore[arg-type]
        return torch.cat([0.5 * out[:16], out[16:]]) if len(calls) == 1 else out  # of some tokens

    monkeypatch.setattr(tilemoe, "moe", wrong)
    assert "output is off by" in str(token_rounding.problem_of_experts(*arguments))


def test_a_wrong_mode_is_left_out_and_the_others_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = token_rounding.problem_of

    def only_down(layer: tilemoe.MoE, *args: object) -> str | None:
        rounding = layer.cfg.rounding
        wrong = rounding is not None and rounding.mode == "nearest"
        return "made up" if wrong else right(layer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(token_rounding, "problem_of", only_down)
    token_rounding.main([*TOY, "--modes", "nearest,down"])
    assert "nearest is left out: made up" in capsys.readouterr().out
    found = [row["contestant"] for row in record.rows("token_rounding")]
    assert found == ["top-K", "down"]


def test_waste_is_what_padding_adds() -> None:
    assert token_rounding.waste(torch.tensor([16, 32, 0]), 16) == 0.0
    assert token_rounding.waste(torch.tensor([8, 8]), 16) == 100.0


def test_ratios_are_against_top_k() -> None:
    def sample(routing: float, experts: float) -> dict[str, float]:
        parts = {**dict.fromkeys(token_rounding.PARTS, 1e-9), "routing": routing, "experts": experts}
        return {**parts, "forward": routing + experts, "backward": 1e-9}

    samples = {"top-K": [sample(1.0, 10.0)], "nearest": [sample(1.5, 8.0)]}
    row = token_rounding.summarise(samples, dict.fromkeys(samples, torch.tensor([16, 16])), 16)["nearest"]
    assert row["total_speedup"] == pytest.approx(11 / 9.5, abs=1e-4)
    assert row["routing_percent"] == pytest.approx(100 * 1.5 / 9.5, abs=1e-3)


@pytest.mark.parametrize(("option", "message"), [("--cases", "no case called 'x'"), ("--modes", "no mode called 'x'")])
def test_an_unknown_name_is_one_line(option: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        token_rounding.main(["--device", "cpu", option, "x"])

"""Token rounding's benchmarks on toy cases: what they measure, record, print and draw without a GPU."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import rounding_gate
import rounding_quality
import rounding_report
import token_rounding
import torch

import tilemoe
from tilemoe.bench import peers, record
from tilemoe.config import ROUNDING_MODES, TokenRounding
from tilemoe.routing.topk import Routing, route
from tilemoe.train.config import load_recipe

TOY = ["run", "--device", "cpu", "--rounds", "1", "--settle", "0", "--calls", "1", "--cases", "toy-E8"]


def test_a_toy_is_measured_recorded_tabled_and_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token_rounding.main([*TOY, "--modes", "nearest,down"])
    rows = {row["contestant"]: row for row in record.rows("token_rounding")}
    assert list(rows) == ["top-K", "full tiles", "nearest", "down"]
    for name, row in rows.items():
        assert row["case"] == "toy-E8"
        assert (row["kernels"], row["kernel_set"]) == ("chosen", "torch")
        parts = [row[f"{part}_ms"]["median"] for part in rounding_report.PARTS]
        assert all(part >= 0 for part in parts)
        assert row["rows"] == rows["top-K"]["rows"] + row["added"] - row["dropped"]
        assert row["host_ms"] > 0
        assert ("total_ms" in row) == (name != "full tiles"), "the whole layer chooses its own rows"
    assert rows["top-K"]["waste_percent"] > 0
    assert rows["nearest"]["waste_percent"] == rows["full tiles"]["waste_percent"] == 0.0
    assert rows["down"]["added"] == 0
    assert rows["top-K"]["total_speedup"] == 1.0
    capsys.readouterr()
    token_rounding.main(["table"])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 3
    assert all(line.count("|") == table[0].count("|") for line in table)
    token_rounding.main(["plot", "--out", str(results)])
    assert (results / "token-rounding.svg").exists()
    with pytest.raises(SystemExit, match="no row of kernels 'triton'"):
        token_rounding.main(["plot", "--kernels", "triton", "--out", str(results)])


def test_warming_up_records_nothing(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token_rounding.main(["warm", "--device", "cpu"])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["toy-E8", "toy-E16"]
    assert not list(results.iterdir())


def test_what_is_recorded_of_a_commit_is_not_measured_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_rounding.main(TOY)
    before = record.rows("token_rounding")
    token_rounding.main(TOY)
    assert record.rows("token_rounding") == before
    token_rounding.main([*TOY, "--modes", "nearest,up"])
    assert [row["contestant"] for row in record.rows("token_rounding")[len(before) :]] == ["top-K", "full tiles", "up"]
    token_rounding.main([*TOY, "--kernels", "torch"])
    assert [row["kernels"] for row in record.rows("token_rounding")[-3:]] == ["torch"] * 3
    monkeypatch.setenv(record.COMMIT_VARIABLE, "another")
    token_rounding.main(TOY)
    assert [row["commit"] for row in record.rows("token_rounding")[-3:]] == ["another"] * 3


def test_no_case_is_begun_that_would_end_too_late(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [*TOY[:-1], "toy-E8,toy-E16"]
    token_rounding.main([*cases, "--seconds", "1e-9"])
    assert "out of time before toy-E8" in capsys.readouterr().out
    assert not (results / "token_rounding.jsonl").exists()
    token_rounding.main([*cases, "--seconds", "100"])
    assert {row["case"] for row in record.rows("token_rounding")} == {"toy-E8", "toy-E16"}


def layer_of(mode: str) -> tuple[tilemoe.MoE, torch.Tensor, torch.Tensor]:
    shape = token_rounding.TOYS["toy-E8"]
    weights = peers.make_weights(shape, torch.device("cpu"), torch.float32)
    layer = token_rounding.build(shape, weights, TokenRounding(mode, 16), None)  # type: ignore[arg-type]
    x = torch.randn(shape.num_tokens, shape.hidden_size)
    return layer, x, torch.randn_like(x)


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_a_right_contestant_passes_the_gate(mode: str) -> None:
    layer, x, do = layer_of(mode)
    assert token_rounding.problem_of(token_rounding.Contestant(layer), x, do) is None


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
    "gradient of the logits is off": lambda r: replace(r, scores=_Scaled.apply(r.scores)),
}


@pytest.mark.parametrize("message", WRONG_ROUTING)
def test_wrong_routing_is_not_timed(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, _ = layer_of("nearest")
    logits = layer.router(x).logits.detach()
    monkeypatch.setattr(tilemoe, "route", _spoilt(WRONG_ROUTING[message]))
    assert message in str(rounding_gate.problem_of_routing(logits, layer.cfg))


def test_rows_of_other_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, _ = layer_of("nearest")
    logits = layer.router(x).logits.detach()
    spoilt = _spoilt(_swapped)
    monkeypatch.setattr(tilemoe, "route", spoilt)
    monkeypatch.setattr(rounding_gate, "MAX_OTHER_PAIRS", 0)
    assert "pairs are not those of plain PyTorch" in str(rounding_gate.problem_of_routing(logits, layer.cfg))


def test_wrong_experts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, do = layer_of("nearest")
    routing = route(layer.router(x).logits.detach(), layer.cfg)
    arguments = (layer, x, do, routing.plan, routing.scores)
    assert rounding_gate.problem_of_experts(*arguments) is None
    right, calls = tilemoe.moe, []

    def wrong(*args: object, **more: object) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = right(*args, **more)  # type: ignore[arg-type]
        return torch.cat([out[:-1], 0.5 * out[-1:]]) if len(calls) == 1 else out

    monkeypatch.setattr(tilemoe, "moe", wrong)
    assert "output is off by" in str(rounding_gate.problem_of_experts(*arguments))


def test_a_wrong_mode_is_left_out_and_the_others_timed(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = token_rounding.problem_of

    def only_down(contestant: token_rounding.Contestant, *args: object) -> str | None:
        rounding = contestant.layer.cfg.rounding
        wrong = rounding is not None and rounding.mode == "nearest"
        return "made up" if wrong else right(contestant, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(token_rounding, "problem_of", only_down)
    token_rounding.main([*TOY, "--modes", "nearest,down"])
    assert "nearest is left out: made up" in capsys.readouterr().out
    found = [row["contestant"] for row in record.rows("token_rounding")]
    assert found == ["top-K", "full tiles", "down"]


def test_waste_is_what_padding_adds() -> None:
    assert token_rounding.waste(torch.tensor([16, 32, 0]), 16) == 0.0
    assert token_rounding.waste(torch.tensor([8, 8]), 16) == 100.0


def test_full_tiles_are_a_routing_of_their_own() -> None:
    counts = torch.tensor([32, 0, 16, 64, 16, 64])
    ids = token_rounding.full_tiles(counts, 64)
    assert ids.shape == (64, 3)
    assert all(len(set(row)) == 3 for row in ids.tolist()), "K different experts for each token"
    assert ids.flatten().bincount(minlength=6).tolist() == counts.tolist()
    assert not torch.equal(ids, token_rounding.full_tiles(counts, 64)), "at random"


def test_ratios_and_recovered_padding() -> None:
    def sample(routing: float, experts: float) -> dict[str, float]:
        parts = {**dict.fromkeys(rounding_report.PARTS, 1e-9), "routing": routing, "experts": experts}
        return {**parts, "forward": routing + experts, "backward": 1e-9}

    samples = {"top-K": [sample(1.0, 10.0)], "nearest": [sample(1.5, 8.0)], "full tiles": [sample(0.0, 8.0)]}
    counts = dict.fromkeys(samples, torch.tensor([16, 16]))
    once = {name: {"host_ms": 1.0} for name in samples}
    rows = {row["contestant"]: row for row in token_rounding.summarise(samples, once, counts, 16)}
    assert rows["nearest"]["recovered"] == pytest.approx(0.75)
    assert rows["nearest"]["total_speedup"] == pytest.approx(11 / 9.5, abs=1e-4)
    assert rows["nearest"]["routing_percent"] == pytest.approx(100 * 1.5 / 9.5, abs=1e-3)


@pytest.mark.parametrize(("option", "message"), [("--cases", "no case called 'x'"), ("--modes", "no mode called 'x'")])
def test_an_unknown_name_is_one_line(option: str, message: str, results: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        token_rounding.main(["run", "--device", "cpu", option, "x"])


def test_the_work_ahead_covers_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is timed is the host's time, not the device's."""
    layer, x, do = layer_of("nearest")
    told: list[float] = []
    machine = replace(token_rounding.cpu(), run_ahead=told.append)
    args = argparse.Namespace(rounds=1, settle=1, calls=1)
    x = x.requires_grad_()
    _, once = token_rounding.measure({"top-K": token_rounding.Contestant(layer)}, x, do, machine, args)
    assert len(told) == 2 * 2
    assert min(told) >= once["top-K"]["host_ms"]


@pytest.fixture
def small_recipe(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rounding-smoke on a text of its own, four steps long."""
    folder, text = results, results / "text"
    text.mkdir()
    for index in range(6):
        (text / f"{index}.txt").write_text(f"{index} tokens and {index + 1} experts. " * 60)
    recipe = json.loads((rounding_quality.RECIPES / "rounding-smoke.json").read_text())
    recipe["data"] |= {"corpus": str(text), "cache_dir": str(folder / "cache"), "heldout_every": 3}
    recipe["train"] |= {"steps": 4, "eval_batches": 2}
    (folder / "small.json").write_text(json.dumps(recipe))
    monkeypatch.setattr(rounding_quality, "RECIPES", folder)


@pytest.mark.usefixtures("small_recipe")
def test_missing_runs_are_trained_recorded_and_not_repeated(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--device", "cpu", "--recipes", "small", "--modes", "nearest,down", "--seeds"]
    rounding_quality.main([*arguments, "1"])
    rounding_quality.main([*arguments, "2"])
    rows = record.rows("rounding_quality")
    assert [(row["routing"], row["seed"]) for row in rows] == [
        *((routing, 0) for routing in ("top-K", "nearest", "down")),
        *((routing, 1) for routing in ("top-K", "nearest", "down")),
    ]
    top_k, nearest, down = rows[:3]
    assert top_k["dropped_percent"] == top_k["added_percent"] == down["added_percent"] == 0
    assert down["dropped_percent"] > 0
    assert len({row["heldout_nats"] for row in rows}) == len(rows)
    assert nearest["heldout_tokens"] == top_k["heldout_tokens"]
    capsys.readouterr()
    rounding_quality.main(["table"])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 3
    assert "±" in table[2]


def test_the_first_mode_comes_first_with_every_seed() -> None:
    args = argparse.Namespace(modes="nearest,up", seeds=3, recipes="rounding-e32k4,rounding-e64k2", steps=0)
    keys = [tuple(row.values())[:3] for _, row in rounding_quality.asked_for(args)]
    assert len(set(keys)) == len(keys) == 2 * 3 * 3
    assert {(routing, seed) for _, routing, seed in keys[:12]} == {
        (routing, seed) for routing in ("top-K", "nearest") for seed in range(3)
    }
    assert {routing for _, routing, _ in keys[12:]} == {"up"}
    with pytest.raises(SystemExit, match="no mode called 'sideways'"):
        list(rounding_quality.asked_for(argparse.Namespace(**{**vars(args), "modes": "sideways"})))


@pytest.mark.usefixtures("small_recipe")
def test_processes_side_by_side_do_each_run_once(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            commands.append(command)

        def wait(self) -> int:
            rounding_quality.main(commands.pop(0)[2:])
            return 0

    monkeypatch.setattr(rounding_quality, "subprocess", SimpleNamespace(Popen=Process))
    asked = ["run", "--device", "cpu", "--recipes", "small", "--modes", "nearest", "--seeds", "2"]
    rounding_quality.main([*asked, "--processes", "1", "--share", "1/3"])
    assert [(row["routing"], row["seed"]) for row in record.rows("rounding_quality")] == [("nearest", 0)]
    rounding_quality.main([*asked, "--processes", "3", "--seconds", "100"])
    rows = record.rows("rounding_quality")
    assert sorted((row["routing"], row["seed"]) for row in rows) == [
        ("nearest", 0), ("nearest", 1), ("top-K", 0), ("top-K", 1),
    ]  # fmt: skip
    assert {row["processes"] for row in rows} == {3}
    monkeypatch.setattr(Process, "wait", lambda self: 1)
    with pytest.raises(SystemExit, match="a process failed"):
        rounding_quality.main([*asked, "--processes", "2"])


@pytest.mark.usefixtures("small_recipe")
def test_no_run_is_begun_that_would_end_too_late(results: Path) -> None:
    rounding_quality.main(["run", "--device", "cpu", "--recipes", "small", "--seconds", "1e-9"])
    assert not (results / "rounding_quality.jsonl").exists()


def test_entropy() -> None:
    assert rounding_quality.entropy([5, 5, 5, 5]) == pytest.approx(1.0)
    assert rounding_quality.entropy([7, 0, 0]) == 0.0


@pytest.mark.parametrize("path", sorted(rounding_quality.RECIPES.glob("rounding-*.json")), ids=lambda path: path.stem)
def test_recipes_give_each_expert_two_tiles(path: Path) -> None:
    recipe = load_recipe(str(path))
    moe = recipe.model.moe
    pairs = recipe.data.seq_len * recipe.data.batch_size * moe.num_experts_per_tok
    assert pairs / moe.num_experts >= 2 * moe.rounding.tile
    assert recipe.name == path.stem
    for routing in ("top-K", *ROUNDING_MODES):
        found = rounding_quality.variant(recipe, routing, 5)
        assert found.train.seed == 5
        assert found.model.moe is not None
        assert (found.model.moe.rounding is None) == (routing == "top-K")

"""The golden files' tool: what it hashes, how it compares, what its cases cover, and that results repeat."""

import ast
import json
from pathlib import Path

import golden
import golden_cases
import golden_large
import golden_seams
import pytest
import torch
from golden_cases import Case
from golden_inputs import Source, make_routing
from golden_runs import GATED, UNGATED, Found

CPU = torch.device("cpu")
FOLDER = Path(golden.__file__).parent
FEW = "^(tokens/3|rounding/nearest, softmax, 16|plan/sentinels|loss/chunks|lora/plain|layer/gpt-oss|router/nan).*fp32"


def test_every_nan_is_one() -> None:
    payloads = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert payloads.isnan().all()
    assert len({golden.digest(payload) for payload in payloads}) == 1
    halves = torch.tensor([0x7E00, 0x7E01, -0x200], dtype=torch.int16)
    assert len({golden.digest(half) for half in halves.view(torch.float16)}) == 1


def test_a_digest_tells_bits_dtypes_and_shapes_apart() -> None:
    zeros = torch.zeros(6)
    different = [
        zeros, -zeros, zeros.double(), zeros.int(), zeros.view(2, 3), zeros[:5], zeros.half(), zeros.bfloat16(),
    ]  # fmt: skip
    assert len({golden.digest(tensor) for tensor in different}) == len(different)
    matrix = torch.randn(3, 4)
    assert golden.digest(matrix) == golden.digest(matrix.t().contiguous().t())
    assert golden.digest("1,2") == "1,2"
    assert golden.digest(torch.tensor(True)) != golden.digest(torch.tensor(False))


def test_same_sees_one_bit() -> None:
    o = torch.tensor([1.0, float("nan")])
    one: Found = {"o": o, "strides": "2,1"}
    assert golden.same(one, {"o": o.clone(), "strides": "2,1"})
    assert not golden.same(one, {"o": torch.tensor([1.0 + 2**-23, float("nan")]), "strides": "2,1"})
    assert not golden.same(one, {"o": o, "strides": "1,2"})
    assert not golden.same(one, {"o": o})


def test_inputs_follow_from_the_name() -> None:
    drawn = Source("a case", CPU).uniform("x", 3)
    assert golden.digest(drawn) == golden.digest(Source("a case", CPU).uniform("x", 3))
    assert drawn.tolist() == pytest.approx([-0.3705385, 0.1030757, 0.0229168], abs=1e-7)
    for other in (Source("a case", CPU).uniform("y", 3), Source("another", CPU).uniform("x", 3)):
        assert not torch.equal(drawn, other)
    long = Source("a case", CPU).uniform("x", 4_194_301 + 5)
    assert torch.equal(long[:5], long[-5:])


def test_differences_name_what_is_missing_extra_and_other() -> None:
    old = {"a": {"o": "1", "dx": "2"}, "b": {"o": "3"}, "c": {"o": "4"}}
    new = {"a": {"o": "1", "dw": "2"}, "c": {"o": "5"}, "d": {"o": "6"}}
    wanted = ["b: missing", "d: extra", "a: dw is extra", "a: dx is missing", "c: o differs"]
    assert golden.differences(old, new) == wanted
    assert golden.differences(old, old) == []


def test_another_machine_is_a_warning_and_another_commit_is_none() -> None:
    head = golden.header("torch", CPU)
    assert golden.header_warnings(head, {**head, "commit": "another"}) == []
    (warning,) = golden.header_warnings(head, {**head, "torch": "1.0"})
    assert "torch was" in warning
    assert not head["interpreted"]


def test_names_are_unique_and_every_activation_has_every_layout() -> None:
    for cases in (
        [*golden_cases.small_cases((torch.float32, torch.bfloat16)), *golden_large.middling_cases()],
        list(golden_cases.interpreted_cases()),
        list(golden_large.gpu_cases()),
    ):
        names = [case.name for case in cases]
        assert len(names) == len(set(names))
        kinds = {name.split("/")[0] for name in names}
        assert kinds >= {"layout", "routing", "tokens", "values", "options", "layer", "lora", "loss", "model", "plan"}
        assert kinds >= {"router", "rounding"}
    for kind, some in (("layout", golden_cases.of_layouts((torch.float32,))), ("middle", golden_large.gpu_cases())):
        names = [case.name for case in some]
        for activation in (*GATED, *UNGATED):
            assert sum(name.startswith(f"{kind}/{activation} ") for name in names) >= 4


def test_activations_are_those_of_the_package() -> None:
    from tilemoe.config import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS

    assert set(GATED) == GATED_ACTIVATIONS
    assert set(UNGATED) == UNGATED_ACTIVATIONS


def test_internals_are_imported_in_one_file() -> None:
    for path in FOLDER.glob("golden*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        beneath = [name for node in imports if (name := str(node.module)).startswith("tilemoe.")]
        beneath = [name for name in beneath if name != "tilemoe.bench"]  # of which only `record` is used
        assert path.name == Path(golden_seams.__file__).name or not beneath, path.name


def test_hostile_routings_are_what_their_names_say() -> None:
    def rows(name: str) -> list[int]:
        routed = make_routing(Source(name, CPU), name, 17, 4, 2)
        return list(routed.plan.rows_per_expert.tolist())

    assert rows("first and last expert empty")[0] == rows("first and last expert empty")[-1] == 0
    assert rows("all on the last") == [0, 0, 0, 17]
    assert rows("ragged tiles") == [15, 1, 0, 17]
    assert rows("all sentinels") == rows("pairs, none") == [0, 0, 0, 0]
    assert 0 < sum(rows("sentinels")) < 34


def test_a_case_that_does_not_repeat_or_fails_is_a_problem() -> None:
    drawn = iter(range(100))

    def varies(_: object) -> Found:
        return {"o": torch.tensor(next(drawn))}

    def fails(_: object) -> Found:
        raise RuntimeError("two\nlines")

    def refuses(_: object) -> Found:
        raise ValueError("x must be (T, d)")

    runner = golden.Runner("torch", CPU)
    runner.repeats = 2
    cases = [Case(each.__name__, torch.float32, each) for each in (varies, fails, refuses)]
    found, problems = golden.compute(runner, cases, verbose=False)
    assert found == {"refuses": {"refused": "ValueError"}}
    assert problems == ["varies: does not repeat", "fails: RuntimeError: two lines"]


def test_a_file_that_was_written_is_confirmed_and_one_bit_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in golden.ENVIRONMENT_OF_CPU.items():
        monkeypatch.setenv(name, value)  # so that no other process is started
    path = tmp_path / "golden.json"
    options = ["--backend", "torch", "--only", FEW]
    assert golden.main([*options, "--write", str(path)]) == 0
    kept = json.loads(path.read_text())
    assert kept["header"]["backend"] == "torch"
    assert {name.split("/")[0] for name in kept["cases"]} == {
        "tokens", "rounding", "plan", "loss", "lora", "layer", "router",
    }  # fmt: skip
    kept["cases"]["loss/chunks/fp32"]["dweight"] = "0" * 64
    del kept["cases"]["tokens/3/fp32"]
    kept["header"]["torch"] = "1.0"
    path.write_text(json.dumps(kept))
    capfd.readouterr()
    assert golden.main([*options, "--check", str(path)]) == 1
    out = capfd.readouterr().out
    assert "loss/chunks/fp32: dweight differs" in out
    assert "tokens/3/fp32: extra" in out
    assert "warning: torch was '1.0'" in out
    assert out.count("differs") == 1


def test_the_interpreter_serves_what_triton_serves_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    only = "^(descriptor layout/gelu concatenated|plan/random|router/mixtral/|rounding/up, softmax, 16).*fp(16|32)"
    options = ["--backend", "triton", "--device", "cpu", "--only", only]
    assert golden.main([*options, "--write", str(path)]) == 0
    kept = json.loads(path.read_text())
    assert kept["header"]["interpreted"]
    assert {name.split("/")[0] for name in kept["cases"]} == {"descriptor layout", "plan", "router", "rounding"}


def test_hopper_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        golden.main(["--backend", "hopper", "--device", "cpu", "--list"])

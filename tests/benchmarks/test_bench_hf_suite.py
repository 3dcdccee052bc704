"""A tree with the form of transformers' source and tests of a tiny model stands in for a checkout of it."""

from collections.abc import Sequence
from pathlib import Path

import hf_suite
import pytest
import transformers
from hf_suite import Outcome, Run

TESTS = """
import pytest
from transformers import MixtralConfig, MixtralForCausalLM


class TinyTest:
    def model(self):
        sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
        return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2))

    def test_forward(self):
        model = self.model()
        model(input_ids=model.dummy_inputs["input_ids"])

    def test_name(self):
        assert self.model().config._experts_implementation == "grouped_mm", "another"

    @pytest.mark.skip(reason="as ever")
    def test_skipped(self):
        pass
"""
FILE = "tests/models/tiny/test_modeling_tiny.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / FILE).parent.mkdir(parents=True)
    (folder / FILE).write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\npython_classes = *Test\n")
    (folder / "src").mkdir()
    (folder / "src" / "transformers").symlink_to(Path(transformers.__file__).parent)
    return folder


def test_models_without_a_choice_take_tilemoe(checkout: Path) -> None:
    found = hf_suite.run(checkout, [FILE], jobs=0, plugins=[hf_suite.PLUGIN])
    assert {test.removeprefix(f"{FILE}::TinyTest::"): outcome for test, outcome in found.outcomes.items()} == {
        "test_forward": Outcome("passed", ""),
        "test_name": Outcome("failed", "AssertionError: another"),
        "test_skipped": Outcome("skipped", "as ever"),
    }
    assert found.calls == 2  # the layers of one forward


def test_what_passes_without_tilemoe_alone_is_reported(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second look at it."""
    well, ill = Outcome("passed", ""), Outcome("failed", "no")
    first = [{"a": well, "b": well, "c": well, "d": ill}, {"a": well, "b": ill, "c": ill, "d": ill}]
    answers = iter([*first, {"b": well, "c": well}, {"b": well, "c": ill}])
    asked = []

    def run(checkout: Path, tests: Sequence[str], jobs: int, plugins: Sequence[str]) -> Run:
        asked.append((list(tests), list(plugins)))
        return Run(next(answers), 3 * len(plugins))

    monkeypatch.setattr(hf_suite, "run", run)
    row = hf_suite.compare(checkout, ["tiny"], jobs=0)
    assert asked == [(tests, plugins) for tests in ([FILE], ["b", "c"]) for plugins in ([], [hf_suite.PLUGIN])]
    assert (row["without"], row["with"]) == ({"passed": 3, "failed": 1}, {"passed": 1, "failed": 3})
    assert (row["transformers"], row["calls"]) == (transformers.__version__, 3)
    assert (row["differed_once"], row["differences"]) == (["b"], {"c": "failed: no"})
    assert row["failed_both_ways"] == ["d"]


def test_a_folder_without_such_tests(checkout: Path) -> None:
    with pytest.raises(SystemExit, match=r"tests/models/olmo/test_modeling_olmo\.py is missing: give a checkout"):
        hf_suite.compare(checkout, ["tiny", "olmo"], jobs=0)


def test_a_part_that_fails_is_a_failure_of_its_test(tmp_path: Path) -> None:
    """JUnit files hold a case for each subtest, under its test's name."""
    failed = '<testcase classname="tests.m.test_m.T" name="test_a"><failure message="one&#10;two"/></testcase>'
    passed, skipped = (
        f'<testcase classname="tests.m.test_m.T" name="{name}">{inside}</testcase>'
        for name, inside in (("test_a", ""), ("test_b", '<skipped message="no GPU"/>'))
    )
    (tmp_path / "report.xml").write_text(f"<suites><suite>{passed}{failed}{passed}{skipped}</suite></suites>")
    found = hf_suite.read_report(tmp_path / "report.xml")
    assert found == {
        "tests/m/test_m.py::T::test_a": Outcome("failed", "one"),
        "tests/m/test_m.py::T::test_b": Outcome("skipped", "no GPU"),
    }


def test_differences_are_what_passed_before_alone() -> None:
    before = {"a": Outcome("passed", ""), "b": Outcome("failed", "x"), "c": Outcome("passed", "")}
    after = {"a": Outcome("skipped", "no GPU"), "b": Outcome("passed", ""), "d": Outcome("failed", "")}
    assert hf_suite.differences(before, after) == {"a": "skipped: no GPU", "c": "missing: it was not run"}

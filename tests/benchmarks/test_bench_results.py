"""Cases, statistics, rows, results files and tables, all without a GPU."""

import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tilemoe.bench import cases, kernels, layer, record, report, timing
from tilemoe.cli.main import main
from tilemoe.perf.costs import kernel_costs
from tilemoe.perf.hardware import Ceilings

GB = 10**9


def once(saved: int, forward: int, backward: int) -> dict[str, float]:
    memory = {"saved_bytes": saved, "forward_peak_bytes": forward, "backward_peak_bytes": backward}
    return {**memory, "forward_host_ms": 0.5, "backward_host_ms": 0.75}


def layer_rows() -> list[dict[str, Any]]:
    """Two contestants, three rounds; the second round is slow for both."""
    found = {"tilemoe": [[1.0, 2.0], [2.0, 4.0], [1.0, 2.0]], "peer": [[1.5, 2.0], [3.0, 4.4], [1.5, 2.2]]}
    return layer.layer_rows(
        found, {"tilemoe": once(GB, 3 * GB, 4 * GB), "peer": once(2 * GB, 4 * GB, 5 * GB)}, (0.5, 1.0)
    )


def test_summary_and_ratio() -> None:
    assert timing.summary([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == {"median": 3.5, "p20": 2.0, "p80": 5.0}
    assert timing.summary([2.0]) == {"median": 2.0, "p20": 2.0, "p80": 2.0}
    # By round: 2, 1.5 and 3. Of the medians it would be 4 / 2.
    assert timing.ratio([1.0, 2.0, 3.0], [2.0, 3.0, 9.0]) == 2.0
    assert timing.ratio([1.0, 4.0, 2.0], [3.0, 4.0, 5.0]) == 2.5


def test_rounds_rotate_and_turn_back() -> None:
    orders = ["".join(timing.turn(["a", "b", "c"], index)) for index in range(7)]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac", "abc"]
    followed = {pair for order in orders for pair in pairwise(order)}
    assert len(followed) == 6  # everybody after everybody


def test_layer_rows_compare_to_the_first() -> None:
    first, peer = layer_rows()
    assert "baseline" not in first
    assert (peer["forward_ratio"], peer["backward_ratio"]) == (1.5, 1.1)
    assert (peer["saved_ratio"], peer["forward_peak_ratio"], peer["backward_peak_ratio"]) == (0.5, 0.75, 0.8)
    assert peer["baseline"]["forward_ms"]["median"] == 1.0
    assert first["forward_of_roofline"] == 0.5
    line = layer.describe({"case": "c", "mode": "burst", **peer})
    assert "1.500x 1.100x" in line
    assert "host 0.50 0.75" in line


def test_layer_table_has_means_and_worst_cases() -> None:
    peer = {"mode": "burst", **layer_rows()[1]}
    other = {**peer, "forward_ratio": 1.0, "backward_ratio": 0.9, "saved_ratio": 0.9}
    lines = report.layer_table([{**peer, "case": "one"}, {**other, "case": "two"}], "peer").splitlines()
    assert len(lines) == 6
    assert "| one | 1.000 / 2.000 | 1.500 / 2.200 | 1.50 | 1.10 | 0.50 | 0.75 | 0.80 |" in lines
    assert lines[-2].split(" | ")[3] == "1.225"  # sqrt(1.5)
    assert lines[-1] == "| worst |  |  | 1.000 | 0.900 | 0.900 | 0.750 | 0.800 |"


def test_kernel_rows_hold_each_part_against_its_roofline() -> None:
    shape = cases.MAIN["7B-n256"]
    ceilings = Ceilings(800.0, 4.0, is_measured=True)
    roof = kernel_costs(shape)["combine"].roofline_ms(ceilings)
    yardsticks = {"matmul": [[1.0]], "copy": [[1.0]], "copy_as_combine": [[roof]]}
    found = {**yardsticks, "layer": [[3.0, 7.0]], "route": [[0.1, 0.2]], "combine": [[2 * roof]]}
    rows = {row["kernel"]: row for row in kernels.kernel_rows(found, shape, ceilings)}
    assert list(rows) == ["layer forward", "layer backward", "route", "route_grad", "combine"]
    assert rows["combine"]["of_roofline"] == pytest.approx(0.5, abs=1e-3)
    assert rows["combine"]["gbps"] == pytest.approx(2000, rel=1e-3)
    assert rows["combine"]["of_copy"] == pytest.approx(0.5, abs=1e-3)
    assert rows["route"]["of_roofline"] is None
    assert rows["route"]["of_copy"] is None
    assert rows["route_grad"]["of_layer"] == 0.02
    described = [kernels.describe(row) for row in rows.values()]
    assert "50.0% of its roofline" in described[-1]
    assert "50.0% of a copy of as many bytes" in described[-1]
    table = report.share_table([{"case": "c", **row} for row in rows.values()], ("route", "route_grad"))
    assert table.splitlines()[-1] == "| c | 3.0% |"
    assert "2.000" not in report.kernel_table([{"case": "c", **row} for row in rows.values()]).splitlines()[0]


def test_commit_is_what_the_environment_says_and_else_git_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.delenv(record.COMMIT_VARIABLE, raising=False)
    assert record.commit() == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "a.py").write_text("1")
    subprocess.run([*git, "add", "benchmarks"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:12]
    assert record.commit() == head
    (tmp_path / "elsewhere.txt").write_text("no code")
    assert record.commit() == head
    (tmp_path / "benchmarks" / "a.py").write_text("2")
    assert record.commit() == f"{head}+dirty"
    monkeypatch.setenv(record.COMMIT_VARIABLE, "0123456789ab")
    assert record.commit() == "0123456789ab"


def test_the_report_holds_every_table_and_figure(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = results / "out"
    assert main(["report", "--out", str(out)]) == 2
    assert "has no rows of mode 'sustained'; run tilemoe bench" in capsys.readouterr().err
    where = {"case": "a user's <own>", "mode": "sustained"}
    without_memory = {key: None for key in layer_rows()[1] if key.endswith("_ratio") and "forward_r" not in key}
    record.append("layer", [{**where, **row} for row in layer_rows()])
    record.append("layer", [{**where, "case": "OLMoE", **layer_rows()[1], **without_memory, "backward_ratio": 1.0}])
    record.append(
        "kernels", [{**where, "kernel": "combine", "of_roofline": 0.9, "of_layer": 0.1, "ms": {"median": 2.0}}]
    )
    step = {"contestant": "peer", "step_ms": {"median": 12.34}, "tokens_per_s": 5678, "step_ratio": None}
    record.append("step", [{**where, **step}])
    assert main(["report", "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {"report.md", "report.html", "layer-sustained.png", "kernels-sustained.png"}
    markdown, page = ((out / name).read_text() for name in ("report.md", "report.html"))
    assert "| a user's <own> | peer | 12.3 | 5,678 | - |" in markdown
    assert "<td>a user&#x27;s &lt;own&gt;</td><td>peer</td><td>12.3</td><td>5,678</td><td>-</td>" in page
    assert "| theirs / ours: forward | backward | ours / theirs: saved | peak forward | peak backward |" in markdown
    assert markdown.index("| OLMoE | 1.000 / 2.000") < markdown.index("| a user's <own> | 1.000 / 2.000")
    for title in ("The layer against peer, sustained", "Kernels, sustained", "A training step, sustained"):
        assert title in markdown
        assert title in page
    assert page.count("data:image/png;base64,") == markdown.count(".png)") == 2
    assert "| step.jsonl | 1 | " in markdown
    assert "The layer alone" not in markdown
    capsys.readouterr()
    assert main(["report", "--out", str(out / "report.md")]) == 2
    message = capsys.readouterr().err
    assert f"--out {out / 'report.md'}: cannot be written" in message
    assert "Traceback" not in message


def test_the_report_of_a_layer_without_peers_and_of_another_mode(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `tilemoe bench layer` records it where nothing else is asked for."""
    out, row = results / "out", layer_rows()[0]
    record.append("layer", [{"case": "OLMoE", "mode": "burst", **row}])
    assert main(["report", "--out", str(out)]) == 2
    assert "has no rows of mode 'sustained'; pass --mode burst, which has rows" in capsys.readouterr().err
    record.append("layer", [{"case": "mine", "mode": "burst", **row, **dict.fromkeys(layer.MEMORY)}])
    assert main(["report", "--out", str(out), "--mode", "burst"]) == 0
    markdown = (out / "report.md").read_text()
    assert "## The layer alone, burst\n" in markdown
    assert "| OLMoE | tilemoe | 1.000 | 2.000 | 954 | 2,861 | 3,815 |" in markdown
    assert "| mine | tilemoe | 1.000 | 2.000 | - | - | - |" in markdown

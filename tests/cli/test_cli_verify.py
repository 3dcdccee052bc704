"""``tilemoe verify``: a changed or missing byte anywhere in a checkpoint of either form or an export is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tilemoe.models.sums import file_entries, manifest_of
from tilemoe.train.checkpoints.names import list_checkpoints
from tilemoe.train.checkpoints.restore import restore

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def whole(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An intact folder of each form."""
    from tilemoe.cli.main import main

    folder = tmp_path_factory.mktemp("whole")
    alone, job, export = folder / "step_00000030", folder / "job", folder / "export"
    shutil.copytree(list_checkpoints(finished)[-1], alone)
    job.mkdir()
    tensors = {f"model.{name}": tensor for name, tensor in restore(alone, "cpu").model.state_dict().items()}
    dcp.save(tensors, checkpoint_id=str(job), no_dist=True)
    shutil.copy(alone / "state.json", job)
    (job / "manifest.json").write_bytes(manifest_of(file_entries(job.iterdir())))
    assert main(["export", "--checkpoint", str(alone), "--out", str(export)]) == 0
    return {"one process": alone, "a job": job, "export": export}


@pytest.fixture(params=["one process", "a job", "export"])
def intact(request: pytest.FixtureRequest, whole: dict[str, Path], tmp_path: Path) -> tuple[str, Path]:
    copied = tmp_path / whole[request.param].name
    shutil.copytree(whole[request.param], copied)
    return request.param, copied


def test_every_file_is_looked_at(intact: tuple[str, Path], run: Run) -> None:
    form, folder = intact
    status, out, err = run("verify", folder)
    assert (status, err) == (0, "")
    assert out.startswith(
        f"{folder}: {'model of transformers' if form == 'export' else 'checkpoint of little at step'}"
    )
    assert out.count("\n") == 1
    assert "every byte is as its" in out
    files = sorted(folder.iterdir())
    assert len(files) >= 4
    for file in files:
        content = file.read_bytes()
        middle = len(content) // 2
        for changed in (content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :], content[:-1], None):
            file.unlink()
            if changed is not None:
                file.write_bytes(changed)
            status, out, err = run("verify", folder)
            if changed is None and file.name == "checksums.json":
                assert (status, out.count("complete, without checksums.json")) == (0, 1)
            elif changed is None and file.name in ("manifest.json", "config.json"):
                assert status == 2, file.name
            else:
                assert status == 2, file.name
                assert out.startswith("wrong: "), file.name
                assert out.count("\n") == 1
                assert file.name in out
                assert err == f"tilemoe: error: {folder}: 1 of 1 not right, as said above\n"
        file.write_bytes(content)
    assert run("verify", folder)[0] == 0


def test_each_checkpoint_of_a_run(finished: Path, tmp_path: Path, run: Run) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    *older, damaged = list_checkpoints(folder)
    count = len(older) + 1
    assert older
    assert run("verify", folder)[1].count("every byte is as its manifest says\n") == count
    (damaged / "optimizer.safetensors").unlink()
    status, out, err = run("verify", folder)
    assert status == 2
    assert [line.startswith("wrong: checkpoint") for line in out.splitlines()] == [*(False for _ in older), True]
    assert f"{damaged.name} is damaged: optimizer.safetensors is missing; resume from the older one" in out
    assert f"1 of {count} not right" in err


def test_what_is_no_folder_of_ours(tmp_path: Path, whole: dict[str, Path], fails: Callable[..., str]) -> None:
    assert "holds no step_* folder" in fails("verify", tmp_path)
    assert "no such folder" in fails("verify", tmp_path / "none")
    assert "\x1b" not in fails("verify", tmp_path / "\x1b[2J"), "a name steers no terminal"
    copied = tmp_path / "export"
    shutil.copytree(whole["export"], copied)
    (copied / "model.safetensors.index.json").write_text("{}")
    assert "not right" in fails("verify", copied)

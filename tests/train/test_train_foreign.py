"""Somebody else's files and folders in a run's folder, and links: nothing of them changes, byte for byte."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import raises_one_line

from tilemoe.files import never_a_link, only_one_process, own_name, staged_folder, write_atomic
from tilemoe.train.checkpoints.folder import drop_old, find_latest, open_checkpoint
from tilemoe.train.checkpoints.names import list_checkpoints, temporary_of, trash_of
from tilemoe.train.config import Recipe
from tilemoe.train.run import RunResult, train

WORK = b"years of work"


def contents(folder: Path) -> dict[str, bytes | str]:
    """All that is in a folder: files' bytes, links' targets, by path."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def a_photo(path: Path) -> None:
    """A folder of somebody's, with a manifest of another program."""
    path.mkdir(parents=True)
    (path / "manifest.json").write_text('{"files": {"photo.jpg": {}}}')
    (path / "photo.jpg").write_bytes(WORK)


def with_steps(recipe: Recipe, steps: int, **changes: object) -> Recipe:
    settings = {"steps": steps, "save_every": 1, "keep_last": 1, "sample_tokens": 0, **changes}
    return replace(recipe, train=replace(recipe.train, **settings))  # type: ignore[arg-type]


def going_on(recipe: Recipe, steps: int, **changes: object) -> object:
    """What `train --resume` does."""
    return train(with_steps(recipe, steps, **changes), find_latest(Path(recipe.train.out_dir)))


@pytest.fixture
def run(dense_recipe: Recipe) -> Path:
    """The folder of a run with a checkpoint of step 2 alone."""
    train(with_steps(dense_recipe, 2))
    return Path(dense_recipe.train.out_dir)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder outside of the run with somebody's work, by names that a run uses, too."""
    folder = tmp_path / "theirs"
    (folder / "folder").mkdir(parents=True)
    for name in ("file", "folder/manifest.json", "folder/thesis.tex", "folder/run-id.txt"):
        (folder / name).write_bytes(WORK)
    return folder


LINKS = ("metrics.jsonl", "result.json", "plot.png", "tensorboard", "step_00000003", "step_00000009")
LINKS += (temporary_of(Path("step_00000003")).name, trash_of(Path("step_00000002")).name)


@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_a_link_is_named_before_the_first_step(
    run: Path, theirs: Path, dense_recipe: Recipe, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, recipe = find_latest(run), with_steps(dense_recipe, 4, plot=True, tensorboard=True)
    monkeypatch.setattr("tilemoe.train.loop.Trainer.train_step", lambda trainer: pytest.fail("it took a step"))
    for name in LINKS:
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(theirs / target)
        before = contents(theirs.parent)
        with raises_one_line(f"train.out_dir.*{name}.*move it away"):
            train(recipe, checkpoint)
        assert contents(theirs.parent) == before
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)


def a_plot(**options: object) -> bytes:
    from matplotlib.figure import Figure

    drawn = io.BytesIO()
    Figure(figsize=(11.0, 4.2)).savefig(drawn, format="png", **options)
    return drawn.getvalue()


FOREIGN = {
    "metrics.jsonl": [
        WORK,
        b"[1]\n",
        b'{"kind": "train", "step": 1, "loss": 0.5}\n',
        b'{"kind": "train", "step": 5, "loss": ' + b"1" * 300 + b"}\n",
        b'{"step": 9}',
    ],
    "result.json": [WORK, b"{}", b'{"recipe": 1, "versions": {}}', b""],
    "plot.png": [WORK, a_plot(dpi=99), a_plot(metadata={"Software": "mine"}), b""],
}


@pytest.mark.parametrize("is_resumed", [True, False])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_in_the_way_is_named_before_the_first_step(
    request: pytest.FixtureRequest, dense_recipe: Recipe, name: str, is_resumed: bool
) -> None:
    folder = Path(dense_recipe.train.out_dir)
    if is_resumed:
        request.getfixturevalue("run")
    folder.mkdir(exist_ok=True)
    for content in FOREIGN[name]:
        (folder / name).write_bytes(content)
        before = contents(folder)
        with raises_one_line(f"{name}.*move (it|the file) away"):
            going_on(dense_recipe, 4, plot=True)
        assert contents(folder) == before


@pytest.mark.parametrize("content", [b"", b'{"kin', b'{"kind": "train", "step": 1, "tokens": 32, "nats'])
def test_metrics_that_a_kill_cut_short_are_no_obstacle(dense_recipe: Recipe, content: bytes) -> None:
    folder = Path(dense_recipe.train.out_dir)
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(content)
    assert isinstance(going_on(dense_recipe, 1), RunResult)


@pytest.mark.parametrize("content", [a_plot(), a_plot(metadata={"Software": "tilemoe"})])
def test_a_finished_run_of_this_release_and_of_earlier_ones_goes_on(
    run: Path, dense_recipe: Recipe, content: bytes
) -> None:
    (run / "plot.png").write_bytes(content)
    result = going_on(dense_recipe, 3, plot=True)
    assert isinstance(result, RunResult)
    assert (run / "plot.png").read_bytes() != content
    going_on(dense_recipe, 4, plot=True)


def test_a_folder_with_the_name_of_a_newer_checkpoint_is_named(run: Path, dense_recipe: Recipe) -> None:
    a_photo(run / "step_00000003")
    before = contents(run)
    with raises_one_line("step_00000003 was not written by tilemoe; move it away"):
        train(with_steps(dense_recipe, 4), open_checkpoint(run / "step_00000002"))
    assert contents(run) == before


OTHERS = (".tmp-result.json-0", f".tmp-result.json-{'0' * 16}", f".tmp-plot.png-{'0' * 16}", "Metrics.jsonl")
OTHERS += ("RESULT.JSON", ".tmp-mine", "step_" + 8 * "\u0661", "step_7", "notes.txt")


def test_rotation_takes_nothing_of_others(run: Path, theirs: Path, dense_recipe: Recipe) -> None:
    """Folders and links by the names of checkpoints, notes in a checkpoint, files by names like ours."""
    for name in OTHERS:
        (run / name).write_bytes(WORK)
    likes = (".tmp-step_00000003", f".tmp-step_00000003-{'0' * 16}", ".trash-step_00000002", ".TMP-step_00000003")
    for name in ("step_00000001", "STEP_00000001", "STEP_00000003", *likes):
        a_photo(run / name)
    (run / "step_00000000").symlink_to(theirs / "folder")
    shutil.copytree(run / "step_00000002", run / "step_000000002")
    (run / "step_00000002" / "notes.txt").write_bytes(WORK)
    theirs_before, before = contents(theirs), contents(run)
    with pytest.warns(UserWarning, match=r"step_00000002 is not deleted: tilemoe did not write notes\.txt in it"):
        going_on(dense_recipe, 4, plot=True)
    after = contents(run)
    ours = {"metrics.jsonl", "result.json"}
    assert {name: after[name] for name in before.keys() - ours} == {name: before[name] for name in before.keys() - ours}
    assert contents(theirs) == theirs_before
    assert [path.name for path in list_checkpoints(run)] == [f"step_0000000{step}" for step in (0, 1, "02", 2, 4)]
    (run / "step_00000002" / "notes.txt").unlink()
    going_on(dense_recipe, 5)
    assert not (run / "step_00000002").exists()


def test_rotation_keeps_what_was_just_saved_beside_a_copy_of_a_later_name(run: Path) -> None:
    shutil.copytree(run / "step_00000002", run / "step_00000099")
    drop_old(run / "step_00000002", 1)
    assert [path.name for path in list_checkpoints(run)] == ["step_00000002", "step_00000099"]


@pytest.mark.parametrize("kind", ["folder", "link", "read-only"])
def test_a_checkpoint_with_something_else_in_it_stays(
    run: Path, theirs: Path, dense_recipe: Recipe, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / "step_00000002"
    if kind == "folder":
        (path / "mo\x1bdel").mkdir()
    elif kind == "read-only":
        real = os.access  # root may write there, too
        monkeypatch.setattr(os, "access", lambda name, mode: Path(name) != path and real(name, mode))
    else:
        (path / "mo\x1bdel").symlink_to(theirs / "folder")
    before = contents(path), contents(theirs)
    with pytest.warns(UserWarning, match="is not deleted: (tilemoe did not write mo\ufffddel in it|it is read-only)"):
        going_on(dense_recipe, 3)
    assert (contents(path), contents(theirs)) == before


def test_links_to_a_disk(run: Path, tmp_path: Path, dense_recipe: Recipe) -> None:
    """A run's folder that is a link, and a checkpoint that is one, are read; the checkpoint is never dropped."""
    disk = tmp_path / "disk"
    disk.mkdir()
    shutil.move(run / "step_00000002", disk / "step_00000002")
    (run / "step_00000002").symlink_to(disk / "step_00000002")
    shutil.move(run, disk / "run")
    run.symlink_to(disk / "run")
    before = contents(disk / "step_00000002")
    assert isinstance(going_on(dense_recipe, 4), RunResult)
    assert run.is_symlink()
    assert contents(disk / "step_00000002") == before
    assert [path.name for path in list_checkpoints(run)] == ["step_00000002", "step_00000004"]


def test_a_link_in_the_place_of_a_file_is_unlinked_itself(run: Path, tmp_path: Path, dense_recipe: Recipe) -> None:
    weights = run / "step_00000002" / "model.safetensors"
    moved = Path(shutil.move(weights, tmp_path))
    weights.symlink_to(moved)
    content = moved.read_bytes()
    going_on(dense_recipe, 3)
    assert not (run / "step_00000002").exists()
    assert moved.read_bytes() == content


@pytest.mark.parametrize("target", ["file", "nothing"])
def test_nothing_is_written_through_a_link(tmp_path: Path, theirs: Path, target: str) -> None:
    link, before = tmp_path / "link", contents(theirs)
    (tmp_path / ".lock-file").symlink_to(theirs / target)
    link.symlink_to(theirs / target)
    for write in (
        lambda: write_atomic(link, b"new"),
        lambda: only_one_process(tmp_path / "file").__enter__(),
        lambda: never_a_link(str(link), os.O_WRONLY | os.O_CREAT),
    ):
        with pytest.raises(OSError, match="it is a link, which tilemoe never writes to: move it away"):
            write()
    assert contents(theirs) == before
    assert link.is_symlink()


def test_a_folder_that_came_meanwhile_stays_and_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def make() -> None:
        with staged_folder(out) as staging:
            (staging / "ours").touch()
            out.mkdir()
            (out / "theirs").touch()

    with pytest.raises(OSError, match="not empty"):
        make()
    assert [*tmp_path.iterdir(), *out.iterdir()] == [out, out / "theirs"]


def test_a_pipe_in_the_place_of_a_lock_or_a_leftover_does_not_block(tmp_path: Path) -> None:
    for name in (".lock-file", own_name(".tmp-file-0")):
        os.mkfifo(tmp_path / name)
    write_atomic(tmp_path / "file", b"new")
    with pytest.raises(OSError, match="lock-file"), only_one_process(tmp_path / "file"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock-file", "file"]

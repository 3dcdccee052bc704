"""A checkpoint that four processes wrote goes on, bit for bit, on four, two or one, with expert parallelism or not.

By AdamW, of adapters and by Muon, whose steps are here, too.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import distributed_checkpoint_checks as checks
import muon_checks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Check, named, run_on_ranks
from transformers import AutoModelForCausalLM

from tilemoe.cli.main import main
from tilemoe.models.decoder import DecoderLM
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints.folder import CheckpointError, open_checkpoint
from tilemoe.train.checkpoints.pickled import read_pickled

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def on_four(
    run_dir: Path, selected: Callable[[Sequence[Check]], list[Check]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return run_on_ranks([*checks.ON_FOUR, *selected(muon_checks.ON_FOUR)], 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", [*(check.__name__ for check in checks.ON_FOUR), *named(muon_checks.ON_FOUR)])
def test_four_processes(name: str, on_four: dict[str, str]) -> None:
    assert not on_four[name], on_four[name]


@pytest.mark.usefixtures("on_four")
def test_two_processes(tmp_path: Path) -> None:
    """Last: it damages what one process wrote."""
    every = (*muon_checks.ON_TWO, *checks.ON_TWO)
    assert run_on_ranks(every, 2, tmp_path) == {check.__name__: "" for check in every}


@pytest.mark.usefixtures("on_four")
@pytest.mark.parametrize("kind", checks.KINDS)
def test_one_process_resumes_and_reads_the_weights_alone(kind: str, run_dir: Path) -> None:
    model, _ = checks.resumed(kind, None)
    alone, _ = checks.make(kind, None)
    open_checkpoint(run_dir / kind / "step_00000002").load_model(alone)
    assert_equal(alone.state_dict(), model.state_dict())


@pytest.mark.usefixtures("on_four")
def test_one_machine_exports_what_four_processes_wrote(run_dir: Path, tmp_path: Path) -> None:
    """transformers computes from it what the four computed."""
    out = tmp_path / "out"
    assert main(["export", "--checkpoint", str(run_dir / "export"), "--out", str(out)]) == 0
    assert list(out.glob("*.safetensors"))
    theirs = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(torch.arange(8)[None]).logits
    torch.testing.assert_close(logits, torch.load(run_dir / "logits.pt"), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("on_four")
def test_torch_reads_what_four_processes_wrote(run_dir: Path) -> None:
    """By the ``.metadata`` that is written for it; the manifest says the same."""
    path, ours = run_dir / "adamw" / "step_00000002", DecoderLM(checks.MODEL)
    checkpoint = open_checkpoint(path)
    checkpoint.load_model(ours)
    theirs = {f"model.{name}": torch.empty_like(tensor) for name, tensor in ours.state_dict().items()}
    dcp.load(theirs, checkpoint_id=str(path), no_dist=True)
    assert_equal(theirs, {f"model.{name}": tensor for name, tensor in ours.state_dict().items()})
    assert read_pickled(path / ".metadata") == checkpoint.tensors


@pytest.mark.usefixtures("on_four")
def test_a_changed_byte_is_found(run_dir: Path) -> None:
    path, model = run_dir / "adamw" / "step_00000002", DecoderLM(checks.MODEL)
    names = sorted(file.name for file in path.iterdir())
    assert names == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "manifest.json", "state.json"]
    for name in names[:5]:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{name} does not match its checksum"):
            open_checkpoint(path).load_model(model)
        (path / name).write_bytes(content)
    open_checkpoint(path).load_model(model)

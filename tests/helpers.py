"""What the tests of several folders share: tiny models, errors, saved tensors, processes and threads, corpora."""

import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilemoe.config import ModelConfig, MoEConfig
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.models import huggingface
from tilemoe.testing import assert_close_to_reference, relative_error
from tilemoe.train.metrics import METRICS_FILE, RUN_FIELDS, read_metrics

HANGS = 1200  # seconds after which a process hangs: a guard, not a promise of how long it takes

MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=24,
    moe=MoEConfig(hidden_size=16, intermediate_size=8, num_experts=6, num_experts_per_tok=2),
    dense_intermediate_size=20,
    dense_layers=(1,),
)


def tiny_model(**changes: Any) -> ModelConfig:
    """Three layers, the middle one dense, the others of 6 experts and 2 per token; with ``changes``."""
    return replace(MODEL, **changes)


@contextmanager
def raises_one_line(
    message: str, kind: type[BaseException] = ValueError
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises ``kind`` with a text of one line in which the regular expression ``message`` is found."""
    with pytest.raises(kind, match=message) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def assert_all_close_to_reference(
    found: Sequence[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]], dtype: torch.dtype
) -> None:
    """`assert_close_to_reference` of several `against_reference` as one: of few elements each would say little.

    ds = <da', a> and ordinary PyTorch's ds = <do, y> round differently: on three tokens either may be ten times better.
    """
    actual, baseline, exact = (
        {name: torch.cat([t[name] for t in part]) for name in part[0]} for part in zip(*found, strict=True)
    )
    assert_close_to_reference(actual, baseline, exact, dtype)


def from_hf_state_dict(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of ``DecoderLM(config)`` from hub-named tensors, or from experts stacked as in transformers 5."""
    shapes, state = huggingface._meta_state(config), {}
    huggingface._require_shapes(config, {name: tensor.shape for name, tensor in tensors.items()})
    for piece in huggingface.pieces(config, tensors):
        tensor = piece.of_theirs(tensors[piece.theirs])
        if piece.ours not in state:
            state[piece.ours] = tensor.new_empty(shapes[piece.ours].shape)
        piece.of_ours(state[piece.ours]).copy_(tensor.detach())
    return state


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that the block saves for a backward, in order."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Gives the most bytes that Python and NumPy have allocated since the block began."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Watching(TorchDispatchMode):
    """Calls ``see(operator, arguments, result)`` for each that runs in the block."""

    def __init__(self, see: Callable[[Any, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(func, args, out)
        return out


class LargestTensor(Watching):
    """``elements``: the most that the memory of any operator's plain result has."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.elements = 0

    def _note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if type(each) is Tensor:
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.itemsize)


def redraw(parameters: Iterable[Tensor], scale: float, seed: int) -> None:
    """Each anew, of that deviation: adapters as if trained, of which no b is zero any more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def watch_kernels(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], around: Callable[..., Any]) -> None:
    """The torch backend's kernels of these names are run by ``around(name, kernel, *arguments)``."""
    for name in names:
        watched = partial(around, name, getattr(TorchBackend(), name))
        monkeypatch.setitem(vars(backend_named("torch")), name, watched)


def watch_attention(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each scaled_dot_product_attention from now on: whether cuDNN may compute it."""
    attend, by_cudnn = F.scaled_dot_product_attention, []

    def attend_and_tell(*args: Any, **options: Any) -> Tensor:
        by_cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_and_tell)
    return by_cudnn


def run_python(code: str, *arguments: object) -> str:
    """What a new interpreter prints that runs ``code``; it must succeed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(folder: Path, processes: int, *command: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """``command`` on several processes of one thread each, run in ``folder``."""
    options = ["--nproc-per-node", processes, "--max-restarts", restarts]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, [*options, *command])],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )


def assert_near(found: Iterable[Tensor], expected: Iterable[Tensor], limit: float) -> None:
    """Each tensor's relative error, in the root of the mean of squares, is below ``limit``, and it is not all zero."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert theirs.any(), number
        assert ours.shape == theirs.shape, number
        assert relative_error(ours, theirs) < limit, number


def run_in_threads(*works: Callable[[], object], timeout: float = 60) -> None:
    """Each in a thread of its own, all at once."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)


def write_corpus(folder: Path, seed: int) -> Path:
    """``folder`` with forty short text files of made-up words."""
    dice = random.Random(seed)
    words = ["".join(dice.choices("abcdefgh", k=dice.randint(2, 6))) for _ in range(50)]
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(" ".join(dice.choices(words, k=120)) + ".\n")
    return folder


def timeless(run_dir: str | Path) -> list[dict[str, Any]]:
    """A run's records but for what a clock says, and what room it had."""
    records = read_metrics(Path(run_dir) / METRICS_FILE)
    return [{key: value for key, value in record.items() if key not in RUN_FIELDS} for record in records]


def losses(run_dir: str | Path) -> list[float]:
    """Of a run's training steps."""
    return [record["nats_per_token"] for record in timeless(run_dir) if record["kind"] == "train"]

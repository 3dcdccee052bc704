"""Wrong calls of the public API: each argument of a right call (api.py) replaced by each kind of wrong one.

A call must raise a ValueError or a TypeError of one line that names an argument; or, where what it was given is right
in another form, return what it returns for ordinary tensors of the same values. The kinds are those that were once
taken, or ended in another error: sparse, nested, FP8, DTensor and freed tensors, other types, devices, dtypes, shapes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from api import CALLS, Call
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nested import nested_tensor

import tilemoe

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

_PATIENCE_S = 30
ANYTHING: Mapping[str, Any] = {
    "None": None,
    "text": "wrong",
    "two lines": "a\nb",
    "empty list": [],
    "dict": {"a": 1},
    "object": object(),
    "True": True,
    "0": 0,
    "-1": -1,
    "2**31": 2**31,
    "2**200": 2**200,
    "0.5": 0.5,
    "NaN": float("nan"),
    "numpy array": np.ones((3, 2), np.float32),
    "device": torch.device("meta"),
    "integer tensor of 0 dimensions": torch.tensor(1),
    "tensor": torch.ones(2, 2),
}
DTYPES = (
    *(torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint16, torch.int64, torch.bool),
    torch.complex64,
)


def _freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _filled(value: float, t: Tensor) -> Tensor:
    t = t.clone()
    t.view(-1)[: t.numel() // 2 + 1] = value
    return t


def _dtensor(t: Tensor) -> Tensor:
    """It, in a job of one process, which must run."""
    return DTensor.from_local(t, init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)


# Tensors like the right one in all but their dtype, their place in memory or their values: the result says whether it
# is right to take them.
SAME_SHAPE: Mapping[str, Callable[[Tensor], Any]] = {
    **{f"its {dtype}": partial(Tensor.to, dtype=dtype) for dtype in DTYPES},
    "its strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "its expanded": lambda t: t[:1].expand_as(t),
    "its negated view": lambda t: (-t)._neg_view(),
    "its NaN": partial(_filled, float("nan")),
    "its large": partial(_filled, 2**40),
}
OTHER_SHAPE: Mapping[str, Callable[[Tensor], Any]] = {
    "its a dimension more": lambda t: t[None],
    "its 0 dimensions": lambda t: t.flatten()[0],
    "its narrower": lambda t: t[..., :-1],
    "its longer": lambda t: torch.cat([t, t]),
    "its empty": lambda t: t[:0],
    "its transposed": lambda t: t.transpose(0, -1),
}
NOT_ORDINARY: Mapping[str, Callable[[Tensor], Any]] = {
    "its meta": lambda t: t.to("meta"),
    "its sparse": Tensor.to_sparse,
    "its mkldnn": lambda t: t.float().to_mkldnn(),
    "its nested": lambda t: nested_tensor([t, t], layout=torch.strided),
    "its jagged": lambda t: nested_tensor([t, t[:1]], layout=torch.jagged),
    "its DTensor": _dtensor,
    "its freed": _freed,
    "its list": lambda t: t.tolist(),
    "its numpy": lambda t: t.numpy(),
}
FORMS = {**SAME_SHAPE, **OTHER_SHAPE, **NOT_ORDINARY}

_ROWS, _COLUMNS = {"its longer", "its empty"}, {"its narrower", "its transposed"}
_BOOLS = "softmax_after_topk normalize bias expert_bias tie_embeddings RouterConfig.selection_bias training accumulate"
_NONE_OF_A_CALL = "b1 b2 token_mask group generator labels documents record cache expert_ids select_kernels.cfg"
_NONE_OF_SETTINGS = "recompute device dtype router num_ids max_chunk_logits rounding param_dtype reduce_dtype"
_NONE_OF_PARTS = "error_bits pair_start_of_token gradient_divide_factor mp_policy offload_policy"
# What is right although it is another kind of thing, or of another shape: names of arguments, perhaps with the
# function's before them, and kinds.
_VALID: tuple[tuple[str, set[str]], ...] = (
    (f"{_NONE_OF_A_CALL} {_NONE_OF_SETTINGS} kernels activation_limit activation_alpha compile_backend", {"None"}),
    (f"{_NONE_OF_PARTS} Routing.pairs_per_expert statistics expert_parallel.reshard_after_forward", {"None"}),
    (f"{_BOOLS} reshard_after_forward shared_gate add_aux_loss", {"True"}),
    ("rate temperature aux_loss_coef z_loss_coef initializer_range", {"0", "2**31", "0.5"}),
    ("alpha scale rope_theta norm_eps gradient_divide_factor", {"2**31", "0.5"}),
    ("moe.activation_limit moe.activation_alpha moe_lora.activation_limit moe_lora.activation_alpha", {"2**31", "0.5"}),
    ("shard shared_intermediate_size dense_intermediate_size top_k", {"0", "2**31"}),
    ("num_groups tile replicate expert hidden_size intermediate_size num_experts head_dim", {"2**31"}),
    ("vocab_size num_layers max_seq_len num_heads num_ids max_chunk_logits", {"2**31"}),
    ("num_kv_heads num_experts_per_tok top_groups", {"2**31"}),  # where what they must not exceed is as large
    ("max_new_tokens", {"0"}),
    ("device", {"device"}),
    ("save_adapter.base", {"None", "text", "two lines"}),
    ("RoutingRecord.add.layer", set(ANYTHING) - {"empty list", "dict", "numpy array"}),
    ("RoutingRecord.add.expert_ids", _ROWS | _COLUMNS | {"its meta", "its a dimension more"}),
    ("plan_topk.expert_ids", _ROWS | _COLUMNS | {"its meta"}),
    ("Router.forward.x route_rounded.logits chunked_cross_entropy.weight", _ROWS),
    ("generate.input_ids DecoderLM.next_logits.input_ids DecoderLM.forward_cached.input_ids", _ROWS | _COLUMNS),
    ("Documents.of.positions", _ROWS | {"its narrower"}),
    ("error_bits aux_loss", {"its transposed", "its 0 dimensions", "its meta"}),
    ("token_of_row pair_of_row row_of_pair pair_start_of_token row_start_of_expert", {"its transposed"}),
    ("row_of_pair", _ROWS | _COLUMNS),  # its length is the number of pairs
    ("Routing.expert_ids", {"its narrower"}),
    ("Routing.scores Routing.tokens_per_expert Routing.pairs_per_expert Routing.expert_ids", {"its meta"}),
    ("w2 token_mask selection_bias token expert labels expert_ids", {"its transposed"}),
    ("tokens_per_expert pairs_per_expert", {"its transposed"}),
)
VALID = {(name, kind) for names, kinds in _VALID for name in names.split() for kind in kinds}


def kinds_for(value: Any) -> Iterator[str]:
    """What can be put in place of ``value``: of ``ANYTHING``, and where it is a tensor, of ``FORMS`` what it has."""
    yield from ANYTHING
    for kind in FORMS if isinstance(value, Tensor) else ():
        try:
            FORMS[kind](value)
        except (RuntimeError, TypeError, IndexError):  # integers negated, rows of what is flat
            continue
        yield kind


def why_wrong(function: str, argument: str, kind: str) -> str | None:
    """What is wrong with what the call does; None where nothing is."""
    call = CALLS[function]
    given, original = call.arguments(), call.arguments()
    given[argument] = ANYTHING[kind] if kind in ANYTHING else FORMS[kind](given[argument])
    replaced = given[argument]
    try:
        with _in_time():
            found = call.function(**given)
    except (ValueError, TypeError) as error:
        return _why_bad_message(str(error), call, argument, kind)
    except BaseException as error:  # of any class: it is the verdict
        return f"{type(error).__name__}: {error}"[:300]
    if kind not in SAME_SHAPE and not {(argument, kind), (f"{function}.{argument}", kind)} & VALID:
        return "accepted"
    like = original[argument]
    if not isinstance(replaced, Tensor) or not isinstance(like, Tensor) or replaced.is_meta:
        return None
    values = replaced.detach().as_subclass(Tensor)
    ordinary = torch.empty(values.shape, dtype=like.dtype).copy_(values)
    expected = call.function(**{**call.arguments(), argument: ordinary})
    return _why_other_result(found, expected, 3e-2 if replaced.dtype == torch.float16 else 1e-5)


def _why_bad_message(message: str, call: Call, argument: str, kind: str) -> str | None:
    """It is one line with the argument's name, or where shapes do not go together, any argument's."""
    names = {argument, *call.called, *(call.arguments() if kind in OTHER_SHAPE else ())}
    named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names)
    return None if named and "\n" not in message else f"message {message[:300]!r}"


def _why_other_result(found: Any, expected: Any, tolerance: float) -> str | None:
    for ours, theirs in zip(_tensors_of(found), _tensors_of(expected), strict=True):
        same = torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        if ours.shape != theirs.shape or not same:
            return f"another result than for an ordinary tensor: {ours} and {theirs}"[:300]
    return None


def _tensors_of(result: Any) -> Iterator[Tensor]:
    """Those in ``result``, which may be a tuple, a list or an object of them."""
    if isinstance(result, Tensor):
        yield result.detach().as_subclass(Tensor)
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors_of(each)
    elif hasattr(result, "__dataclass_fields__"):
        yield from _tensors_of(list(vars(result).values()))


@contextmanager
def _in_time() -> Iterator[None]:
    """TimeoutError where the block takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer in {_PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", autouse=True)
def a_job_of_one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_public_name_is_called() -> None:
    """But what is derived from, what is returned and modules."""
    uncalled = {"Backend", "MoEOutput", "reference", "__version__"}
    assert {*tilemoe.__all__} - uncalled <= {function.partition(".")[0] for function in CALLS}


@pytest.mark.parametrize("function", CALLS)
def test_one_wrong_argument(function: str, record_property: Callable[..., None]) -> None:
    call = CALLS[function]
    call.function(**call.arguments())  # the right call that wrong ones are made from
    pairs = [(name, kind) for name, value in call.arguments().items() for kind in kinds_for(value)]
    record_property("cases", len(pairs))
    found = {f"{name}={kind}": why_wrong(function, name, kind) for name, kind in pairs}
    assert {change: why for change, why in found.items() if why is not None} == {}

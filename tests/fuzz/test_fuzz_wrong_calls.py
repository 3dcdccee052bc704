"""Wrong calls of what takes tensors: each argument of a right call replaced by each kind of wrong one.

A call must raise a ValueError or a TypeError of one line that names an argument; or, where what it was given is right
in another form, return what it returns for ordinary tensors of the same values. The kinds are those that were once
taken, or ended in another error: sparse, nested, FP8, DTensor and freed tensors, other types, devices, dtypes, shapes.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.nested import nested_tensor

import tilemoe
from tilemoe.config import ModelConfig, MoEConfig, RouterConfig, TokenRounding
from tilemoe.kernels.lm.documents import Documents
from tilemoe.layers.attention import KVCache
from tilemoe.layers.moe import MoE
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate
from tilemoe.models.loss import chunked_cross_entropy
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.plan import PLAN_ARRAYS
from tilemoe.routing.balance import update_selection_bias

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

_PATIENCE_S = 30
T, D, N, E, K, V = 6, 8, 4, 4, 2, 20
LAYER = MoEConfig(D, N, E, K)
BIASED = MoEConfig(D, N, E, K, router=RouterConfig(selection_bias=True, aux_loss_coef=0.1))
ROUNDED = MoEConfig(D, N, E, K, rounding=TokenRounding("stochastic", 16))
MODEL = ModelConfig(V, D, 2, 2, 1, 4, 16, moe=LAYER)


@dataclass(frozen=True)
class Call:
    """``function(**arguments())`` is right; ``called``: what messages call its arguments beside their names."""

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    called: tuple[str, ...] = ()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape: int, below: int = E) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % below


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def layer(cfg: MoEConfig = LAYER) -> MoE:
    torch.manual_seed(0)
    return MoE(cfg)


def model() -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(MODEL)


def weights() -> dict[str, Any]:
    return {
        "x": numbers(T, D),
        "w1": numbers(E, 2 * N, D),
        "w2": numbers(E, D, N),
        "plan": tilemoe.plan_topk(ids(T, K), E),
        "scores": numbers(T, K),
        "activation": "swiglu_oai",
        "gate_up": "interleaved",
        "b1": numbers(E, 2 * N),
        "b2": numbers(E, D),
        "kernels": "torch",
        "activation_limit": 3.0,
        "activation_alpha": 1.5,
    }


def adapters() -> Adapters:
    return Adapters(numbers(E, 2, D), numbers(E, 2 * N, 2), numbers(E, 2, N), numbers(E, D, 2), 0.5)


def routed(**more: Any) -> dict[str, Any]:
    arguments = {"logits": numbers(T, E), "cfg": LAYER, "training": True, "token_mask": torch.arange(T) != 2}
    return {**arguments, "group": None, **more}


def of_layer() -> dict[str, Any]:
    mask = (torch.arange(T) != 2).view(2, 3)
    return {"x": numbers(2, 3, D), "token_mask": mask, "generator": generator(), "expert_ids": ids(2, 3, K)}


def of_decoder() -> dict[str, Any]:
    return {
        "input_ids": ids(2, 4, below=V),
        "labels": ids(2, 4, below=V),
        "documents": Documents.of(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])),
        "expert_ids": ids(2, 2, 4, K),
        "record": tilemoe.RoutingRecord(),
        "token_mask": torch.arange(4).expand(2, 4) < torch.tensor([[4], [3]]),
    }


def of_generate() -> dict[str, Any]:
    numbered = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 3, "num_ids": 19}
    record = tilemoe.RoutingRecord()
    return {"model": model(), "input_ids": ids(2, 4, below=V), **numbered, "generator": generator(), "record": record}


def of_cache() -> dict[str, Any]:
    return {"input_ids": ids(2, 4, below=V), "cache": KVCache(2, 8), "record": tilemoe.RoutingRecord()}


def of_plan() -> dict[str, Any]:
    plan = tilemoe.plan_pairs(ids(9, below=T), ids(9), T, E)
    arrays = dict(zip(PLAN_ARRAYS, plan.arrays, strict=True))
    return {**arrays, "num_experts": E, "num_tokens": T, "error_bits": plan.error_bits}


def of_routing() -> dict[str, Any]:
    return dict(vars(tilemoe.route(**routed(cfg=BIASED, selection_bias=numbers(E)))))


def of_expert_parallel() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("expert",))
    policies = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    more = {"gradient_divide_factor": 2.0, "reshard_after_forward": True, **policies, "exchange": "collective"}
    return {"module": layer(), "mesh": mesh, "dim": "expert", **more}


def updated_bias(**given: Any) -> Tensor | None:
    moe = layer(BIASED)
    moe.update_selection_bias(**given)
    return moe.selection_bias


def updated_biases(biases: Any, **given: Any) -> Any:
    update_selection_bias(biases, **given)
    return biases


def recorded(**given: Any) -> Tensor:
    record = tilemoe.RoutingRecord()
    record.add(**given)
    return record.expert_ids(1)


def recorded_ids(**given: Any) -> Tensor:
    record = tilemoe.RoutingRecord()
    record.add(0, ids(T, K))
    return record.expert_ids(**given)


CALLS: Mapping[str, Call] = MappingProxyType(
    {
        "moe": Call(
            tilemoe.moe,
            lambda: {**weights(), "recompute": "up_proj", "precision": "bf16", "accumulate": False, "save": "full"},
        ),
        "moe_lora": Call(moe_lora, lambda: {**weights(), "adapters": adapters()}),
        "route": Call(tilemoe.route, lambda: routed(generator=generator())),
        "route_biased": Call(tilemoe.route, lambda: routed(cfg=BIASED, selection_bias=numbers(E))),
        "route_replayed": Call(tilemoe.route, lambda: routed(expert_ids=ids(T, K))),
        "route_rounded": Call(
            tilemoe.route, lambda: {"logits": numbers(40, E), "cfg": ROUNDED, "generator": generator()}
        ),
        "plan_topk": Call(tilemoe.plan_topk, lambda: {"expert_ids": ids(T, K), "num_experts": E}, ("expert ids",)),
        "plan_pairs": Call(
            tilemoe.plan_pairs, lambda: {"token": ids(9, below=T), "expert": ids(9), "num_tokens": T, "num_experts": E}
        ),
        "update_selection_bias": Call(
            updated_biases,
            lambda: {"biases": [numbers(E)], "pairs_per_expert": ids(1, E), "rate": 0.1, "group": None},
        ),
        "RoutingPlan": Call(tilemoe.RoutingPlan, of_plan),
        "Routing": Call(tilemoe.Routing, of_routing),
        "RoutingRecord.add": Call(recorded, lambda: {"layer": 0, "expert_ids": ids(T, K)}),
        "RoutingRecord.expert_ids": Call(recorded_ids, lambda: {"batch_size": 2}),
        "chunked_cross_entropy": Call(
            chunked_cross_entropy,
            lambda: {"hidden": numbers(T, D), "weight": numbers(V, D), "labels": ids(T), "max_chunk_logits": 40},
        ),
        "Documents.of": Call(Documents.of, lambda: {"positions": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}),
        "MoE.forward": Call(lambda **given: layer()(**given), of_layer, ("logits",)),
        "MoE.update_selection_bias": Call(updated_bias, lambda: {"pairs_per_expert": ids(E), "rate": 0.1}),
        "Experts.forward": Call(
            lambda **given: layer().experts(**given),
            lambda: {"x": numbers(T, D), "plan": tilemoe.plan_topk(ids(T, K), E), "scores": numbers(T, K)},
        ),
        "Router.forward": Call(lambda **given: layer().router(**given), lambda: {"x": numbers(T, D)}),
        "DecoderLM.forward": Call(lambda **given: model()(**given), of_decoder),
        "DecoderLM.forward_cached": Call(lambda **given: model()(**given), of_cache),
        "DecoderLM.next_logits": Call(lambda **given: model().next_logits(**given), of_cache),
        "generate": Call(generate, of_generate),
        "expert_parallel": Call(tilemoe.expert_parallel, of_expert_parallel),
    }
)

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
# What is right although it is another kind of thing, or of another shape: names of arguments, perhaps with the
# function's before them, and kinds.
_VALID: tuple[tuple[str, set[str]], ...] = (
    ("b1 b2 token_mask group generator labels documents record cache expert_ids recompute num_ids kernels", {"None"}),
    ("max_chunk_logits activation_limit activation_alpha error_bits pair_start_of_token statistics", {"None"}),
    ("gradient_divide_factor mp_policy offload_policy Routing.pairs_per_expert reshard_after_forward", {"None"}),
    ("training accumulate reshard_after_forward", {"True"}),
    ("rate temperature", {"0", "2**31", "0.5"}),
    ("gradient_divide_factor activation_limit activation_alpha", {"2**31", "0.5"}),
    ("top_k", {"0", "2**31"}),
    ("num_ids max_chunk_logits", {"2**31"}),
    ("max_new_tokens", {"0"}),
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


@pytest.mark.parametrize("function", CALLS)
def test_one_wrong_argument(function: str, record_property: Callable[..., None]) -> None:
    call = CALLS[function]
    call.function(**call.arguments())  # the right call that wrong ones are made from
    pairs = [(name, kind) for name, value in call.arguments().items() for kind in kinds_for(value)]
    record_property("cases", len(pairs))
    found = {f"{name}={kind}": why_wrong(function, name, kind) for name, kind in pairs}
    assert {change: why for change, why in found.items() if why is not None} == {}

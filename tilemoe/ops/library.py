"""torch.library operators over a KernelSet: the forward of the layer and the steps of its backward, all traceable.

T tokens · d hidden_size · n intermediate_size · E experts · P pairs · R_max row capacity · w = 2n gated, n ungated

Every operator ends with the same arguments: the plan's tensors and its number of tokens, then the activation and the
name of the KernelSet as one string. The backward is several operators and not one, so that h can be freed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.base import Combine, DownProj, KernelSet, compute_dtype, empty_weight_grad, is_column_major
from tilemoe.kernels.select import BY_TRITON, kernel_set
from tilemoe.kernels.tiling import few_rows
from tilemoe.ops.ahead import Ahead
from tilemoe.ops.eager import Operator
from tilemoe.ops.errors import with_advice
from tilemoe.ops.replayed import Replayed
from tilemoe.perf.memory import backward_slices, forward_slices, inference_slices
from tilemoe.perf.shape import MoEShape
from tilemoe.routing.plan import RoutingPlan

_TAIL_SCHEMA = (
    "Tensor token_of_row, Tensor pair_of_row, Tensor row_of_pair, Tensor? pair_start_of_token, "
    "Tensor row_start_of_expert, SymInt num_tokens, str options"
)
NUM_PLAN_TENSORS, NUM_TAIL = 5, 7  # of the arguments that `tail_args` appends to every operator

Tail = tuple[Any, ...]


def tail_args(plan: RoutingPlan, spec: ActivationSpec, kernels: str) -> Tail:
    """The plan's, the activation's and the KernelSet's arguments, in the order that every operator's schema ends with.

    The options are one string because PyTorch's work for an operator grows with the square of its arguments.
    """
    return (
        plan.token_of_row,
        plan.pair_of_row,
        plan.row_of_pair,
        plan.pair_start_of_token,
        plan.row_start_of_expert,
        plan.num_tokens,
        f"{spec.name} {spec.gate_up} {spec.limit!r} {spec.alpha!r} {kernels}",
    )


def unpack(tail: Tail) -> tuple[RoutingPlan, ActivationSpec, KernelSet]:
    assert len(tail) == NUM_TAIL, "the schema and tail_args disagree"
    *plan_tensors, num_tokens, _ = tail
    plan = RoutingPlan(*plan_tensors, _num_experts(tail), num_tokens)  # type: ignore[call-arg]  # five of them
    spec, kernels = _parse(tail[-1])
    return plan, spec, kernel_set(kernels)


@lru_cache
def _parse(options: str) -> tuple[ActivationSpec, str]:
    name, gate_up, limit, alpha, kernels = options.split(" ")
    return ActivationSpec(name, gate_up, float(limit), float(alpha)), kernels


def _num_experts(tail: Tail) -> int:
    row_start_of_expert: Tensor = tail[NUM_PLAN_TENSORS - 1]
    return row_start_of_expert.shape[0] - 1


def _num_tokens(tail: Tail) -> int:
    num_tokens: int = tail[NUM_PLAN_TENSORS]
    return num_tokens


def _shape(like: Tensor, d: int, n: int, plan: RoutingPlan, spec: ActivationSpec) -> MoEShape:
    """The sizes of one call in elements of ``like``; its rows are those that buffers have."""
    return MoEShape(
        num_tokens=plan.num_tokens,
        hidden_size=d,
        intermediate_size=n,
        num_experts=plan.num_experts,
        num_experts_per_tok=1,  # the rows say how many there are
        is_gated=spec.is_gated,
        element_bytes=like.element_size(),
        rows=plan.capacity,
        is_topk=plan.pair_start_of_token is None,
    )


def define(
    name: str,
    args: str,
    returns: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    widths: Callable[[Sequence[Tensor], int], tuple[int, int]] | None,
    ahead: Ahead | None = None,
) -> Operator:
    """Register ``tilemoe::name(args, plan, options) -> returns`` with its implementation and its shape function.

    ``widths`` gives (d, n) from the arguments and the columns of h per column of a; None where they do not tell.
    ``ahead`` begins to compile for what comes.
    """

    def shape_of(*given: Any) -> MoEShape | None:
        plan, spec, _ = unpack(given[-NUM_TAIL:])
        return None if widths is None else _shape(given[0], *widths(given, spec.width_factor), plan, spec)

    run_as_given = with_advice("forward" if name == "moe" else name, Replayed(run, ahead), shape_of)

    def run_without_autocast(*given: Any) -> Any:
        kind = given[0].device.type
        if not torch.is_autocast_enabled(kind):
            return run_as_given(*given)
        # The op has chosen its dtypes: a backward that is called under autocast must not lower the fp32 ones.
        with torch.autocast(kind, enabled=False):
            return run_as_given(*given)

    return Operator(name, f"({args}, {_TAIL_SCHEMA}) -> {returns}", run_without_autocast, fake)


def _moe(
    x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, b1: Tensor | None, b2: Tensor | None, keep_h: bool, *tail: Any
) -> tuple[Tensor, Tensor]:
    plan, spec, ks = unpack(tail)
    if not keep_h:
        return infer(x, w1, w2, s, b1, b2, plan, spec, ks), x.new_empty(0, w1.shape[1])
    a, h = ks.up_proj_act(x, w1, b1, plan, spec)
    slices = forward_slices(_shape(x, w2.shape[1], w2.shape[2], plan, spec))
    given = [a]
    del a
    return _down_and_combine(given, x, w2, s, b2, plan, ks.down_proj, ks.combine, slices), h


def infer(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    s: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    plan: RoutingPlan,
    spec: ActivationSpec,
    ks: KernelSet,
) -> Tensor:
    """o (T, d), where nothing will be differentiated."""
    given = [ks.up_proj_act_inference(x, w1, b1, plan, spec)]
    slices = inference_slices(_shape(x, w2.shape[1], w2.shape[2], plan, spec))
    return _down_and_combine(given, x, w2, s, b2, plan, ks.down_proj_inference, ks.combine, slices)


def _down_and_combine(
    given: list[Tensor],
    x: Tensor,
    w2: Tensor,
    s: Tensor,
    b2: Tensor | None,
    plan: RoutingPlan,
    down_proj: DownProj,
    combine: Combine,
    slices: Sequence[slice],
) -> Tensor:
    """o (T, d). ``given`` holds a, the only reference to it: it ends when it has been read."""
    o: Tensor | None = None
    for index, columns in enumerate(slices):
        y = down_proj(given[0], w2[:, columns], None if b2 is None else b2[:, columns], plan)
        if index == len(slices) - 1:
            given.clear()  # before o is made, where there is one slice
        o = x.new_empty(x.shape[0], w2.shape[1]) if o is None else o
        combine(y, s, plan, o[:, columns])
        del y  # the largest transient: not to be alive beside the next slice
    assert o is not None, "d is at least 1"
    return o


def _moe_fake(
    x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, b1: Tensor | None, b2: Tensor | None, keep_h: bool, *tail: Any
) -> tuple[Tensor, Tensor]:
    capacity = tail[0].shape[0] if keep_h else 0
    return x.new_empty(x.shape[0], w2.shape[1]), x.new_empty(capacity, w1.shape[1])


def _up_proj(x: Tensor, w1: Tensor, b1: Tensor | None, *tail: Any) -> Tensor:
    plan, spec, ks = unpack(tail)
    return ks.up_proj_act(x, w1, b1, plan, spec)[1]


def _up_proj_fake(x: Tensor, w1: Tensor, b1: Tensor | None, *tail: Any) -> Tensor:
    return x.new_empty(tail[0].shape[0], w1.shape[1])


def _down_proj_act_grad(
    do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, *tail: Any
) -> tuple[Tensor, Tensor, Tensor]:
    plan, spec, ks = unpack(tail)
    return ks.down_proj_act_grad(do, w2, b2, h, s, plan, spec)


def _down_proj_act_grad_fake(
    do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, *tail: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h), torch.empty_like(s), h.new_empty(h.shape[0], w2.shape[2])


def _down_proj_weight_grad(do: Tensor, a_scaled: Tensor, column_major: bool, *tail: Any) -> Tensor:
    plan, _, ks = unpack(tail)
    return ks.down_proj_weight_grad(do, a_scaled, plan, column_major)


def _down_proj_weight_grad_fake(do: Tensor, a_scaled: Tensor, column_major: bool, *tail: Any) -> Tensor:
    return empty_weight_grad(do, (_num_experts(tail), do.shape[1], a_scaled.shape[1]), column_major)


def _up_proj_input_grad(dh: Tensor, w1: Tensor, *tail: Any) -> Tensor:
    plan, spec, ks = unpack(tail)
    d = w1.shape[2]
    dx = dh.new_empty(plan.num_tokens, d)
    for columns in backward_slices(_shape(dh, d, w1.shape[1] // spec.width_factor, plan, spec)):
        dx_rows = ks.up_proj_act_grad(dh, w1[:, :, columns], plan)
        ks.combine_grad(dx_rows, plan, dx[:, columns])
        del dx_rows
    return dx


def _up_proj_input_grad_fake(dh: Tensor, w1: Tensor, *tail: Any) -> Tensor:
    return dh.new_empty(_num_tokens(tail), w1.shape[2])


def _up_proj_weight_grad(x: Tensor, dh: Tensor, column_major: bool, *tail: Any) -> Tensor:
    plan, _, ks = unpack(tail)
    return ks.up_proj_weight_grad(x, dh, plan, column_major)


def _up_proj_weight_grad_fake(x: Tensor, dh: Tensor, column_major: bool, *tail: Any) -> Tensor:
    return empty_weight_grad(x, (_num_experts(tail), dh.shape[1], x.shape[1]), column_major)


def _down_proj_bias_grad(do: Tensor, s: Tensor, *tail: Any) -> Tensor:
    plan, _, ks = unpack(tail)
    return ks.down_proj_bias_grad(do, s, plan)


def _down_proj_bias_grad_fake(do: Tensor, s: Tensor, *tail: Any) -> Tensor:
    return s.new_empty(_num_experts(tail), do.shape[1])


def _up_proj_bias_grad(dh: Tensor, *tail: Any) -> Tensor:
    plan, _, ks = unpack(tail)
    return ks.up_proj_bias_grad(dh, plan)


def _up_proj_bias_grad_fake(dh: Tensor, *tail: Any) -> Tensor:
    return dh.new_empty(_num_experts(tail), dh.shape[1], dtype=compute_dtype(dh.dtype))


def _kind_of_layer(
    x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, b1: Tensor | None, b2: Tensor | None, keep_h: bool, *tail: Any
) -> Any:
    """What decides the kernels that a layer launches; None where they are not Triton's, or there are no rows."""
    capacity, num_tokens = tail[0].shape[0], _num_tokens(tail)
    if capacity == 0 or _parse(tail[-1])[1] not in BY_TRITON:
        return None
    biases = [None if b is None else (b.dtype, b.stride()) for b in (b1, b2)]
    weights = [(w.shape, w.stride(), w.data_ptr() % 16 == 0) for w in (w1, w2)]
    pairs_per_token = tail[2].shape[0] // num_tokens if tail[3] is None else 0
    rows = None if keep_h else few_rows(capacity, _num_experts(tail))
    precision = torch.backends.cuda.matmul.fp32_precision if x.dtype == torch.float32 else None
    return (x.dtype, x.stride(), *weights, s.dtype, *biases, pairs_per_token, rows, keep_h, precision, tail[-1])


def _layers_launches(*args: Any) -> Callable[..., None]:
    """For arguments of `moe`, a function that launches its forward and, where h is kept for it, the backward."""
    wanted = [arg is not None and arg.requires_grad for arg in args[:6]]
    if not any(wanted):  # a compiled graph's, whose backward is a graph of its own
        wanted = [arg is not None for arg in args[:6]]

    def launch(x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, b1: Any, b2: Any, keep_h: bool, *tail: Any) -> None:
        need_x, need_w1, need_w2, _, need_b1, need_b2 = wanted
        if keep_h:  # what takes longest to compile comes first
            do, h = x.new_empty(x.shape[0], w2.shape[1]), x.new_empty(tail[0].shape[0], w1.shape[1])
            dh, _, a_scaled = _down_proj_act_grad(do, w2, b2, h, s, *tail)
        _moe(x, w1, w2, s, b1, b2, keep_h, *tail)
        if not keep_h:
            return
        if need_b2:
            _down_proj_bias_grad(do, s, *tail)
        if need_w2:
            _down_proj_weight_grad(do, a_scaled, is_column_major(w2), *tail)
        if need_b1:
            _up_proj_bias_grad(dh, *tail)
        if need_x:
            _up_proj_input_grad(dh, w1, *tail)
        if need_w1:
            _up_proj_weight_grad(x, dh, is_column_major(w1), *tail)

    return launch


ahead_of_moe = Ahead(_kind_of_layer, _layers_launches)
moe = define(
    "moe",
    "Tensor x, Tensor w1, Tensor w2, Tensor s, Tensor? b1, Tensor? b2, bool keep_h",
    "(Tensor, Tensor)",
    _moe,
    _moe_fake,
    lambda given, parts: (given[2].shape[1], given[2].shape[2]),
    ahead_of_moe,
)
up_proj = define(
    "up_proj",
    "Tensor x, Tensor w1, Tensor? b1",
    "Tensor",
    _up_proj,
    _up_proj_fake,
    lambda given, parts: (given[1].shape[2], given[1].shape[1] // parts),
)
down_proj_act_grad = define(
    "down_proj_act_grad",
    "Tensor do, Tensor w2, Tensor? b2, Tensor h, Tensor s",
    "(Tensor, Tensor, Tensor)",
    _down_proj_act_grad,
    _down_proj_act_grad_fake,
    lambda given, parts: (given[1].shape[1], given[1].shape[2]),
)
down_proj_weight_grad = define(
    "down_proj_weight_grad",
    "Tensor do, Tensor a_scaled, bool column_major",
    "Tensor",
    _down_proj_weight_grad,
    _down_proj_weight_grad_fake,
    lambda given, parts: (given[0].shape[1], given[1].shape[1]),
)
up_proj_input_grad = define(
    "up_proj_input_grad",
    "Tensor dh, Tensor w1",
    "Tensor",
    _up_proj_input_grad,
    _up_proj_input_grad_fake,
    lambda given, parts: (given[1].shape[2], given[1].shape[1] // parts),
)
up_proj_weight_grad = define(
    "up_proj_weight_grad",
    "Tensor x, Tensor dh, bool column_major",
    "Tensor",
    _up_proj_weight_grad,
    _up_proj_weight_grad_fake,
    lambda given, parts: (given[0].shape[1], given[1].shape[1] // parts),
)
down_proj_bias_grad = define(
    "down_proj_bias_grad", "Tensor do, Tensor s", "Tensor", _down_proj_bias_grad, _down_proj_bias_grad_fake, None
)
up_proj_bias_grad = define(
    "up_proj_bias_grad", "Tensor dh", "Tensor", _up_proj_bias_grad, _up_proj_bias_grad_fake, None
)

BACKWARD_OPS = (
    up_proj,
    down_proj_act_grad,
    down_proj_weight_grad,
    up_proj_input_grad,
    up_proj_weight_grad,
    down_proj_bias_grad,
    up_proj_bias_grad,
)

"""Calls of the public API with some arguments replaced, and the verdict on each.

A call must raise a ValueError or a TypeError of one line that names an argument; or, where what it was given is
right in another form, return what it returns for ordinary tensors of the same values.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from api import CALLS, Call
from replacements import ANYTHING, OTHER_SHAPE, SAME_SHAPE, kinds_for, plain, replacement
from torch import Tensor

Changes = Mapping[str, str]  # argument -> kind of replacement

_PATIENCE_S = 30
_SAME_SHAPE, _OTHER_SHAPE = ({f"its {kind}" for kind in kinds} for kinds in (SAME_SHAPE, OTHER_SHAPE))
_ROWS, _COLUMNS = {"its shorter", "its longer", "its empty"}, {"its narrower", "its transposed"}
_BOOLS = "softmax_after_topk normalize bias expert_bias tie_embeddings RouterConfig.selection_bias training accumulate"
_NONE_OF_A_CALL = "b1 b2 token_mask group generator labels documents record cache expert_ids select_kernels.cfg"
_NONE_OF_SETTINGS = "recompute device dtype router num_ids max_chunk_logits rounding param_dtype reduce_dtype"
_NONE_OF_PARTS = "error_bits pair_start_of_token gradient_divide_factor mp_policy offload_policy"
_INDICES = "token_of_row pair_of_row row_of_pair pair_start_of_token row_start_of_expert"
# What is right although it is another kind of thing, or of another shape: names of arguments, perhaps with the
# function's before them, and kinds.
_VALID: tuple[tuple[str, set[str]], ...] = (
    (f"{_NONE_OF_A_CALL} {_NONE_OF_SETTINGS} kernels activation_limit activation_alpha compile_backend", {"None"}),
    (f"{_NONE_OF_PARTS} Routing.pairs_per_expert statistics expert_parallel.reshard_after_forward", {"None"}),
    (f"{_BOOLS} reshard_after_forward", {"True", "False"}),
    ("shared_gate add_aux_loss", {"True", "False"}),
    ("rate temperature aux_loss_coef z_loss_coef initializer_range", {"0", "2**31", "0.5"}),
    ("alpha scale rope_theta norm_eps", {"2**31", "0.5"}),
    ("moe.activation_limit moe.activation_alpha moe_lora.activation_limit moe_lora.activation_alpha", {"2**31", "0.5"}),
    ("shard shared_intermediate_size dense_intermediate_size top_k", {"0", "2**31"}),
    ("gradient_divide_factor", {"2**31", "0.5"}),
    ("num_groups tile replicate expert hidden_size intermediate_size num_experts head_dim", {"2**31"}),
    ("vocab_size num_layers max_seq_len num_heads num_ids max_chunk_logits", {"2**31"}),
    ("num_kv_heads num_experts_per_tok top_groups", {"2**31"}),  # where what they must not exceed is as large
    ("max_new_tokens", {"0"}),
    ("device", {"device"}),
    ("MoE.router", {"module"}),
    ("save_adapter.base", {"None", "text", "two lines"}),
    ("RoutingRecord.add.layer", set(ANYTHING) - {"list", "empty list", "dict", "numpy array"}),
    ("RoutingRecord.add.expert_ids", _ROWS | _COLUMNS | {"its meta", "its a dimension more", "its without columns"}),
    ("plan_topk.expert_ids", _ROWS | _COLUMNS | {"its meta"}),
    ("Router.forward.x route_rounded.logits chunked_cross_entropy.weight", _ROWS),
    ("generate.input_ids DecoderLM.next_logits.input_ids DecoderLM.forward_cached.input_ids", _ROWS | _COLUMNS),
    ("Documents.of.positions", _ROWS | {"its narrower", "its without columns"}),
    ("error_bits aux_loss", {"its transposed", "its 0 dimensions", "its meta"}),
    (_INDICES, {"its transposed"}),
    ("row_of_pair", _ROWS | _COLUMNS | {"its without columns"}),  # its length is the number of pairs
    ("Routing.expert_ids", {"its narrower", "its without columns"}),
    ("aux_loss", {"tensor of 0 dimensions"}),
    ("Routing.scores Routing.tokens_per_expert Routing.pairs_per_expert Routing.expert_ids", {"its meta"}),
    ("w2 token_mask selection_bias token expert labels expert_ids", {"its transposed"}),
    ("tokens_per_expert pairs_per_expert", {"its transposed"}),
)
VALID = {(name, kind) for names, kinds in _VALID for name in names.split() for kind in kinds}


@cache
def kinds_of(function: str) -> dict[str, list[str]]:
    """By argument, what can be put in its place."""
    return {name: kinds_for(value) for name, value in CALLS[function].arguments().items()}


def why_wrong(function: str, changes: Changes) -> str | None:
    """What is wrong with what the call does; None where nothing is."""
    call = CALLS[function]
    given = replaced(call, changes)
    try:
        with _in_time():
            found = call.function(**given)
    except (ValueError, TypeError) as error:
        return _why_bad_message(str(error), call, changes, given)
    except BaseException as error:  # of any class: it is the verdict
        return f"{type(error).__name__}: {error}"[:300]
    unlisted = [f"{argument}={kind}" for argument, kind in changes.items() if not _may_be(function, argument, kind)]
    if unlisted and (len(changes) == 1 or any(kind in ANYTHING for kind in changes.values())):
        return f"accepted {', '.join(unlisted)}"
    return _why_other_result(found, call, changes, given)


def replaced(call: Call, changes: Changes) -> dict[str, Any]:
    given = call.arguments()
    return {name: replacement(changes[name], value) if name in changes else value for name, value in given.items()}


def _may_be(function: str, argument: str, kind: str) -> bool:
    if kind in _SAME_SHAPE:
        return True  # the result says whether it is right
    return bool({(argument, kind), (f"{function}.{argument}", kind)} & VALID)


def _why_bad_message(message: str, call: Call, changes: Changes, given: Mapping[str, Any]) -> str | None:
    """It is one line with an argument's name: of those replaced, or where shapes do not go together, any."""
    names = {*changes, *call.called}
    if _OTHER_SHAPE & set(changes.values()):
        names |= set(given)
    named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names)
    return None if named and "\n" not in message else f"message {message[:300]!r}"


def _why_other_result(found: Any, call: Call, changes: Changes, given: Mapping[str, Any]) -> str | None:
    original = call.arguments()
    tensors = [name for name in changes if isinstance(given[name], Tensor) and isinstance(original[name], Tensor)]
    if not tensors or any(given[name].is_meta for name in tensors):
        return None
    ordinary = {**replaced(call, changes), **{name: plain(given[name], original[name]) for name in tensors}}
    expected = call.function(**ordinary)
    narrow = any(given[name].dtype in (torch.float16, torch.bfloat16) for name in tensors)
    tolerance = 3e-2 if narrow else 1e-5
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

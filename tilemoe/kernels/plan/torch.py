"""Plan building in plain PyTorch: one stable sort by expert (two for arbitrary pairs), without host sync on a GPU.

T tokens · E experts · K experts per token · P pairs · R_max static row capacity (= P here)
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.plan import NEGATIVE_EXPERT, TOKEN_OUT_OF_RANGE, raise_for_bits

Index = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> Index:
    """From expert_ids (T, K): token_of_row, pair_of_row, row_of_pair, row_start_of_expert, rows_per_expert (E),
    error_bits (all int32).

    An id >= E is a sentinel and is skipped. A negative id is a ValueError on CPU, and recorded in error_bits elsewhere.
    """
    experts_per_token = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    error_bits = _record(flat < 0, NEGATIVE_EXPERT)
    pair_of_row, row_of_pair, row_start = _rows_by_expert(flat, flat < 0, num_experts)
    token_of_row = pair_of_row // experts_per_token
    return token_of_row, pair_of_row, row_of_pair, row_start, torch.diff(row_start), error_bits


def new_index(expert_ids: Tensor, num_experts: int) -> Index:
    """The tensors that `sort_by_expert` returns, uninitialised."""

    def index(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=expert_ids.device)

    pairs = expert_ids.numel()
    return index(pairs), index(pairs), index(pairs), index(num_experts + 1), index(num_experts), index()


def sort_pairs(token: Tensor, expert: Tensor, num_tokens: int, num_experts: int) -> Index:
    """From P pairs in any order: token_of_row, pair_of_row, row_of_pair, pair_start_of_token, row_start_of_expert,
    error_bits (all int32). Ids as in `sort_by_expert`; a token outside [0, T) is an error like a negative id.
    """
    bad_token = (token < 0) | (token >= num_tokens)
    bad_expert = expert < 0
    error_bits = _record(bad_expert, NEGATIVE_EXPERT) | _record(bad_token, TOKEN_OUT_OF_RANGE)
    # A pair whose token is out of range is sorted after all tokens and computes nothing.
    token = torch.where(bad_token, num_tokens, token)
    token_sorted, by_token = torch.sort(token, stable=True)
    pair_start = _starts(token_sorted, num_tokens)
    position_of_row, row_of_pair, row_start = _rows_by_expert(
        expert[by_token], (bad_expert | bad_token)[by_token], num_experts
    )
    in_use = _in_use(position_of_row, row_start)
    token_of_row = torch.where(in_use, token_sorted[position_of_row], 0).int()
    pair_of_row = torch.where(in_use, by_token[position_of_row], 0).int()
    return token_of_row, pair_of_row, row_of_pair, pair_start, row_start, error_bits


def _rows_by_expert(flat: Tensor, skip: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort token-major pairs by expert, stably: (pair of row, row of pair or -1, row start of expert)."""
    key = torch.where(skip, num_experts, flat.clamp(max=num_experts))
    key_sorted, order = torch.sort(key, stable=True)
    row_start = _starts(key_sorted, num_experts)
    in_use = _in_use(order, row_start)
    rows = torch.arange(flat.shape[0], dtype=torch.int32, device=flat.device)
    row_of_pair = torch.empty_like(rows).scatter_(0, order, torch.where(in_use, rows, -1))
    return torch.where(in_use, order, 0).int(), row_of_pair, row_start


def _starts(keys_sorted: Tensor, num_keys: int) -> Tensor:
    """(num_keys + 1) int32: where each key's run begins in the sorted keys, then the number of valid keys."""
    boundaries = torch.arange(num_keys + 1, dtype=keys_sorted.dtype, device=keys_sorted.device)
    return torch.searchsorted(keys_sorted, boundaries, out_int32=True)


def _in_use(rows: Tensor, row_start: Tensor) -> Tensor:
    return torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device) < row_start[-1]


def _record(bad: Tensor, bit: int) -> Tensor:
    """The error bit as a 0-dim int32 on the device. ValueError on a CPU, where reading the bit costs nothing."""
    bits = bad.any().int() * bit
    if bits.device.type == "cpu":
        raise_for_bits(int(bits))
    return bits

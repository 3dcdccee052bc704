"""Causal attention within the documents of packed sequences, by PyTorch's varlen_attn or by a masked attention.

B sequences · S tokens each · N documents · H query heads · H_kv key and value heads · D head width
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.runtime.tensors import require_tensor

_NAMES_GROUPS = torch.__version__ >= "2.12"  # PyTorch 2.11 supports grouped heads without an argument for it


class Documents(NamedTuple):
    """The documents of packed sequences (B, S). No document extends into the next sequence.

    positions  (B, S) int64, each token's position in its document; 0 where a document begins
    bounds     (N + 1,) int32, the documents' first tokens among the B S tokens, and B S
    """

    positions: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, positions: Tensor) -> Documents:
        """The documents with these ``positions`` (B, S) int64, on their device. A host sync on a GPU.

        ValueError: ``positions`` are not those of documents, or a sequence does not begin with a document.
        """
        require_tensor("positions", positions)
        if positions.ndim != 2 or positions.dtype != torch.int64:
            raise ValueError(f"positions must be (B, S) int64, got {tuple(positions.shape)} {positions.dtype}")
        if positions.is_meta:
            raise ValueError("positions must have values, got a meta tensor")
        before = F.pad(positions[:, :-1] + 1, (1, 0))
        if not ((positions == 0) | ((positions == before) & (before > 0))).all():
            raise ValueError("positions must begin with 0 in each sequence and rise by 1 up to the next 0")
        begins = (positions.flatten() == 0).nonzero()[:, 0]
        bounds = torch.cat([begins, begins.new_tensor([positions.numel()])])
        return cls(positions, bounds.to(torch.int32))

    def real_tokens(self, ids: Tensor, labels: Tensor) -> Tensor:
        """(B, S) bool: False in a sequence's last document if it is padding: one repeated id without any label.

        If a sequence's labels are its ids, not shifted, no label marks padding: then the repeated id is enough, unless
        it fills the sequence. labels (B, S): as a model takes them, -100 where nothing is learnt. No host sync.
        """
        place = torch.arange(ids.shape[1], device=ids.device)
        before = place < place[-1] - self.positions[:, -1:]
        is_one_id = (before | (ids == ids[:, -1:])).all(dim=1, keepdim=True)
        is_unlearnt = (before | (labels < 0)).all(dim=1, keepdim=True)
        is_unshifted = (labels == ids).all(dim=1, keepdim=True) & before[:, :1]
        return before | ~(is_one_id & (is_unlearnt | is_unshifted))


def varlen_attention(queries: Tensor, keys: Tensor, values: Tensor, documents: Documents) -> Tensor:
    """(B, S, H, D) queries and (B, S, H_kv, D) keys and values, fp16 or bf16 on a GPU -> (B, S, H, D).

    Pairs of tokens in different documents cost neither time nor memory.
    """
    from torch.nn.attention.varlen import varlen_attn  # only here: it registers operators

    length = queries.shape[1]  # a bound on the documents' lengths; the longest length would need a host sync
    q, k, v = (tensor.flatten(0, 1) for tensor in (queries, keys, values))
    bounds, is_grouped = documents.bounds, queries.shape[2] != keys.shape[2]
    grouping: dict[str, Any] = {"enable_gqa": True} if is_grouped and _NAMES_GROUPS else {}
    out = varlen_attn(q, k, v, bounds, bounds, length, length, window_size=(-1, 0), **grouping)
    assert isinstance(out, Tensor), "the logarithms of sums were not asked for"
    return out.unflatten(0, queries.shape[:2])


def masked_attention(queries: Tensor, keys: Tensor, values: Tensor, documents: Documents) -> Tensor:
    """`varlen_attention` for any device and any dtype, which computes all pairs of a sequence's tokens.

    Masked pairs have a weight of exactly 0, so that a document's bits do not depend on other documents.
    """
    positions = documents.positions
    place = torch.arange(positions.shape[1], device=positions.device)
    first = place - positions  # (B, S): the first token of each token's document
    visible = (first[:, :, None] == first[:, None, :]).tril()
    q, k, v = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=True)
    return out.transpose(1, 2)

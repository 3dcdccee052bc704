"""Routing replay: record the expert ids that one forward chose, and check ids that another forward is to use.

In reinforcement learning one program samples the policy and another trains it. Their rounding errors differ, so a
token's experts, and therefore its log-probabilities, can differ (arXiv 2510.11370).

B sequences · S tokens each · T tokens · L MoE layers · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from tilemoe.checks import require_int
from tilemoe.ops.plan import check_ids
from tilemoe.runtime.tensors import require_tensor
from tilemoe.runtime.tracing import can_be_read


class RoutingRecord:
    """The expert ids of all forwards of a model's MoE layers. Pass it as ``record=`` to `DecoderLM` or `generate`.

    A layer returns its ids (`MoEOutput.expert_ids`) and the model adds them to the record. So forwards that activation
    checkpointing repeats are not recorded twice, torch.compile sees only tensors, and no global recording mode can be
    left on by mistake. `expert_ids` returns (B, S, K) int32 ids for each layer: the format that inference engines
    return with the sampled tokens, and that ``expert_ids=`` accepts.

    ValueError: see `add` and `expert_ids`. Source: arXiv 2510.11370.

    Examples:
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2))
        >>> record, x = tilemoe.RoutingRecord(), torch.randn(2, 5, 16)
        >>> record.add("layer", layer(x).expert_ids)
        >>> ids = record.expert_ids(batch_size=2)  # (L, B, S, K)
        >>> ids.shape, torch.equal(layer(x, expert_ids=ids[0]).hidden, layer(x).hidden)
        (torch.Size([1, 2, 5, 2]), True)
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[Tensor]] = {}

    def add(self, layer: Hashable, expert_ids: Tensor) -> None:
        """Add the ids of one forward of ``layer``, (T, K) or (B, S, K), int32 or int64.

        Layers are kept in the order of their first calls. ValueError: a shape or dtype is wrong.
        """
        require_tensor("expert_ids", expert_ids)
        if expert_ids.ndim not in (2, 3) or expert_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "expert_ids must be (T, K) or (B, S, K), int32 or int64, got "
                f"{tuple(expert_ids.shape)} {expert_ids.dtype}"
            )
        if not isinstance(layer, Hashable):
            raise ValueError(f"layer must be a number or a name, got {type(layer).__name__}")
        self._calls.setdefault(layer, []).append(expert_ids.detach())

    def expert_ids(self, batch_size: int) -> Tensor:
        """All ids (L, B, S, K) with B = ``batch_size``: the calls are concatenated along S, in their order.

        One record holds successive forwards of the same sequences in the same order, such as a prompt and then one
        token at a time with a key-value cache. Use another record for other sequences. A token that ``token_mask``
        excluded has ids E. Packed sequences count as one: ``batch_size=1``.

        ValueError: nothing was recorded, the layers recorded different numbers of tokens or of experts per token, or
        ``batch_size`` does not divide the tokens of a call.
        """
        require_int("batch_size", batch_size, 1)
        if not self._calls:
            raise ValueError(
                "the record is empty; pass it as record= to a model that has MoE layers, or inside record_routing run "
                "one that was not compiled before"
            )
        for ids in (ids for calls in self._calls.values() for ids in calls):
            if ids.shape[:-1].numel() % batch_size:
                raise ValueError(
                    f"batch_size ({batch_size}) must divide the {ids.shape[:-1].numel()} tokens of each recorded call; "
                    "give the number of sequences, 1 for packed ones"
                )
        layers = [
            torch.cat(
                [ids.reshape(batch_size, ids.shape[:-1].numel() // batch_size, ids.shape[-1]) for ids in calls], dim=1
            )
            for calls in self._calls.values()
        ]
        if len({layer.shape for layer in layers}) > 1:
            raise ValueError(
                f"the record's layers have {sorted({layer.shape[1] for layer in layers})} tokens per sequence and "
                f"{sorted({layer.shape[2] for layer in layers})} experts per token; record those that differ apart"
            )
        return torch.stack(layers)


def check_replayed_ids(
    expert_ids: Tensor,
    shape: tuple[int, int],
    num_experts: int,
    device: torch.device,
    token_mask: Tensor | None = None,
) -> None:
    """ValueError unless ``expert_ids`` can be replayed: (T, K) = ``shape``, int32 or int64, on ``device``.

    On CPU, outside torch.compile, values are also checked: ids in [0, E), none twice for a token. The ids of tokens
    that ``token_mask`` (T,) excludes may have any value.
    """
    check_ids("expert_ids", expert_ids, ndim=2)
    if tuple(expert_ids.shape) != shape:
        raise ValueError(
            f"expert_ids must be (T, K) = {shape}, got {tuple(expert_ids.shape)}; give K = num_experts_per_tok ids for "
            "each token of x, padding too"
        )
    if expert_ids.device != device:
        raise ValueError(f"expert_ids is on {expert_ids.device} but the logits are on {device}; move them together")
    if not can_be_read(expert_ids):
        return
    ids = expert_ids if token_mask is None else expert_ids[token_mask]
    outside = ids[(ids < 0) | (ids >= num_experts)]
    if outside.numel():
        raise ValueError(
            f"expert_ids must lie in [0, {num_experts}), got {int(outside[0])}; leave tokens that were not recorded "
            "out by token_mask"
        )
    in_order = ids.sort(dim=1).values
    twice = in_order[:, 1:][in_order[:, 1:] == in_order[:, :-1]]
    if twice.numel():
        raise ValueError(
            f"expert_ids names expert {int(twice[0])} twice for one token; a token's K experts must be distinct"
        )

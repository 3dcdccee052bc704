"""Exchange of tokens between GPUs that share a layer's experts: bytes and, across hosts, time without any overlap.

T tokens of a GPU · d hidden_size · E experts · K experts per token · X GPUs that share the experts: H hosts of G each
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilemoe.config import MoEConfig
from tilemoe.perf.hardware import DTYPE_BYTES, Gpu
from tilemoe.perf.predict import layer_ms
from tilemoe.shape import MoEShape

LINK_SHARE = 370 / 450  # share of its stated link that a GPU reached (results/expert_parallel.jsonl, docs/lab)
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Hosts:
    """H hosts of G GPUs, and a GPU's bandwidth in GB/s one way: ``link`` in its host, ``network`` to other hosts."""

    hosts: int
    gpus: int
    link: float
    network: float


def reached(moe: MoEConfig, processes: int) -> float:
    """The expected number of X processes, with E / X experts each, that have any of a token's K random experts.

    Hypergeometric: ``X (1 - C(E - E/X, K) / C(E, K))``. With grouped routing a token chooses among g of n groups. A
    process has experts of m = max(1, n / X) groups; if j of them are among the g, tokens can choose j/m of its experts.
    """
    groups, eligible, k = moe.router.num_groups, moe.router.top_groups, moe.num_experts_per_tok
    own, here = max(1, groups // processes), moe.num_experts // processes
    experts = moe.num_experts // groups * eligible
    missed = sum(
        math.comb(own, j) * math.comb(groups - own, eligible - j) * math.comb(experts - here * j // own, k)
        for j in range(min(own, eligible) + 1)
    )
    return processes * (1 - missed / math.comb(groups, eligible) / math.comb(experts, k))


def share_of(moe: MoEConfig, tokens: int, processes: int, element_bytes: int = _BF16) -> MoEShape:
    """A GPU's share of a layer: as many rows as one GPU alone, but fewer experts, and the tokens sent to it."""
    names = ("hidden_size", "intermediate_size", "is_gated", "save")
    sizes: dict[str, Any] = {name: getattr(moe, name) for name in names} | {"element_bytes": element_bytes}
    if processes == 1:
        return MoEShape(tokens, num_experts=moe.num_experts, num_experts_per_tok=moe.num_experts_per_tok, **sizes)
    here = math.ceil(tokens * reached(moe, processes))
    experts, rows = moe.num_experts // processes, tokens * moe.num_experts_per_tok
    return MoEShape(here, num_experts=experts, num_experts_per_tok=1, rows=rows, is_topk=False, **sizes)


def exchange_bytes(moe: MoEConfig, tokens: int, processes: int, dtype: str = "bf16") -> float:
    """Bytes that a GPU sends to others in a layer's forward and backward: rows to the experts and back, both twice.

    A token is sent once to each process that holds any of its experts. If ``dtype`` is "fp8", it has one byte per value
    and a 4-byte scale on the way there, and is bf16 on the way back.
    """
    remote = reached(moe, processes) * (processes - 1) / processes
    return 2 * sum(_row_bytes(moe, dtype)) * tokens * remote


def _row_bytes(moe: MoEConfig, dtype: str) -> tuple[int, int]:
    """Bytes of a token's row (on its way to the experts, on its way back)."""
    back = DTYPE_BYTES[dtype] * moe.hidden_size
    return (moe.hidden_size + _FP32 if dtype == "fp8" else back), back


def copies(moe: MoEConfig, hosts: Hosts) -> dict[str, tuple[float, float]]:
    """Copies of each of its tokens that a GPU sends (to other hosts, to other GPUs of its host), by way of exchange.

    "one exchange": a copy to each GPU that has any of the token's experts. "two levels": a copy to each such host, to
    the GPU with the sender's index there, which passes it on within the host.
    """
    on_gpus, on_hosts = reached(moe, hosts.hosts * hosts.gpus), reached(moe, hosts.hosts)
    elsewhere, others = (hosts.hosts - 1) / hosts.hosts, (hosts.gpus - 1) / hosts.gpus
    return {
        "one exchange": (on_gpus * elsewhere, on_gpus / hosts.hosts * others),
        "two levels": (on_hosts * elsewhere, on_gpus * others),
    }


def crossing_ms(moe: MoEConfig, tokens: int, hosts: Hosts, way: str, row_bytes: float) -> float:
    """Milliseconds for all tokens, one way. Copies on one kind of link add up; the two kinds of links overlap."""
    network, link = copies(moe, hosts)[way]
    return tokens * row_bytes * max(network / hosts.network, link / hosts.link) / 1e6


def exchange_plan(moe: MoEConfig, tokens: int, gpu: Gpu, hosts: Hosts, dtype: str) -> Mapping[str, Any]:
    """A layer on the hosts, as plain values: its computation; for each way its copies, its milliseconds in the forward
    (the backward takes as many), and the layer's forward and backward.
    """
    gpus = hosts.hosts * hosts.gpus
    computed = layer_ms(share_of(moe, tokens, gpus, DTYPE_BYTES[dtype]), gpu, dtype)
    ways = {}
    for name, (network, link) in copies(moe, hosts).items():
        exchange = sum(crossing_ms(moe, tokens, hosts, name, size) for size in _row_bytes(moe, dtype))
        ways[name] = {
            "network_copies": network,
            "link_copies": link,
            "exchange_ms": exchange,
            "layer_ms": [each + exchange for each in computed],
        }
    return {
        "hosts": hosts.hosts,
        "gpus_per_host": hosts.gpus,
        "link_gbps": hosts.link,
        "network_gbps": hosts.network,
        "computed_ms": list(computed),
        "ways": ways,
    }

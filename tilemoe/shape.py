"""The sizes of one MoE layer and its batch, from which costs and memory are computed.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · R routed rows
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoEShape:
    """The sizes of one layer and of its batch.

    ``rows``: R, or R_max to compute memory; None: T*K. ``element_bytes``: per element of x, weights and
    pre-activations h. ``is_topk``: every token has exactly K pairs. ``save``: how h is saved for the backward, "full"
    or "fp8". ValueError: a size is below 1 (T and R: below 0), or K > E.
    """

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    is_gated: bool = True
    element_bytes: int = 2
    rows: int | None = None
    is_topk: bool = True
    save: str = "full"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok", "element_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_tokens < 0 or (self.rows is not None and self.rows < 0):
            raise ValueError(f"num_tokens and rows must be at least 0, got {self.num_tokens} and {self.rows}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be at most num_experts ({self.num_experts})"
            )

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.num_experts_per_tok if self.rows is None else self.rows

    @property
    def width(self) -> int:
        """Columns of h: 2n gated, n ungated."""
        return (2 if self.is_gated else 1) * self.intermediate_size

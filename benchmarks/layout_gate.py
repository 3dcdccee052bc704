"""The gate of `layouts`: each cell against plain PyTorch, one expert at a time, in fp32 or fp64.

T tokens · d hidden_size · n intermediate_size · w rows of an expert's w1, 2n gated, n ungated · E experts · K experts
per token

The same loop in the cell's own dtype, every operation's result stored in it, is the yardstick: no error may be larger
than its error times `MARGIN`, nor than the cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.bench.gate import Difference
from tilemoe.config import UNGATED_ACTIVATIONS
from tilemoe.testing import ERROR_CAPS

MARGIN = 1.05
_LIMIT, _ALPHA = 7.0, 1.702  # of swiglu_oai
_DEEPSEEK_LIMIT = 10.0  # of swiglu_clamped

_POINTWISE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "swiglu": F.silu,
        "geglu": F.gelu,
        "geglu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "reglu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "relu2": lambda z: F.relu(z).square(),
    }
)


@dataclass(frozen=True)
class Cell:
    """What a layer is asked for. ``transposed``: stored as (E, d, w) and (E, n, d), and passed as transposed views."""

    transposed: bool = False
    gate_up: str = "concatenated"
    bias: bool = False
    activation: str = "swiglu"

    @property
    def is_gated(self) -> bool:
        return self.activation not in UNGATED_ACTIVATIONS


@dataclass(frozen=True, eq=False)
class Operands:
    """x (T, d), w1 (E, w, d), w2 (E, d, n), scores (T, K), b1 (E, w), b2 (E, d); ids (T, K); do (T, d)."""

    tensors: Mapping[str, Tensor]
    ids: Tensor
    do: Tensor


@dataclass(frozen=True)
class Verdict:
    """RMS-relative errors of o, dx, dw1, ... by name, those of the yardstick, and what is wrong, if anything is."""

    errors: Mapping[str, float]
    eager: Mapping[str, float]
    problem: str | None


def judge(found: Mapping[str, Tensor], operands: Operands, cell: Cell, exact: torch.dtype) -> Verdict:
    """``found``: o and the gradient of each operand, named dx, dw1, ... No expert's gradients outlive its turn."""
    x = operands.tensors["x"].detach()
    wide, narrow = _Sums(operands, exact), _Sums(operands, x.dtype)
    errors, eager = ({name: Difference() for name in found} for _ in range(2))
    for expert in range(operands.tensors["w2"].shape[0]):
        token, place = (operands.ids == expert).nonzero(as_tuple=True)
        right = wide.add(expert, token, place, cell)
        yardstick = narrow.add(expert, token, place, cell)
        for name, expected in right.items():
            errors[name].add(found[name][expert], expected)
            eager[name].add(yardstick[name], expected)
    for name, expected in wide.totals.items():
        errors[name].add(found[name], expected)
        eager[name].add(narrow.totals[name], expected)
    of_cell, of_eager = ({name: each.relative() for name, each in of.items()} for of in (errors, eager))
    return Verdict(of_cell, of_eager, _problem(of_cell, of_eager, ERROR_CAPS[x.dtype]))


def _problem(errors: Mapping[str, float], eager: Mapping[str, float], cap: float) -> str | None:
    for name, error in errors.items():
        if not error <= cap:
            return f"{name} is off by {error:.2e} RMS-relative"
        if not error <= MARGIN * eager[name]:
            return f"{name} is off by {error:.2e} RMS-relative, eager PyTorch by {eager[name]:.2e}"
    return None


class _Sums:
    """The layer in one dtype: what is summed over the experts, in ``totals``; an expert's own gradients are returned.

    Scores have a dtype of their own, which no narrower one replaces.
    """

    def __init__(self, operands: Operands, dtype: torch.dtype) -> None:
        self.operands, self.dtype = operands, dtype
        x, scores = operands.tensors["x"], operands.tensors["scores"]
        self.score_dtype = torch.promote_types(scores.dtype, dtype)
        zeros = {"o": torch.zeros_like(x, dtype=dtype), "dx": torch.zeros_like(x, dtype=dtype)}
        self.totals = {**zeros, "dscores": torch.zeros_like(scores, dtype=self.score_dtype)}

    def add(self, expert: int, token: Tensor, place: Tensor, cell: Cell) -> dict[str, Tensor]:
        tensors = {name: tensor.detach() for name, tensor in self.operands.tensors.items()}
        leaves = {"x": tensors.pop("x")[token].to(self.dtype)}
        leaves["scores"] = tensors.pop("scores")[token, place].to(self.score_dtype)
        leaves |= {name: tensor[expert].to(self.dtype) for name, tensor in tensors.items()}
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        part = _expert(leaves, cell).to(self.dtype)
        do = self.operands.do[token].to(self.dtype)
        grads = dict(zip(leaves, torch.autograd.grad(part, list(leaves.values()), do), strict=True))
        self.totals["o"].index_add_(0, token, part.detach())
        self.totals["dx"].index_add_(0, token, grads.pop("x"))
        self.totals["dscores"][token, place] = grads.pop("scores")
        return {f"d{name}": grad for name, grad in grads.items()}


def _expert(leaves: Mapping[str, Tensor], cell: Cell) -> Tensor:
    h = F.linear(leaves["x"], leaves["w1"], leaves.get("b1"))
    y = F.linear(_activation(h, cell), leaves["w2"], leaves.get("b2"))
    return y * leaves["scores"].unsqueeze(1)


def _activation(h: Tensor, cell: Cell) -> Tensor:
    if not cell.is_gated:
        return _POINTWISE[cell.activation](h)
    gate, up = (h[:, ::2], h[:, 1::2]) if cell.gate_up == "interleaved" else h.chunk(2, dim=-1)
    if cell.activation == "swiglu_clamped":
        return F.silu(gate.clamp(max=_DEEPSEEK_LIMIT)) * up.clamp(-_DEEPSEEK_LIMIT, _DEEPSEEK_LIMIT)
    if cell.activation != "swiglu_oai":
        return _POINTWISE[cell.activation](gate) * up
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * _ALPHA))

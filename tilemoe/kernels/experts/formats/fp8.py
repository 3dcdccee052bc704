"""FP8 (e4m3) with one scale per block, ``value = data * scale``: quantisation in PyTorch, and the cache of weights.

Blocks of up_proj, down_proj_dgrad and up_proj_dgrad: a row of x, do or dh; the part of a weight that makes one output
column. Blocks of down_proj: 1 x 128 of a, 128 x 128 of w2. Blocks of down_proj_wgrad and up_proj_wgrad, if
`quantizes_wgrad`: a row of x or do; all of an expert's rows of dh or a_scaled, multiplied by their tokens' scales.
h is kept in blocks of 1 x 128. A scale is the block's largest magnitude / 448 in fp32, so that the largest value maps
to 448; 1 for a block of zeros. ``data`` is ``value * (1 / scale)``, the inverse and the product in fp32, rounded to
nearest, ties to even. A NaN or an infinity makes its block NaN.

Quantising is idempotent: values that were quantised, dequantised and rounded to their dtype give the same ``data`` and
scales again, since the block's largest value is reproduced exactly and e4m3 is coarser than the dtype. The exception
is values that are subnormal in the dtype, in a block whose largest value is less than 448 * 2^9 times the smallest
subnormal (0.014 in fp16, 2e-35 in bf16). There e4m3 is finer than the dtype, and a value may change to its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilemoe.config import FP8_BLOCK, quantizes_wgrad
from tilemoe.kernels.experts.formats.dense import row_blocks
from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand, contracted_by
from tilemoe.plan import RoutingPlan, experts_of_rows
from tilemoe.runtime.precompile import withholds_values
from tilemoe.runtime.weight_cache import cache_of_unchanged_weights

BLOCK = FP8_BLOCK
ROWS, WEIGHTS = (1, BLOCK), (BLOCK, BLOCK)
LARGEST = 448.0  # the largest e4m3 value
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a smaller scale would be subnormal in fp32, and lose precision


def quantize(values: Tensor, block: tuple[int, int]) -> Operand:
    """``values`` (..., p, q), any float dtype but fp64, in e4m3, with an fp32 scale for each ``block`` of (p, q)."""
    *batch, p, q = values.shape
    rows, columns = -(-p // block[0]), -(-q // block[1])
    padded = F.pad(values.float(), (0, columns * block[1] - q, 0, rows * block[0] - p))
    blocks = padded.view(*batch, rows, block[0], columns, block[1])
    largest = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE))
    data = (blocks * (1 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(padded.shape)[..., :p, :q]
    return Operand(data.contiguous(), scale.view(*batch, rows, columns), block, values.dtype)


def words_of_row(width: int) -> int:
    """The number of int32 words that hold ``width`` values, a multiple of 4, and their scale."""
    return width // 4 + 1


def pack_rows(rows: Tensor) -> Tensor:
    """Quantise rows (R, p), p a multiple of 4, to int32 words (R, `words_of_row`), which any collective can exchange.

    A row is p bytes of data, then its scale in fp32.
    """
    operand = quantize(rows, (1, rows.shape[1]))
    return torch.cat((operand.data.view(torch.int32), operand.scale.view(torch.int32)), dim=1)


def unpack_rows(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_rows`: values (R, p) in ``dtype``."""
    return packed_operand(words, dtype).dense(dtype)


def packed_operand(words: Tensor, dtype: torch.dtype) -> Operand:
    """Rows (R, p) as an operand whose data and scales (R, 1) are views of ``words``, in the format of `pack_rows`."""
    width = 4 * (words.shape[1] - 1)
    data = words.view(torch.float8_e4m3fn)[:, :width]
    return Operand(data, words.view(torch.float32)[:, width // 4 :], (1, width), dtype)


def quantize_rows(rows: Tensor) -> Operand:
    """Rows (R, p) quantised in blocks of 1 x 128, some rows at a time, to bound the fp32 temporaries."""
    data = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scale = rows.new_empty(rows.shape[0], -(-rows.shape[1] // BLOCK), dtype=torch.float32)
    for part in row_blocks(rows):
        found = quantize(rows[part], ROWS)
        data[part], scale[part] = found.data, found.scale
    return Operand(data, scale, ROWS, rows.dtype)


def dense_rows(rows: Operand) -> Tensor:
    """The inverse of `quantize_rows`: values (R, p) in the dtype before quantisation; some rows at a time."""
    values = rows.data.new_empty(rows.data.shape, dtype=rows.dtype)
    for part in row_blocks(values):
        values[part] = rows[part,].dense(rows.dtype)
    return values


def why_not(dtype: torch.dtype, *widths: int) -> str | None:
    """Why a layer of this dtype with these values of d and n cannot be computed in FP8; None if it can."""
    if dtype == torch.float64:
        return "fp64 is not quantised"
    for name, width in zip("dn", widths, strict=False):
        if width % BLOCK:
            return f"{name} is not a multiple of {BLOCK}"
    return None


def rows_for(gemm: str, rows: GemmOperand) -> Operand:
    """x, a, do or dh as ``gemm`` reads it, with a scale for each 1 x 128 of a, and for each row of the others."""
    if isinstance(rows, Operand):
        return rows
    return quantize(rows, ROWS if gemm == "down_proj" else (1, rows.shape[1]))


def weight_for(gemm: str, weight: WeightOperand) -> Operand:
    """w1 or w2 as ``gemm`` reads it: a scale for each 128 x 128 in down_proj, for each output column elsewhere."""
    if isinstance(weight, Operand):
        return weight
    assert isinstance(weight, Tensor), "a packed weight is not quantised again"
    return quantize(weight, WEIGHTS if gemm == "down_proj" else weight_block(weight, contracted_by(gemm)))


def wgrad_operands(by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
    """(x or do (T, p), dh or a_scaled (R_max, q)) as the weight gradients multiply them: unchanged, or for wide layers
    quantised and held in fp32.

    A token's scale is multiplied into its rows of the other operand instead of back into the token. Then the other
    operand is quantised, with one scale for each expert.
    """
    if not quantizes_wgrad(by_token.shape[1], by_row.shape[1]):
        return by_token, by_row
    tokens = quantize(by_token, (1, by_token.shape[1]))
    rows = by_row.float() * tokens.scale.index_select(0, plan.token_of_row)
    index = torch.arange(plan.capacity, dtype=torch.int32, device=rows.device)
    rows[index >= plan.row_start_of_expert[-1]] = 0  # these rows belong to no expert
    expert = experts_of_rows(plan.row_start_of_expert, index).clamp(max=plan.num_experts - 1)
    largest = rows.new_zeros(plan.num_experts).scatter_reduce_(0, expert, rows.abs().amax(1), "amax")
    scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE))[expert].unsqueeze(1)
    data = (rows * (1 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return tokens.data.float(), data.float() * scale


def weight_block(weight: Tensor, contracted: int) -> tuple[int, int]:
    """The block of a weight (E, p, q) for one scale per line along dimension ``contracted``, 1 or 2."""
    return (1, weight.shape[2]) if contracted == 2 else (weight.shape[1], 1)


def scales_of(weight: Operand) -> Literal["rows", "blocks"]:
    """Whether a weight has a scale for each line (`weight_block`) or for each 128 x 128."""
    return "blocks" if weight.block == WEIGHTS else "rows"


class _Kept(NamedTuple):
    """A cache entry: a weight's operands by block, and its version, its address and the stream when they were made."""

    version: int
    address: int
    stream: int
    operands: dict[tuple[int, int], Operand]


Quantize = Callable[[Tensor, tuple[int, int]], Operand]  # quantises a weight (E, p, q) in blocks of this shape
# Used by a single process. An entry lives as long as its weight, and is valid while the version counter is unchanged.
_KEPT = WeakTensorKeyDictionary()


def kept(weight: Tensor, block: tuple[int, int], make: Quantize) -> Operand:
    """``weight`` (E, p, q) quantised by ``make`` in blocks of shape ``block``, from the cache if it is there.

    The cache holds it until PyTorch's version counter shows a write to the weight. The optimiser's step advances the
    counter; a write through ``.data`` does not. With several processes nothing is cached outside
    `promise_unchanged_weights`.
    """
    from tilemoe.runtime.launch_trace import recorder  # here, because it imports Triton

    find, watcher = partial(_data_and_scale, block=block, make=make), recorder()
    data, scale = find(weight) if watcher is None or _cache(weight) is None else watcher.kept(find, weight)
    return Operand(data, scale, block, weight.dtype)


def _data_and_scale(weight: Tensor, block: tuple[int, int], make: Quantize) -> tuple[Tensor, Tensor]:
    """(data, scale) from the cache, or quantised now."""
    cache = _cache(weight)
    if cache is None:
        operand = make(weight, block)
        return operand.data, operand.scale
    entry, now = cache.get(weight), (weight._version, weight.data_ptr(), _stream_of(weight))
    operands = entry.operands if entry is not None and entry[:3] == now else {}
    if block not in operands:
        # A new dict, since a withheld launch has written nothing, and its operand must not get into the cache.
        operands = operands | {block: make(weight, block)}
        if not withholds_values():
            cache[weight] = _Kept(*now, operands)
    operand = operands[block]
    return operand.data, operand.scale


def _stream_of(weight: Tensor) -> int:
    """The current stream. An entry is valid only on the stream that made it: other streams do not wait for it."""
    # torch.cuda.current_stream would make an object in each call.
    return torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda else 0


def _cache(weight: Tensor) -> WeakTensorKeyDictionary | None:
    """The cache that may hold this weight's operands; None where the version counter does not show every change.

    With several processes it is the cache of an open `promise_unchanged_weights`, or None, since FSDP's all-gather does
    not advance the counter. None while a CUDA graph is captured: each replay has to quantise again.
    """
    if not weight.is_leaf or weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return cache_of_unchanged_weights() if dist.is_available() and dist.is_initialized() else _KEPT

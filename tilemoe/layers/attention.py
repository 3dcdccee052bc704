"""Causal grouped-query attention with rotary embeddings and optional normalised queries and keys; its KV cache.

B sequences · S tokens of this call · C tokens in the cache, this call's included · d model width · D head width ·
H query heads · H_kv key and value heads
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilemoe.config import ModelConfig
from tilemoe.kernels.choose import choose_document_attention, choose_lm
from tilemoe.kernels.lm.documents import Documents
from tilemoe.layers.lora_linear import LoRALinear
from tilemoe.layers.norm import RMSNorm
from tilemoe.runtime.random import normal_


class LayerCache:
    """Keys and values of one layer. The first `append` allocates buffers for ``max_tokens`` tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def batch_size(self) -> int | None:
        """B, the number of sequences in the cache; None before the first `append`."""
        return None if self._keys is None else self._keys.shape[0]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, H_kv, S, D); returns views (B, H_kv, C, D) of all keys and all values."""
        start, self.length = self.length, self.length + keys.shape[2]
        assert self.length <= self.max_tokens, "the model checks this before it computes anything"
        if self._keys is None or self._values is None:
            shape = (keys.shape[0], keys.shape[1], self.max_tokens, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class KVCache:
    """One `LayerCache` per layer, for incremental decoding; pass it to the model's forward, which appends to it."""

    def __init__(self, num_layers: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._layers = [LayerCache(max_tokens) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """The number of tokens of each sequence in the cache."""
        return self._layers[0].length

    @property
    def batch_size(self) -> int | None:
        """B, the number of sequences in the cache; None before the first forward."""
        return self._layers[0].batch_size

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Context without cuDNN's attention, to attend to a cache: cuDNN, which PyTorch prefers on Hopper and Blackwell,
    makes a new plan for each length of the cache. The setting holds for all threads of the process.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def rotary_angles(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosine and sine (..., 1, D/2) of the angles of integer ``positions`` (...) (arXiv 2104.09864, equation 34).

    Position p rotates the columns (i, i + D/2) by ``p / theta^(2i/D)``; Hugging Face's checkpoints use this pairing.
    ``dtype`` is fp32, or fp64 for an fp64 model: bf16 cannot tell neighbouring positions apart.
    """
    inverse_wavelength = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim)
    angles = positions[..., None, None].to(dtype) * inverse_wavelength
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate queries or keys x (..., S, H, D) by angles (S, 1, D/2), or x (B, S, H, D) by (B, S, 1, D/2).

    It computes in the wider of the dtypes of x and the angles, and rounds once to ``dtype``; None: no rounding.
    Differentiable once, in x.
    """
    if cos.ndim == 4:  # treat it as one sequence of B S tokens
        one = rotate(x.flatten(0, 1)[None], cos.flatten(0, 1), sin.flatten(0, 1), dtype)
        return one.reshape(x.shape)
    return _Rotation.apply(x, cos, sin, dtype or torch.promote_types(x.dtype, cos.dtype))


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation. Autograd would differentiate each product and each sum, with
    seven times x's memory traffic, in fp32 if the angles are fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        if _is_one_kernel(x, cos):
            return _by_one_kernel(x, cos, sin, dtype, back=False)
        out = _turned(x, cos, sin)
        # No `to` that changes nothing: PyTorch 2.11's torch.compile would make its result's gradient zero.
        return out if out.dtype == dtype else out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        if _is_one_kernel(d_out, cos):
            return _by_one_kernel(d_out, cos, sin, ctx.dtype, back=True), None, None, None
        return _turned(d_out, cos, -sin).to(ctx.dtype), None, None, None


def _is_one_kernel(x: Tensor, cos: Tensor) -> bool:
    """Whether Triton rotates ``x`` in one pass; PyTorch needs four, which its mixed dtypes make slow."""
    is_fp32 = cos.dtype == torch.float32 == torch.promote_types(x.dtype, torch.float32)
    return is_fp32 and x.ndim == 4 and choose_lm(x).name == "triton"


def _by_one_kernel(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, back: bool) -> Tensor:
    from tilemoe.kernels.lm.triton_rotary import rotate as rotate_by_triton  # here, because Triton may not be installed

    return rotate_by_triton(x, cos, sin, dtype, back=back)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out, half = x * torch.cat((cos, cos), dim=-1), x.shape[-1] // 2
    # Slices, not chunks: autograd, which records this in torch.export, forbids writes to one of several views.
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


class Attention(nn.Module):
    """Causal grouped-query self-attention: H query heads share H_kv key and value heads; no biases."""

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.initializer_range = config.initializer_range
        d, q_width, kv_width = config.hidden_size, config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d, q_width, bias=False, device=device, dtype=dtype)
        self.k_proj = nn.Linear(d, kv_width, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(d, kv_width, bias=False, device=device, dtype=dtype)
        self.o_proj = nn.Linear(q_width, d, bias=False, device=device, dtype=dtype)
        self.qk_norm = config.qk_norm
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            q_normed, k_normed = (config.head_dim,) * 2 if config.qk_norm == "head" else (q_width, kv_width)
            self.q_norm = RMSNorm(q_normed, config.norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(k_normed, config.norm_eps, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            normal_(linear.weight, self.initializer_range, generator)
            if isinstance(linear, LoRALinear):
                linear.reset_adapters(generator)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """x (B, S, d) -> (B, S, d). ``angles``: cosine and sine of the S positions, or of (B, S) with ``documents``.

        With ``cache`` the queries also attend to its tokens; with ``documents`` only to tokens of their own document.
        """
        values = self._heads(self.v_proj(x))
        queries = rotate(self._normed(self.q_proj(x), self.q_norm), *angles, values.dtype)
        keys = rotate(self._normed(self.k_proj(x), self.k_norm), *angles, values.dtype)
        if documents is not None:
            assert cache is None, "the model checks this before it computes anything"
            attend = choose_document_attention(x.device, values.dtype, self.head_dim).impl
            return self.o_proj(attend(queries, keys, values, documents).flatten(2))
        queries, keys, values = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
        mask, causal = None, True
        if cache is not None:
            mask, causal = _visibility(cache.length, x.shape[1], x.device)
            keys, values = cache.append(keys, values)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _normed(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Queries or keys (B, S, H D) -> (B, S, H, D), normalised as ``qk_norm`` says."""
        if norm is None:
            return self._heads(x)
        return norm(self._heads(x)) if self.qk_norm == "head" else self._heads(norm(x))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, S, H D) -> (B, S, H, D)."""
        return x.unflatten(-1, (-1, self.head_dim))


def _visibility(held: int, new: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) for ``new`` tokens after ``held`` cached ones; mask is (S, C) bool or None.

    is_causal lets query i see keys 0 to i, which is right only for an empty cache.
    """
    if held == 0:
        return None, True
    if new == 1:
        return None, False
    return torch.ones(new, held + new, dtype=torch.bool, device=device).tril(held), False

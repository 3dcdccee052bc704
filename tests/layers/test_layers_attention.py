"""Attention against explicit loops in fp64, its causality, its positions and its cache."""

import math

import pytest
import torch
from helpers import tiny_model
from torch import Tensor

from tilemoe.layers.attention import Attention, KVCache, rotary_angles, rotate
from tilemoe.testing import relative_error

CONFIG = tiny_model(hidden_size=24, max_seq_len=32, moe=None, dense_layers=(), rope_theta=50.0, initializer_range=0.5)


def make(dtype: torch.dtype) -> Attention:
    torch.manual_seed(1)
    attention = Attention(CONFIG, dtype=dtype)
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return attention


def angles(count: int, start: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return rotary_angles(torch.arange(start, start + count), CONFIG.head_dim, CONFIG.rope_theta, dtype)


def by_loops(attention: Attention, x: Tensor) -> Tensor:
    """One sequence, head, query and key at a time, in fp64; positions turn complex numbers."""
    width, eps = CONFIG.head_dim, CONFIG.norm_eps
    weight = {name: parameter.detach().double() for name, parameter in attention.named_parameters()}

    def head(name: str, token: Tensor, index: int, position: int) -> Tensor:
        v = (weight[f"{name}_proj.weight"] @ token)[index * width : (index + 1) * width]
        if name == "v":
            return v
        v = v / (v.square().mean() + eps).sqrt() * weight[f"{name}_norm.weight"]
        turned = torch.complex(v[: width // 2], v[width // 2 :])
        for i in range(width // 2):
            turn = position / CONFIG.rope_theta ** (2 * i / width)
            turned[i] *= complex(math.cos(turn), math.sin(turn))
        return torch.cat([turned.real, turned.imag])

    out = torch.zeros_like(x, dtype=torch.float64)
    per_kv = CONFIG.num_heads // CONFIG.num_kv_heads
    for b in range(x.shape[0]):
        tokens = x[b].double()
        for s in range(x.shape[1]):
            parts = []
            for h in range(CONFIG.num_heads):
                query = head("q", tokens[s], h, s)
                keys = [head("k", tokens[t], h // per_kv, t) for t in range(s + 1)]
                share = torch.softmax(torch.stack([query @ key for key in keys]) / math.sqrt(width), 0)
                values = [head("v", tokens[t], h // per_kv, t) for t in range(s + 1)]
                parts.append(sum(p * v for p, v in zip(share, values, strict=True)))
            out[b, s] = weight["o_proj.weight"] @ torch.cat(parts)
    return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (None, 2e-2)]
)
def test_matches_loops(dtype: torch.dtype | None, tolerance: float) -> None:
    """Also under bf16's autocast (None), which keeps the angles exact."""
    attention = make(dtype or torch.float32)
    x = torch.randn(2, 9, 24).to(dtype or torch.float32)
    turn = angles(9, dtype=torch.promote_types(x.dtype, torch.float32))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        out = attention(x, turn)
    assert out.dtype == (dtype or torch.bfloat16)
    assert relative_error(out.detach(), by_loops(attention, x)) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient(dtype: torch.dtype) -> None:
    """Each pair (i, i + D/2) as one complex number, times e^(i angle)."""
    torch.manual_seed(0)
    x, d_out = torch.randn(2, 2, 7, 3, 8, dtype=dtype)
    x.requires_grad_()
    cos, sin = angles(7, 5, torch.float64 if dtype == torch.float64 else torch.float32)
    out = rotate(x, cos, sin, dtype)
    (dx,) = torch.autograd.grad(out, x, d_out)
    assert out.dtype == dx.dtype == dtype
    turn = torch.complex(cos.double(), sin.double())
    for got, start, by in ((out, x, turn), (dx, d_out, turn.conj())):
        first, second = start.detach().double().chunk(2, dim=-1)
        want = torch.complex(first, second) * by
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
        assert relative_error(got.detach().double(), torch.cat((want.real, want.imag), dim=-1)) < tolerance


def test_cache_is_allocated_once() -> None:
    cache = KVCache(num_layers=3, max_tokens=5)
    layer = next(iter(cache))
    first, _ = layer.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    second, values = layer.append(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))
    assert first.data_ptr() == second.data_ptr()
    assert values.shape == (1, 2, 5, 4)
    assert cache.length == 5
    assert len(list(cache)) == 3

"""Operators written out in torch for the tests here; float64 in, float64 out."""

import torch


def rotate(x, cos, sin, interleaved):
    """Rotary embedding of the first 2 * cos.shape[-1] elements of each head; the rest passes.

    Args:
        x: [..., tokens, heads, head_dim].
        cos: [..., tokens, rotary_dim / 2], as sin.
        sin: As cos.
        interleaved: Pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).
    """
    compute = torch.float64 if x.dtype is torch.float64 else torch.float32
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].to(compute), x[..., 2 * half :]
    cos, sin = cos.to(compute).unsqueeze(-2), sin.to(compute).unsqueeze(-2)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = (first * cos - second * sin, first * sin + second * cos)
    out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((out.to(x.dtype), rest), -1)


def table(max_pos, rotary_dim, base=10000.0, device="cpu"):
    """cos_sin_cache [max_pos, rotary_dim] of RoPE, fp32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.arange(max_pos, dtype=torch.float64)[:, None] * base**-exponents
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)

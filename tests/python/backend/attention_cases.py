"""Inputs for attention tests, and a KV cache that holds just what the backends may look at."""

from types import SimpleNamespace

import torch

MASKS = ("none", "2d", "3d", "3d_row", "4d", "4d_head", "4d_row", "4d_batch")


def randn(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Normal random numbers that do not depend on the device or dtype."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.to(device=device, dtype=dtype)


def qkv(batch, q_len, kv_len, q_heads, kv_heads, head_dim, **kwargs):
    """q, k and v of a dense call."""
    return (
        randn(batch, q_len, q_heads, head_dim, seed=1, **kwargs),
        randn(batch, kv_len, kv_heads, head_dim, seed=2, **kwargs),
        randn(batch, kv_len, kv_heads, head_dim, seed=3, **kwargs),
    )


def bool_mask(kind, batch, q_heads, q_len, kv_len, device="cpu", keep=0.7, seed=4):
    """A random bool mask of one of the MASKS; where it has rows, its first is all False."""
    shape = {
        "none": None,
        "2d": (batch, kv_len),
        "3d": (batch, q_len, kv_len),
        "3d_row": (batch, 1, kv_len),
        "4d": (batch, q_heads, q_len, kv_len),
        "4d_head": (batch, 1, q_len, kv_len),
        "4d_row": (batch, q_heads, 1, kv_len),
        "4d_batch": (1, 1, q_len, kv_len),
    }[kind]
    if shape is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < keep
    if kind in ("3d", "4d", "4d_head", "4d_batch"):
        mask[..., 0, :] = False
    return mask.to(device)


def relative_error(got, want):
    """||got - want|| / ||want||, in float64."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def make_cache(
    lens,
    q_lens,
    kv_heads=2,
    head_dim=64,
    max_seq=48,
    layers=2,
    rows=None,
    contiguous=True,
    host=True,
    dtype=torch.float32,
    device="cpu",
):
    """A KV cache before a call: history written, the call's own tokens and everything else NaN.

    Returns (cache, keys, values): the last two hold, for every request and layer, all of its
    tokens' K and V ``[len, kv_heads, head_dim]``, those of the call included.
    """
    batch = len(lens)
    rows = list(range(batch)) if rows is None else rows
    table_rows = max(rows) + 2
    slots = table_rows * max_seq
    if contiguous:
        table = torch.arange(slots).view(table_rows, max_seq)
    else:
        generator = torch.Generator().manual_seed(7)
        table = torch.randperm(slots, generator=generator).view(table_rows, max_seq)
    nan = torch.full((layers, slots, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    cache = SimpleNamespace(k_buffer=nan, v_buffer=nan.clone())
    keys, values, new_slots = [], [], []
    for index, (row, length, q_len) in enumerate(zip(rows, lens, q_lens, strict=True)):
        k = randn(layers, length, kv_heads, head_dim, dtype=dtype, device=device, seed=100 + index)
        v = randn(layers, length, kv_heads, head_dim, dtype=dtype, device=device, seed=200 + index)
        keys.append(k)
        values.append(v)
        old = table[row, : length - q_len].to(device)
        cache.k_buffer[:, old] = k[:, : length - q_len]
        cache.v_buffer[:, old] = v[:, : length - q_len]
        new_slots.append(table[row, length - q_len : length])
    int32 = {"dtype": torch.int32, "device": device}
    cache.req_to_token = table.to(**int32)
    cache.req_pool_indices = torch.tensor(rows, **int32)
    cache.seq_lens = torch.tensor(lens, dtype=torch.int64, device=device)
    cache.out_cache_loc = torch.cat(new_slots).to(**int32)
    offsets = [0]
    for q_len in q_lens:
        offsets.append(offsets[-1] + q_len)
    cache.qo_indptr = torch.tensor(offsets, **int32)
    cache.contiguous = contiguous
    if host:
        cache.lens, cache.rows, cache.q_lens = list(lens), rows, list(q_lens)
    return cache, keys, values


def packed_call(cache, keys, values, q_lens, q_heads, layer, dtype=torch.float32, device="cpu"):
    """q, k and v of a packed call over ``make_cache``'s requests."""
    head_dim = keys[0].shape[-1]
    q = randn(sum(q_lens), q_heads, head_dim, dtype=dtype, device=device, seed=5)
    k = torch.cat([k[layer, len(k[layer]) - n :] for k, n in zip(keys, q_lens, strict=True)])
    v = torch.cat([v[layer, len(v[layer]) - n :] for v, n in zip(values, q_lens, strict=True)])
    return q, k, v


def packed_expected(reference, q, keys, values, q_lens, layer, mask=None, **kwargs):
    """The same call request by request, by ``reference`` on float64."""
    outs, lses, start = [], [], 0
    for index, q_len in enumerate(q_lens):
        k, v = keys[index][layer], values[index][layer]
        part = None
        if mask is not None:
            part = mask[index : index + 1, ..., : len(k)]
            if mask.dim() > 2 and mask.shape[-2] != 1:
                part = part[..., :q_len, :]
        out, lse = reference(
            q[None, start : start + q_len].double(),
            k[None].double(),
            v[None].double(),
            part,
            return_lse=True,
            **kwargs,
        )
        outs.append(out[0])
        lses.append(lse[0])
        start += q_len
    return torch.cat(outs), torch.cat(lses)

"""attention_reference against a row-by-row softmax that shares no code with it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.backend.reference import attention_reference
from astrai.extension.errors import DtypeError, ShapeError
from tests.python.backend.attention_cases import MASKS, bool_mask, qkv, relative_error


def row_by_row(q, k, v, mask, is_causal, scale):
    """The definition, one query row at a time, over only the keys it may see."""
    batch, q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(batch, q_len, q_heads, head_dim, dtype=torch.float64)
    lse = torch.full((batch, q_len, q_heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(q_heads):
            for i in range(q_len):
                seen = []
                for j in range(kv_len):
                    allowed = not is_causal or j <= i + kv_len - q_len
                    if mask is not None:
                        if mask.dim() == 2:
                            allowed = allowed and bool(mask[b, j])
                        elif mask.dim() == 3:
                            allowed = allowed and bool(mask[b, min(i, mask.shape[1] - 1), j])
                        else:
                            row = mask[min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1)]
                            allowed = allowed and bool(row[min(i, mask.shape[2] - 1), j])
                    if allowed:
                        seen.append(j)
                if not seen:
                    continue
                group = h // (q_heads // kv_heads)
                scores = [scale * float(q[b, i, h] @ k[b, j, group]) for j in seen]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                lse[b, i, h] = top + math.log(sum(weights))
                for j, w in zip(seen, weights, strict=True):
                    out[b, i, h] += w / sum(weights) * v[b, j, group]
    return out, lse


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    q_len=st.integers(1, 6),
    kv_len=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(MASKS),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, -1.5]),
)
def test_equals_the_definition(
    batch, q_len, kv_len, kv_heads, group, head_dim, kind, is_causal, scale
):
    heads = kv_heads * group
    q, k, v = qkv(batch, q_len, kv_len, heads, kv_heads, head_dim, dtype=torch.float64)
    mask = bool_mask(kind, batch, heads, q_len, kv_len)
    out, lse = attention_reference(q, k, v, mask, is_causal, scale, return_lse=True)
    want, want_lse = row_by_row(q, k, v, mask, is_causal, scale)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention_reference(q, k, v, mask, is_causal, scale), out)


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 128), (128, 3), (1, 1), (5, 5), (65, 64)])
def test_case_c08_causal_is_bottom_right(q_len, kv_len):
    q, k, v = qkv(1, q_len, kv_len, 2, 1, 8, dtype=torch.float64)
    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    mask = (columns <= rows + kv_len - q_len)[None]
    out, lse = attention_reference(q, k, v, is_causal=True, return_lse=True)
    want, want_lse = attention_reference(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    blind = max(q_len - kv_len, 0)
    assert (out[:, :blind] == 0).all() and (lse[:, :blind] == -math.inf).all()
    assert torch.isfinite(lse[:, blind:]).all()


def test_case_c01_very_negative_scores_are_not_masked_ones():
    q = torch.full((1, 1, 1, 128), 24.0)
    k = torch.stack([torch.full((1, 128), -21.5), torch.full((1, 128), -21.6)])[None]
    v = torch.stack([torch.full((1, 128), 1.0), torch.full((1, 128), 2.0)])[None]
    out, lse = attention_reference(q, k, v, scale=1.0, return_lse=True)
    want, want_lse = attention_reference(
        q.double(), k.double(), v.double(), scale=1.0, return_lse=True
    )
    assert -7e4 < float(lse) < -6e4
    torch.testing.assert_close(out.double(), want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


def test_additive_mask_adds_to_the_scaled_scores():
    q, k, v = qkv(2, 3, 5, 2, 2, 8, dtype=torch.float64)
    keep = bool_mask("4d", 2, 2, 3, 5)
    bias = torch.zeros(2, 2, 3, 5, dtype=torch.float64).masked_fill(~keep, -math.inf)
    for is_causal in (False, True):
        got = attention_reference(q, k, v, bias, is_causal, return_lse=True)
        want = attention_reference(q, k, v, keep, is_causal, return_lse=True)
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])
    shifted = attention_reference(q, k, v, torch.full((2, 5), 2.0), return_lse=True)
    plain = attention_reference(q, k, v, return_lse=True)
    torch.testing.assert_close(shifted[0], plain[0])
    torch.testing.assert_close(shifted[1], plain[1] + 2)


@pytest.mark.parametrize("additive", [False, True])
def test_gradients_are_right_and_finite_in_rows_without_keys(additive):
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 3, 2, 1, 4, dtype=torch.float64))
    mask = bool_mask("3d", 1, 2, 4, 3)
    if additive:
        mask = torch.zeros(1, 4, 3, dtype=torch.float64).masked_fill(~mask, -math.inf)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention_reference(q, k, v, mask, is_causal=True), (q, k, v)
    )


def test_low_precision_inputs_are_computed_in_float32():
    q, k, v = qkv(2, 7, 9, 4, 2, 16, dtype=torch.bfloat16)
    out, lse = attention_reference(q, k, v, return_lse=True)
    want = attention_reference(q.double(), k.double(), v.double())
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
    assert relative_error(out, want) < 3e-3


@pytest.mark.parametrize(
    ("shape", "kv_shape"),
    [
        ((2, 0, 4, 8), (2, 5, 4, 8)),
        ((2, 3, 4, 8), (2, 0, 4, 8)),
        ((0, 3, 4, 8), (0, 5, 4, 8)),
    ],
)
def test_empty_inputs(shape, kv_shape):
    q, k = torch.ones(shape), torch.ones(kv_shape)
    out, lse = attention_reference(q, k, k, is_causal=True, return_lse=True)
    assert out.shape == shape and lse.shape == shape[:-1]
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": (2, 3, 8)}, ShapeError, "q must be 4D"),
        ({"k": (2, 5, 1, 8)}, ShapeError, "k and v must have one shape but for the head_dim"),
        ({"k": (3, 5, 2, 8), "v": (3, 5, 2, 8)}, ShapeError, "k must have q's batch 2"),
        ({"k": (2, 5, 2, 4), "v": (2, 5, 2, 4)}, ShapeError, "head_dim 8"),
        ({"k": (2, 5, 3, 8), "v": (2, 5, 3, 8)}, ShapeError, "multiple of kv_heads 3, got 4"),
        ({"k": (2, 5, 0, 8), "v": (2, 5, 0, 8)}, ShapeError, "multiple of kv_heads 0"),
        ({"mask": (5,)}, ShapeError, "mask must be 2D"),
        ({"mask": (2, 4)}, ShapeError, "mask last dim must be kv_len 5"),
        ({"mask": (3, 5)}, ShapeError, "mask batch must be 2 or 1"),
        ({"mask": (2, 2, 5)}, ShapeError, "mask q_len must be 3 or 1"),
        ({"mask": (2, 3, 3, 5)}, ShapeError, "mask heads must be 4 or 1"),
    ],
)
def test_bad_shapes(change, error, message):
    shapes = {"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8), **change}
    mask = shapes.pop("mask", None)
    mask = None if mask is None else torch.ones(mask, dtype=torch.bool)
    with pytest.raises(error, match=message):
        attention_reference(*(torch.ones(shape) for shape in shapes.values()), mask)


def test_bad_dtypes():
    x = torch.ones(1, 2, 1, 8)
    with pytest.raises(DtypeError, match="one floating dtype"):
        attention_reference(x, x.half(), x)
    with pytest.raises(TypeError, match="one floating dtype"):
        attention_reference(x.int(), x.int(), x.int())
    with pytest.raises(TypeError, match="mask must be bool"):
        attention_reference(x, x, x, torch.ones(1, 2, dtype=torch.int32))

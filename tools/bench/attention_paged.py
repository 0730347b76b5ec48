"""What the paged rows of bench_attention time: ours, FlashInfer, and ours otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench import attention_rows, harness, peers
from tools.bench.attention_rows import Shape
from tools.bench.harness import Candidate

# Dequantisation steps of an e4m3 cache; values of unit variance fit its range as they are.
_STEP = 1.0


def _as_is(result):
    return result


class Pages:
    """Which pages the requests of a shape have, in an order that says nothing about the place.

    Attributes:
        lengths: Keys of each request.
        page_size: Tokens of a page.
        count: Pages of all requests.
        table: int32 [batch, most pages of a request]; -1 behind the last one.
        kv_indptr: int32 [batch + 1].
    """

    def __init__(self, lengths: Sequence[int], page_size: int) -> None:
        import torch

        self.lengths = list(lengths)
        self.page_size = page_size
        counts = [-(-length // page_size) for length in lengths]
        self.count = sum(counts)
        order = torch.randperm(self.count, device=harness.DEVICE, dtype=torch.int64).to(torch.int32)
        self.table = torch.full(
            (len(counts), max(counts)), -1, device=harness.DEVICE, dtype=torch.int32
        )
        for row, pages in enumerate(order.split(counts)):
            self.table[row, : len(pages)] = pages
        ends = torch.tensor([0, *self.lengths], device=harness.DEVICE).cumsum(0)
        self.kv_indptr = ends.to(torch.int32)
        self._rows = torch.arange(len(counts), device=harness.DEVICE, dtype=torch.int32)

    def arguments(self, k: Any, v: Any) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments of ours from k_cache to kv_indptr: a token table for page 1.

        Args:
            k: [pages, page_size, kv_heads, head_dim].
            v: Likewise.
        """
        if self.page_size == 1:
            return (k.squeeze(1), v.squeeze(1), self.table, self._rows, self.kv_indptr), {}
        return (k, v, None, None, self.kv_indptr), {"block_table": self.table}

    def dense(self, cache: Any) -> Any:
        """Returns a contiguous [batch, kv_heads, kv_len, head_dim] copy; lengths must be equal."""
        tokens = cache[self.table.long()].flatten(1, 2)[:, : self.lengths[0]]
        return tokens.transpose(1, 2).contiguous()


def _random(*sizes: int) -> Any:
    import torch

    return torch.randn(*sizes, device=harness.DEVICE, dtype=getattr(torch, harness.dtype()))


def _indptr(batch: int, length: int) -> Any:
    import torch

    return torch.arange(batch + 1, device=harness.DEVICE, dtype=torch.int32) * length


class _Decode:
    """Calls of one decode shape, on given pages."""

    def __init__(self, shape: Shape, pages: Pages) -> None:
        import torch

        from astrai.extension import ops

        self._ops, self._pages = ops, pages
        q_len, sizes = shape["q_len"], (shape["q_heads"], shape["kv_heads"], shape["head_dim"])
        more: dict[str, Any] = {"deterministic": shape["deterministic"]}
        if shape["window_left"] >= 0:
            more["window"] = (shape["window_left"], 0)
        if shape["cache"] == "e4m3":
            more |= {"k_scale": _STEP, "v_scale": _STEP}
        if q_len > 1:
            more |= {"qo_indptr": _indptr(shape["batch"], q_len), "max_q_len": q_len}
        size = ops.attn_paged_decode_workspace_size(
            shape["batch"], *sizes, max_q_len=q_len, deterministic=shape["deterministic"]
        )
        more["workspace"] = torch.empty(max(size, 16), device=harness.DEVICE, dtype=torch.uint8)
        self._more = more

    def call(self, q: Any, k: Any, v: Any) -> harness.Call:
        """Returns a call for q [rows, q_heads, head_dim] and caches of four dimensions."""
        tensors, table = self._pages.arguments(k, v)
        options = {**self._more, **table}
        return lambda: self._ops.attn_paged_decode(q, *tensors, **options)


def paged_decode_candidates(shape: Shape, sets: int) -> dict[str, Candidate]:
    """Returns ours first, then FlashInfer (or cuDNN on a dense copy), then ours otherwise."""
    import torch

    pages = Pages(attention_rows.lengths(shape), shape["page_size"])
    size = (pages.count, pages.page_size, shape["kv_heads"], shape["head_dim"])
    rows = shape["batch"] * shape["q_len"]
    inputs = []
    for _ in range(sets):
        q = _random(rows, shape["q_heads"], shape["head_dim"])
        caches = [_random(*size) for _ in range(2)]
        if shape["cache"] == "e4m3":
            caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
        inputs.append((q, *caches))
    ours = _Decode(shape, pages)
    found = {"astrai": Candidate([ours.call(*each) for each in inputs], _as_is)}
    if shape["cache"] == "16 bits" and not shape["deterministic"]:
        found |= _decode_peer(shape, pages, inputs)
    return found | _otherwise(shape, pages, inputs)


def _decode_peer(shape: Shape, pages: Pages, inputs: list[tuple]) -> dict[str, Candidate]:
    """FlashInfer on the same cache where it is installed and takes the shape, else cuDNN."""
    windowed = shape["window_left"] >= 0
    if not windowed and peers.installed(peers.flashinfer) is not None:
        try:
            run = _plan_flashinfer(shape, pages, inputs[0][0])
        except Exception as error:  # its compilers may fail
            harness.note_peer_failure("flashinfer", error)
        else:
            calls = [lambda q=q, k=k, v=v: run(q, (k, v)) for q, k, v in inputs]
            return {"flashinfer": Candidate(calls, _as_is)}
    if shape["ragged"] or shape["q_len"] > 1:
        return {}  # no dense call does the same
    return {"cudnn_dense": _cudnn_dense(shape, pages, inputs)}


def _plan_flashinfer(shape: Shape, pages: Pages, q: Any):
    plan = (pages.table, pages.lengths, pages.page_size, q, shape["kv_heads"])
    if shape["q_len"] == 1:
        return peers.flashinfer_decode(*plan)
    return peers.flashinfer_prefill(*plan, _indptr(shape["batch"], shape["q_len"]), True, "fa2")


def _cudnn_dense(shape: Shape, pages: Pages, inputs: list[tuple]) -> Candidate:
    """Reads a contiguous copy; with a window, of the keys in it alone."""
    from torch.nn.attention import SDPBackend

    seen = min(shape["kv_len"], shape["window_left"] + 1) if shape["window_left"] >= 0 else 0
    gqa = {"enable_gqa": shape["q_heads"] > shape["kv_heads"]}
    calls = []
    for q, *caches in inputs:
        k, v = (pages.dense(cache)[:, :, -seen:].contiguous() for cache in caches)
        calls.append(peers.sdpa(SDPBackend.CUDNN_ATTENTION, q[:, :, None], k, v, **gqa))
    return Candidate(calls, lambda out: out.squeeze(2))


def _otherwise(shape: Shape, pages: Pages, inputs: list[tuple]) -> dict[str, Candidate]:
    """Ours under the condition that a goal names: what the shape's feature may cost."""
    if shape["q_len"] > 1:
        one = _Decode({**shape, "q_len": 1}, pages)
        first = slice(None, shape["batch"])
        return {"astrai_q_len_1": Candidate([one.call(q[first], k, v) for q, k, v in inputs])}
    if shape["cache"] == "e4m3":
        wide = _Decode({**shape, "cache": "16 bits"}, pages)
        calls = [wide.call(q, k.to(q.dtype), v.to(q.dtype)) for q, k, v in inputs]
        return {"astrai_bf16_cache": Candidate(calls, _as_is)}
    if shape["deterministic"]:
        free = _Decode({**shape, "deterministic": False}, pages)
        return {"astrai_not_deterministic": Candidate([free.call(*i) for i in inputs], _as_is)}
    if pages.page_size == 1 and pages.count % 16 == 0 and shape["kv_len"] % 16 == 0:
        # The same memory, as pages of 16.
        large = Pages(pages.lengths, 16)
        decode = _Decode({**shape, "page_size": 16}, large)
        size = (large.count, 16, shape["kv_heads"], shape["head_dim"])
        calls = [decode.call(q, k.view(size), v.view(size)) for q, k, v in inputs]
        return {"astrai_page_16": Candidate(calls)}
    return {}


def paged_prefill_candidates(shape: Shape) -> dict[str, Candidate]:
    """Returns ours first, then FlashInfer (or cuDNN on a dense copy), then our dense prefill."""
    from torch.nn.attention import SDPBackend

    from astrai.extension import ops

    batch, q_len, causal = shape["batch"], shape["q_len"], shape["causal"]
    pages = Pages(attention_rows.lengths(shape), shape["page_size"])
    q = _random(batch * q_len, shape["q_heads"], shape["head_dim"])
    size = (pages.count, pages.page_size, shape["kv_heads"], shape["head_dim"])
    k, v = _random(*size), _random(*size)
    qo_indptr = _indptr(batch, q_len)
    maps = ops.build_q_work_map(qo_indptr, batch * q_len)
    tensors, table = pages.arguments(k, v)

    def ours():
        return ops.attn_paged_prefill(
            q, *tensors, qo_indptr, *maps, is_causal=causal, max_q_len=q_len, **table
        )

    found = {"astrai": Candidate([ours], _as_is)}
    if peers.installed(peers.flashinfer) is not None:
        try:
            plan = (pages.table, pages.lengths, pages.page_size, q, shape["kv_heads"])
            run = peers.flashinfer_prefill(*plan, qo_indptr, causal, "fa3")
            found["flashinfer"] = Candidate([lambda: run(q, (k, v))], _as_is)
        except Exception as error:  # its compilers may fail
            harness.note_peer_failure("flashinfer", error)
    rows = q.unflatten(0, (batch, q_len))
    if "flashinfer" not in found and q_len == shape["kv_len"]:
        group = shape["q_heads"] // shape["kv_heads"]
        call = peers.sdpa(
            SDPBackend.CUDNN_ATTENTION,
            rows.transpose(1, 2).contiguous(),
            pages.dense(k),
            pages.dense(v),
            is_causal=causal,
            enable_gqa=group > 1,
        )
        found["cudnn_dense"] = Candidate([call], lambda out: out.transpose(1, 2).flatten(0, 1))
    if shape["page_size"] >= 16:
        dense_k, dense_v = (pages.dense(x).transpose(1, 2).contiguous() for x in (k, v))
        found["astrai_dense"] = Candidate(
            [lambda: ops.attn_prefill(rows, dense_k, dense_v, is_causal=causal)],
            lambda out: out.flatten(0, 1),
        )
    return found

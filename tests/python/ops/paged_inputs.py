"""Paged problems for the tests on a GPU: what an operator gets, and what it must give."""

from dataclasses import dataclass

import torch

from astrai.extension.ops import reference
from astrai.extension.ops.reference import Features, PagedCache
from tests.python.ops.attention_inputs import randn


def prefix_sums(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


@dataclass
class Problem:
    """Arguments of a paged operator. Slots without a token hold NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_indptr: torch.Tensor
    qo_indptr: torch.Tensor | None
    new_k: torch.Tensor | None
    new_v: torch.Tensor | None
    table: torch.Tensor
    rows: torch.Tensor | None  # None: the table is a block table

    def tables(self):
        if self.rows is None:
            return {"req_to_token": None, "req_pool_indices": None, "block_table": self.table}
        return {"req_to_token": self.table, "req_pool_indices": self.rows}

    def arguments(self, **more):
        """By name, for attn_paged_decode; those of attn_paged_prefill without new_k, new_v."""
        own = {"q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache}
        new = {"new_k": self.new_k, "new_v": self.new_v} if self.new_k is not None else {}
        return {
            **own,
            **self.tables(),
            "kv_indptr": self.kv_indptr,
            "qo_indptr": self.qo_indptr,
            **new,
            **more,
        }

    def expected(self, features=None, mask=None):
        """(out, lse) in float64 and the caches as they are afterwards; changes nothing."""
        copies = [clone(x) for x in (self.k_cache, self.v_cache)]
        cache = PagedCache(*copies, self.table, self.rows)
        new = (self.new_k, self.new_v)
        rule = features or Features()
        if self.qo_indptr is None and rule.is_causal:
            rule = Features(**{**vars(rule), "is_causal": False})
        indptr = (self.kv_indptr, self.qo_indptr)
        out = reference.paged_attention(self.q.double(), cache, *indptr, *new, mask, rule)
        return out, copies


def clone(x):
    return x.view(torch.uint8).clone().view(x.dtype) if x.element_size() == 1 else x.clone()


def raw(x):
    """The bits of a tensor, which can be compared where values hold NaN."""
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16)


def caches(slots, page_size, kv_heads, head_dim, v_head_dim, dtype, interleaved):
    """NaN all over, k and v side by side in each page or apart from each other."""
    pages = (slots + page_size - 1) // page_size
    shape = (pages, page_size) if page_size > 1 else (pages,)
    fill = torch.full if dtype.itemsize > 1 else lambda s, _, **kw: torch.full(s, 0x7F, **kw)
    held = dtype if dtype.itemsize > 1 else torch.uint8
    if interleaved and head_dim == v_head_dim:
        both = fill(
            (pages, 2, *shape[1:], kv_heads, head_dim), torch.nan, dtype=held, device="cuda"
        )
        return [both[:, i].view(dtype) for i in range(2)]
    return [
        fill((*shape, kv_heads, dim), torch.nan, dtype=held, device="cuda").view(dtype)
        for dim in (head_dim, v_head_dim)
    ]


def problem(
    kv_lens,
    q_lens=None,
    heads=(8, 2),
    head_dim=128,
    v_head_dim=None,
    page_size=16,
    block_table=True,
    dtype=torch.bfloat16,
    cache_dtype=None,
    append=False,
    interleaved=False,
    seed=0,
):
    """``q_lens`` None: one query a request, not packed. ``append``: the queries' keys are new."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    q_heads, kv_heads = heads
    batch = len(kv_lens)
    own_q_lens = [1] * batch if q_lens is None else q_lens
    tokens = sum(own_q_lens)
    width = max([1, *((n + page_size - 1) // page_size for n in kv_lens)])
    generator = torch.Generator().manual_seed(seed)
    # Pages in any order, with one between that belongs to nobody.
    pages = torch.randperm(batch * width + 1, generator=generator)[: batch * width]
    entries = pages.int().view(batch, width).cuda()
    slots = entries.long().repeat_interleave(page_size, 1) * page_size
    slots += torch.arange(width * page_size, device="cuda") % page_size
    cache_dtype = cache_dtype or dtype
    k_cache, v_cache = caches(
        (batch * width + 1) * page_size,
        page_size,
        kv_heads,
        head_dim,
        v_head_dim,
        cache_dtype,
        interleaved,
    )
    for cache, dim, stream in ((k_cache, head_dim, 1), (v_cache, v_head_dim, 2)):
        for b, length in enumerate(kv_lens):
            old = max(length - own_q_lens[b], 0) if append else length
            values = randn(old, kv_heads, dim, dtype=dtype, seed=seed + 100 * b + stream)
            reference.store(cache, slots[b, :old], values, None)
    new = [
        randn(tokens, kv_heads, dim, dtype=dtype, seed=seed + stream) if append else None
        for dim, stream in ((head_dim, 3), (v_head_dim, 4))
    ]
    rows = None
    # Entries past the length are never read: what stands there would fault.
    used = torch.arange(width, device="cuda") < torch.tensor(
        [[(n + page_size - 1) // page_size] for n in kv_lens], device="cuda"
    ).view(batch, 1)
    table = torch.where(used, entries, 2**30)
    if not block_table:
        length = torch.tensor(kv_lens, device="cuda").view(batch, 1)
        in_use = torch.arange(slots.shape[1], device="cuda") < length
        token_table = torch.where(in_use, slots, 2**30).int()
        rows = torch.randperm(batch, generator=generator).int().cuda()
        table = torch.empty_like(token_table)
        table[rows.long()] = token_table
    return Problem(
        randn(tokens, q_heads, head_dim, dtype=dtype, seed=seed + 5),
        k_cache,
        v_cache,
        prefix_sums(kv_lens),
        None if q_lens is None else prefix_sums(q_lens),
        *new,
        table,
        rows,
    )

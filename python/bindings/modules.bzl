"""The extension modules of the wheel, by name."""

# Each is python/bindings/NAME.cc, and becomes astrai/extension/lib/NAME.<EXT_SUFFIX>.
MODULES = [
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "rotary_emb",
]

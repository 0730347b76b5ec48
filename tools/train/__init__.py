"""A small Llama, trained in bf16 and in fp8 side by side."""

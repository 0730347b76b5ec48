"""Benchmarks of the kernel families, and the harness that measures them."""

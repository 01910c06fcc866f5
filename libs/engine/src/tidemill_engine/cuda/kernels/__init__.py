"""Triton kernels for what surrounds attention and the matrix products; arithmetic is float32, storage bfloat16."""

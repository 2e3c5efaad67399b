"""Backends and kernels for GPUs: torch's FlexAttention, and the statistics of the weights in Triton."""

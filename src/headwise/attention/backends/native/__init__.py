"""Attention by kernels in C++ for the CPU, with the statistics of attention weights in the same pass."""

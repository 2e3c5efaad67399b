"""Implementations of one attention call: reference, torch's fused kernels, and blocks of rows."""

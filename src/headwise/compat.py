"""Replacement for `torch.nn.MultiheadAttention`: `from headwise.compat import MultiheadAttention`."""

from headwise.nn.torch_compat import MultiheadAttention

__all__ = ["MultiheadAttention"]

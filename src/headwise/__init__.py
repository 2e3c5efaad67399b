"""headwise: multi-head attention for PyTorch with every head in reach."""

from headwise.attention.attend import attend, why_not
from headwise.attention.masks import Mask
from headwise.attention.rules import causal, chunked, dense, padding, per_head, prefix, segments, where, window
from headwise.convert import from_heads, from_projections, from_torch
from headwise.errors import HeadwiseError, InputError, MissingExtra
from headwise.heads.view import view
from headwise.layer import MultiHeadAttention

__version__ = "0.1.0"

__all__ = [
    "HeadwiseError",
    "InputError",
    "Mask",
    "MissingExtra",
    "MultiHeadAttention",
    "attend",
    "causal",
    "chunked",
    "dense",
    "from_heads",
    "from_projections",
    "from_torch",
    "padding",
    "per_head",
    "prefix",
    "segments",
    "view",
    "where",
    "why_not",
    "window",
]

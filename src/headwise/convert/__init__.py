"""Attention written in other ways, converted into `MultiHeadAttention` and back: the same function, the same bits."""

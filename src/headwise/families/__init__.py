"""Architectures that are known by name: where their attention modules store heads, and what they compute."""

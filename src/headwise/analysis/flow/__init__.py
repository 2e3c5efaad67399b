"""Attention weighted by the norms of what heads add up, and attention rolled out over layers."""

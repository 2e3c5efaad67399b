"""Smaller models with fewer heads: pruning, merging of key/value heads, and shorter caches."""

"""Heads that attend only to near and first tokens, and the cache that stores no more than that."""

"""Verbs on heads: what they do, what they are worth."""

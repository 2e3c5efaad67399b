"""Masks: which keys each query attends to."""

"""Interception of the attention calls of other people's models."""

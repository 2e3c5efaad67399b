"""Tensors in, tensors out: attention that knows no models."""

"""Comparison of the three implementations of the operator of attention with statistics."""

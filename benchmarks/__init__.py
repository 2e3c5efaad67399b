"""Benchmarks: one script for each claim about speed and memory."""

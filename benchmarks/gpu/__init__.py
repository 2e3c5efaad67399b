"""Correctness and speed of attention, layers and statistics on a GPU, in one command: `python -m benchmarks.gpu`."""

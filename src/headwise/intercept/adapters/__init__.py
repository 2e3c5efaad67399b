"""Adapters: each file reads the calls of one attention engine, such as FlashAttention, as tensors of heads.

The engine itself computes the output. Headwise computes the statistics in addition, and multiplies the output by gates.
A new file defines an `Engine` (see `engine.py`), and `all_engines.py` lists it. Nothing is imported from the engines'
libraries: their functions are looked up among the loaded modules while a model is intercepted.
"""

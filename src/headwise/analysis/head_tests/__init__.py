"""Tests of what single heads do: retrieval, attention sinks, moving of names, and dependency syntax."""

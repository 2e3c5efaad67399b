"""Training of a compressed model by a dense one."""

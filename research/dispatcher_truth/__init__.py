"""Attention weights of any PyTorch model, recorded at torch's dispatcher and derived without headwise."""

"""Compare `hw.watch` and `hw.gate` with plain PyTorch models of many libraries."""

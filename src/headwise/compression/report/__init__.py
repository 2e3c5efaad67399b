"""A dense and a compressed model compared."""

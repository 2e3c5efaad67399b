"""Every model type of `transformers`, tiny and with random weights, and inputs for it."""

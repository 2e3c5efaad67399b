"""Every model type of `transformers`, tiny and random, under `hw.watch`."""

"""Census of model types: `hw.watch` and `hw.gate` against attention recorded at torch's dispatcher."""

"""In-context learning score of a model, and the effect of each head on it."""

"""Scores of heads: what a model loses without them."""

"""Redundancy of heads: similarity of their outputs and attention weights, clusters, and the cost of clusters."""

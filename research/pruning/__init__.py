"""Measurements of pruning: the loss of two real models without 10 to 70 % of their heads, by several scores."""

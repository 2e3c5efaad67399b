"""Plans of pruning, and pruned models."""

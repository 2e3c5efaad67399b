"""Importance scores of heads: by gradients, by learned gates, and their agreement with ablation."""

"""Removal of heads from the attention modules of known families."""

"""The attention layers."""

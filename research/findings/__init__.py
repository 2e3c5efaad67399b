"""Importance of the heads of two real models."""

"""Measurement of streaming heads on a real model."""

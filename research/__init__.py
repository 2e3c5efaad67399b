"""Measurements with headwise: a census of model types, claims about attention, findings on two models."""

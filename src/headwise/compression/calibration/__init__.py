"""Inputs and outputs of projections on calibration data, and projections fitted to these data."""

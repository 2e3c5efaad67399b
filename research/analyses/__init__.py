"""Analyses of the documentation, run on two published models; their figures are in the pages of docs/."""

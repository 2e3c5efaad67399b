"""Plots of heads: functions that draw plain numbers, words and names on matplotlib axes, one subject per file."""

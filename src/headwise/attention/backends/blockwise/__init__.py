"""Attention over blocks of rows, in plain torch, without the score matrix in memory."""

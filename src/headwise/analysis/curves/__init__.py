"""Statistics of each head against position, and its attention against distance."""

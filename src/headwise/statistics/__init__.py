"""Statistics of every head, computed block by block with the output."""

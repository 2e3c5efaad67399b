"""Long runs: checkpoints, progress, processes, tables of results."""

"""Infrastructure of long runs: checkpoints, progress, distributed processes, and tables of results."""

"""Questions asked of a model's heads: view, profile, gate, ablate, importance, patching, redundancy."""

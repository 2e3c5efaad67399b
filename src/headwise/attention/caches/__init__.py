"""Key/value caches, so that generating a token costs one row of the attention matrix."""

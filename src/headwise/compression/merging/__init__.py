"""Key/value heads merged into fewer."""

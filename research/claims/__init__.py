"""Claims about multi-head attention, measured on small models."""

"""Facts about attention that follow from the functions which a model calls."""

"""Other people's models, seen as sets of heads."""

"""Results in a terminal, as a figure, and as an HTML page. Nothing is measured here."""

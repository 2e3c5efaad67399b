"""Results on a terminal, as a picture, and as a page. Nothing is measured here."""

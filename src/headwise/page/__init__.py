"""One HTML file that shows the heads of a model, and works offline."""

"""All steps of a compression in one command."""

"""Models, texts, tokens and batches."""

"""Inputs of analyses: models by name, documents, tokenized texts and batches."""

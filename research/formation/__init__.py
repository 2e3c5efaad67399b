"""Formation of induction heads in a small decoder, and a training whose attention logits grow."""

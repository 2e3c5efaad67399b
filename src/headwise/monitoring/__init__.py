"""Statistics of every head while a model trains: their history, alarms, and the clipping of logits that grow."""

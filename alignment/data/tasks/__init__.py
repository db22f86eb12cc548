"""Rows, examples and batches of the downstream tasks that a model is fine-tuned for."""

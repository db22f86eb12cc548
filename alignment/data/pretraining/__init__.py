"""Examples and batches of the pretraining objectives."""

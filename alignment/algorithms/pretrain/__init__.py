"""Pretraining: next-token, masked, prefix, infilling and span objectives."""

"""Hugging Face model directories read and written: configs, weight names, checkpoints."""

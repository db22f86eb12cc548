"""Tokenizers: loaded, saved and trained."""

"""Tokenizers: loaded, trained, and read from the original files of older models."""

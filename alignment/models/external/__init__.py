"""Architectures without a family table of ours, run through transformers' own classes behind our interface."""

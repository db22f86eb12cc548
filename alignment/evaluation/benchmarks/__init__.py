"""Benchmarks: tasks in YAML over local rows, scored by log-probability or by generated answers. lm-eval is optional."""

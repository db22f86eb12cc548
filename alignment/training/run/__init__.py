"""A run's directory: files, checkpoints, lineage, progress and trackers."""

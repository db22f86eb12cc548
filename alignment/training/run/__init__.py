"""A run's directory: files, checkpoints, lineage, progress, signals and trackers."""

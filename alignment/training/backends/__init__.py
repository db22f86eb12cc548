"""Ways to spread an optimiser step over processes: replicated, FSDP2, DeepSpeed."""

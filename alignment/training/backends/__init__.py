"""Ways to spread an optimizer step over processes: replicated, FSDP2, DeepSpeed."""

"""A run before it starts: bytes on each device by purpose, tokens, operations, and what fits. No weights are read."""

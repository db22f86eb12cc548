"""A run before it starts: bytes on each device by what they are for, tokens, operations, and what fits. No weights are read."""

"""What a run needs before it starts: bytes on each device by what they are for, tokens, operations, and what fits.

Nothing here holds a model's weights: the stages' own functions run on tensors without memory.
"""

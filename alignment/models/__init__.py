"""The transformer stack: tensors through layers, and Hugging Face directories in and out. Nothing here knows of data or losses.

To read the room in order: `spec` says what an architecture is; `norms`, `positions`, `masks`, `attention` and
`feedforward` are its parts; `block` wires one layer and `cache` remembers it; `transformer` is the trunk, `heads` what
sits on it; `build` makes modules of specifications, `families` specifications of configs, `checkpoint` both of files.
"""

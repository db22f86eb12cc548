"""The transformer stack: tensors through layers, Hugging Face directories in and out. No data and no losses here.

To read the room in order: `spec` says what an architecture is; `norms`, `positions`, `masks`, `attention` and
`feedforward` are its parts; `block` wires one layer and `cache` remembers it; `transformer` is the trunk, `heads` what
sits on it; `build` makes modules of specifications, `families` specifications of configs; `directory` reads files and
`checkpoint` fills models from them, and the other way.
"""

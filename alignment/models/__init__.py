"""The transformer stack: tensors through layers, Hugging Face directories in and out. No data and no losses here.

Where to read, in order; each step needs only those before it.

1. `spec` says what an architecture is: frozen dataclasses of its parts, one by one. `spec_positions`, `spec_encoder_decoder` and
   `spec_disentangled` hold those for places, encoder-decoders and DeBERTa. A part is chosen by the type of its
   specification.
2. The parts, each a small module with its formula and source: `norms`; `positions` (what is added to embeddings),
   `rotary` (what turns queries and keys), `distance` (what is added to scores); `feedforward` and `experts`.
3. `masks` knows who may see whom, and lays documents of unequal length side by side as rectangles. `attention` makes
   queries, keys and values and asks a `sight` what to do with them; `sight` holds the ways to look, at whole documents or
   from one new token over a `cache`; `cross` the same over an encoder's states; `disentangled` is DeBERTa's own way.
4. `block` wires one layer: where the norms stand. `transformer` is the trunk: embed, blocks, norm. `viewing` builds what
   each layer sees, once per forward, and `recompute` repeats layers in the backward pass instead of keeping them.
5. `heads` are what sits on a trunk; `language` (decoders, masked encoders), `encoder_decoder` and `readers` (reward
   models, classifiers, answer spans) are the models. `padded` turns rectangles into documents and back.
6. `build` makes modules of specifications, `initial` draws their weights, `resize` makes small models of large ones.
7. `families` turns a Hugging Face config into a specification and lists its weight names; a family is one file and one
   line. `directory` reads files, `filed` brings their names up to date, `layout` cuts and joins their tensors, and
   `checkpoint` brings all of it together, strictly. `external` and its three companions wrap transformers' own class
   where we have no family; `llama2c` reads one foreign format.

One path to follow through it all: `build.build_model({"model_type": "llama", ...})`, then
`language.LanguageModel.forward(batch=...)`, `transformer.Transformer.forward`, `block.Block.forward`,
`attention.Attention.forward`, `sight.look_at_documents`.
"""

"""The transformer stack: modules, and Hugging Face directories in and out. No data here.

Where to read, in order; each step needs only those before it.

1. `layers`: the parts, one file each, the frozen spec that describes a part beside the module it builds. `norms`,
   `position_embeddings` (added to embeddings), `rotary` (rotates queries and keys), `position_bias` (added to scores),
   `feedforward`, `experts`.
2. Attention: `attention` projects queries, keys and values and calls what its `attention_context` holds. `padded_layout`
   pads documents to rectangles and masks them; `sdpa` attends inside documents, or from a new token to the `kv_cache`;
   `cross_attention` attends to an encoder's states; `disentangled` is DeBERTa's. `block` wires one layer, and
   `layer_contexts` makes all layers' contexts for one forward.
3. `transformer` is the trunk: embed, blocks, norm. `activation_checkpointing` recomputes blocks in the backward pass.
4. `heads` stand on a trunk. `native_model` is the base class of the models in `language_model`, `encoder_decoder` and
   `classifiers`; `outputs` says what they return, `protocols` what callers may ask of them.
5. `build` makes a model of a config, `init_weights` initializes it, `distill_init` starts a small one from a large one.
6. `families` turns Hugging Face configs into specs and lists weight names; `llama` is the shortest. `huggingface` reads and
   writes checkpoints strictly; `external` wraps transformers' own class where there is no family.

One path to follow through it all: `build.build_model({"model_type": "llama", ...})`, then
`LanguageModel.forward(batch=...)`, `Transformer.forward`, `Block.forward`, `Attention.forward`, `PaddedAttention`.

Importing this package chooses which library multiplies float32 matrices on a CPU: `matrix_products`.
"""

from alignment.models.matrix_products import choose_products

choose_products()

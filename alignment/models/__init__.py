"""The transformer stack: modules, and Hugging Face directories in and out. No data here.

Where to read, in order; each step needs only those before it.

1. `layers`: the parts, one file each, the frozen spec of a part beside the module that it builds. `norms`, `positions`
   (added to embeddings, or to scores), `rotary` (rotates queries and keys), `feedforward` (plain, gated, experts).
2. Attention: `attention` projects queries, keys and values and calls `attend` of its `AttentionContext`.
  `padded_layout`
   pads documents to rectangles and masks them; `sdpa` attends inside documents, from new tokens to the `kv_cache`, and
   to an encoder's states; `windowed` is for long documents in layers with a window; `disentangled` is DeBERTa's,
   `sparse` Longformer's and BigBird's, `block` wires one layer, and `layer_contexts` makes all layers'
   contexts for one forward.
3. `transformer` is the trunk: embed, blocks, norm. `activation_checkpointing` recomputes blocks in the backward pass.
4. `heads` stand on a trunk. `model` has the `forward` of all models; those in `language_model`, `encoder_decoder` and
   `classifiers` say what they compute from a batch. `outputs` are what they return.
5. `build` makes a model of a config, `init_weights` initializes it, `new_weights` adds what a checkpoint does not have.
6. `families` turns Hugging Face configs into specs and lists weight names; `LLAMA` is the shortest. `huggingface` reads
   and writes checkpoints strictly; `external` wraps transformers' own class where there is no family.

One path to follow through it all: `build.build_model({"model_type": "llama", ...})`, then `LanguageModel.outputs`,
`Transformer.forward`, `Block.forward`, `Attention.forward`, `padded_attention`.
"""

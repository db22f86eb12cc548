"""GPT-2: learned positions, LayerNorm, plain feed-forward, one fused matrix for query, key and value in its files.

Source: Radford et al. 2019; transformers, `models/gpt2`.
"""

import math

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems
from alignment.models.families.family import Family, Key, Task, decoder_tasks, divides, read_keys
from alignment.models.families.fused import dropped_token_task
from alignment.models.init_weights import InitSpec
from alignment.models.layers import AttentionSpec, BlockSpec, LayerNormSpec, LearnedPositionsSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 50257, 1),
    "n_positions": Key(int, 1024, 1),
    "n_embd": Key(int, 768, 1),
    "n_layer": Key(int, 12, 1),
    "n_head": Key(int, 12, 1),
    "n_inner": Key(int, None, 1),
    "activation_function": Key(str, "gelu_new"),
    "resid_pdrop": Key(float, 0.1, 0),
    "embd_pdrop": Key(float, 0.1, 0),
    "attn_pdrop": Key(float, 0.1, 0),
    "layer_norm_epsilon": Key(float, 1e-5, 0),
    "initializer_range": Key(float, 0.02, 0),
    "scale_attn_weights": Key(bool, True),
    "scale_attn_by_inverse_layer_idx": Key(bool, False),
    "tie_word_embeddings": Key(bool, True),
}

# Heads read their own keys, and the summary head is none of ours; softmax runs in fp32 here whatever reorder_and_upcast_attn says.
HARMLESS = (
    "classifier_dropout",
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)

NAMES = (  # Hugging Face name                       ours
    ("transformer.wte.weight",                       "trunk.embed.weight"),
    ("transformer.wpe.weight",                       "trunk.positions.weight"),
    ("transformer.h.{}.ln_1.weight",                 "trunk.blocks.{}.attention_norm.weight"),
    ("transformer.h.{}.ln_1.bias",                   "trunk.blocks.{}.attention_norm.bias"),
    ("transformer.h.{}.attn.c_attn.weight",         ("trunk.blocks.{}.attention.query.weight",
                                                     "trunk.blocks.{}.attention.key.weight",
                                                     "trunk.blocks.{}.attention.value.weight")),
    ("transformer.h.{}.attn.c_attn.bias",           ("trunk.blocks.{}.attention.query.bias",
                                                     "trunk.blocks.{}.attention.key.bias",
                                                     "trunk.blocks.{}.attention.value.bias")),
    ("transformer.h.{}.attn.c_proj.weight",          "trunk.blocks.{}.attention.output.weight"),
    ("transformer.h.{}.attn.c_proj.bias",            "trunk.blocks.{}.attention.output.bias"),
    ("transformer.h.{}.ln_2.weight",                 "trunk.blocks.{}.feedforward_norm.weight"),
    ("transformer.h.{}.ln_2.bias",                   "trunk.blocks.{}.feedforward_norm.bias"),
    ("transformer.h.{}.mlp.c_fc.weight",             "trunk.blocks.{}.feedforward.up.weight"),
    ("transformer.h.{}.mlp.c_fc.bias",               "trunk.blocks.{}.feedforward.up.bias"),
    ("transformer.h.{}.mlp.c_proj.weight",           "trunk.blocks.{}.feedforward.down.weight"),
    ("transformer.h.{}.mlp.c_proj.bias",             "trunk.blocks.{}.feedforward.down.bias"),
    ("transformer.ln_f.weight",                      "trunk.norm.weight"),
    ("transformer.ln_f.bias",                        "trunk.norm.bias"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a GPT-2 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS)
    if not divides(value["n_head"], value["n_embd"]):
        problems.append(f"config.json: n_head = {value['n_head']!r} does not divide n_embd = {value['n_embd']!r}")
    problems += activation_problems(value["activation_function"], "activation_function")
    raise_all(problems)
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=value["n_embd"],
        max_positions=value["n_positions"],
        positions=LearnedPositionsSpec(value["n_positions"]),
        blocks=tuple(_block(value, layer) for layer in range(value["n_layer"])),
        norm=LayerNormSpec(value["layer_norm_epsilon"]),
        init=InitSpec(value["initializer_range"], value["initializer_range"] / math.sqrt(2 * value["n_layer"])),
        tied_head=value["tie_word_embeddings"],
        embedding_dropout=value["embd_pdrop"],
    )


def _block(value: HFConfig, layer: int) -> BlockSpec:
    head_dim = value["n_embd"] // value["n_head"]
    scale = head_dim**-0.5 if value["scale_attn_weights"] else 1.0
    if value["scale_attn_by_inverse_layer_idx"]:
        scale /= layer + 1
    attention = AttentionSpec(value["n_head"], value["n_head"], head_dim, scale, True, True, value["attn_pdrop"])
    inner = value["n_inner"] or 4 * value["n_embd"]
    feedforward = PlainFeedForwardSpec(inner, value["activation_function"], bias=True)
    return BlockSpec(attention, feedforward, LayerNormSpec(value["layer_norm_epsilon"]), value["resid_pdrop"])


GPT2 = Family(
    name="gpt2",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="transformer.",
    tasks=decoder_tasks("GPT2", heads=("sequence", "span"))
    | {
        "language": Task("GPT2LMHeadModel", (("lm_head.weight", "head.weight"),)),
        "tokens": dropped_token_task(
            "GPT2ForTokenClassification", lambda config: config.get("classifier_dropout") or 0.0
        ),
    },
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    ignored_tensors=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask, once saved as a buffer
    # Dropout costs a preference method its first ratio of 1; whoever wants it writes it into the config.
    new_model_config={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)

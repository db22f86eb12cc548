"""GPT-NeoX and Pythia: attention and feed-forward side by side, rotary positions on a quarter of each head.

Source: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373; transformers, `models/gpt_neox`.
"""

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, Task, decoder_tasks, read_keys
from alignment.models.families.fused import dropped_token_task, fused_by_key_head
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BlockSpec, LayerNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 50432, 1),
    "hidden_size": Key(int, 6144, 1),
    "intermediate_size": Key(int, 24576, 1),
    "num_hidden_layers": Key(int, 44, 1),
    "num_attention_heads": Key(int, 64, 1),
    "hidden_act": Key(str, "gelu"),
    "attention_bias": Key(bool, True),
    "attention_dropout": Key(float, 0.0, 0),
    "hidden_dropout": Key(float, 0.0, 0),
    "classifier_dropout": Key(float, 0.1, 0),
    "max_position_embeddings": Key(int, 2048, 1),
    "initializer_range": Key(float, 0.02, 0),
    "layer_norm_eps": Key(float, 1e-5, 0),
    "rotary_pct": Key(float, 0.25, 0),
    "rotary_emb_base": Key(float, 10000.0, 0),
    "tie_word_embeddings": Key(bool, False),
    "use_parallel_residual": Key(bool, True),
}
# Names of the library GPT-NeoX was trained with, for what is called *_dropout here.
FIXED = {"attention_probs_dropout_prob": (0,), "hidden_dropout_prob": (0,), "rope_interleaved": (False,)}

NAMES = (  # Hugging Face name                                      ours
    ("gpt_neox.embed_in.weight",                                    "trunk.embed.weight"),
    ("gpt_neox.layers.{}.input_layernorm.weight",                   "trunk.blocks.{}.attention_norm.weight"),
    ("gpt_neox.layers.{}.input_layernorm.bias",                     "trunk.blocks.{}.attention_norm.bias"),
    ("gpt_neox.layers.{}.post_attention_layernorm.weight",          "trunk.blocks.{}.feedforward_norm.weight"),
    ("gpt_neox.layers.{}.post_attention_layernorm.bias",            "trunk.blocks.{}.feedforward_norm.bias"),
    ("gpt_neox.layers.{}.attention.query_key_value.weight",        ("trunk.blocks.{}.attention.query.weight",
                                                                    "trunk.blocks.{}.attention.key.weight",
                                                                    "trunk.blocks.{}.attention.value.weight")),
    ("gpt_neox.layers.{}.attention.dense.weight",                   "trunk.blocks.{}.attention.output.weight"),
    ("gpt_neox.layers.{}.mlp.dense_h_to_4h.weight",                 "trunk.blocks.{}.feedforward.up.weight"),
    ("gpt_neox.layers.{}.mlp.dense_h_to_4h.bias",                   "trunk.blocks.{}.feedforward.up.bias"),
    ("gpt_neox.layers.{}.mlp.dense_4h_to_h.weight",                 "trunk.blocks.{}.feedforward.down.weight"),
    ("gpt_neox.layers.{}.mlp.dense_4h_to_h.bias",                   "trunk.blocks.{}.feedforward.down.bias"),
    ("gpt_neox.final_layer_norm.weight",                            "trunk.norm.weight"),
    ("gpt_neox.final_layer_norm.bias",                              "trunk.norm.bias"),
    # with attention_bias
    ("gpt_neox.layers.{}.attention.query_key_value.bias",          ("trunk.blocks.{}.attention.query.bias",
                                                                    "trunk.blocks.{}.attention.key.bias",
                                                                    "trunk.blocks.{}.attention.value.bias")),
    ("gpt_neox.layers.{}.attention.dense.bias",                     "trunk.blocks.{}.attention.output.bias"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a GPT-NeoX config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, fixed=FIXED, by_hand=ROPE_KEYS)
    attention, attention_problems = grouped_attention(
        config,
        value | {"num_key_value_heads": None},
        value["attention_bias"],
        value["attention_bias"],
        theta=value["rotary_emb_base"],
        partial=value["rotary_pct"],
    )
    problems += attention_problems + activation_problems(value["hidden_act"])
    raise_all(problems)
    norm = LayerNormSpec(value["layer_norm_eps"])
    feedforward = PlainFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=True)
    wiring = "parallel" if value["use_parallel_residual"] else "pre"
    block = BlockSpec(attention, feedforward, norm, value["hidden_dropout"], wiring)
    blocks = (block,) * value["num_hidden_layers"]
    return llama_like(value, attention, blocks, norm, embedding_dropout=value["hidden_dropout"])


GPT_NEOX = Family(
    name="gpt_neox",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="gpt_neox.",
    tasks=decoder_tasks("GPTNeoX", ("sequence", "span"))
    | {
        "language": Task("GPTNeoXForCausalLM", (("embed_out.weight", "head.weight"),)),
        "tokens": dropped_token_task(
            "GPTNeoXForTokenClassification", lambda config: config.get("classifier_dropout", 0.1)
        ),
    },
    interleaved=fused_by_key_head("query_key_value"),
    # once saved as buffers
    ignored_tensors=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    new_model_config={"classifier_dropout": 0.0},
)

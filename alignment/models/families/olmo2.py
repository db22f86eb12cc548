"""OLMo 2: Llama with norms on what each part adds and none before it, and one norm over all queries, one over all keys.

Source: OLMo team 2025, arXiv:2501.00656; transformers, `models/olmo2`.
"""

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.llama import GROUPED_KEYS, INV_FREQ, PROJECTIONS
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BlockSpec, Float32RMSNormSpec, GatedFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    **GROUPED_KEYS,
    "vocab_size": Key(int, 50304, 1),
    "rms_norm_eps": Key(float, 1e-5, 0),
    "attention_bias": Key(bool, False),
}

NAMES = (
    *PROJECTIONS,
    # Hugging Face name                                    ours
    ("model.layers.{}.self_attn.q_norm.weight",            "trunk.blocks.{}.attention.query_norm.weight"),
    ("model.layers.{}.self_attn.k_norm.weight",            "trunk.blocks.{}.attention.key_norm.weight"),
    ("model.layers.{}.post_attention_layernorm.weight",    "trunk.blocks.{}.attention_output_norm.weight"),
    ("model.layers.{}.post_feedforward_layernorm.weight",  "trunk.blocks.{}.feedforward_output_norm.weight"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of an OLMo 2 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, by_hand=ROPE_KEYS)
    bias, norm = value["attention_bias"], Float32RMSNormSpec(value["rms_norm_eps"])
    attention, attention_problems = grouped_attention(config, value, bias, bias, query_key_norm=norm, norm_heads="all")
    problems += attention_problems + activation_problems(value["hidden_act"])
    raise_all(problems)
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=False)
    block = BlockSpec(attention, feedforward, norm, wiring="output")
    return llama_like(value, attention, (block,) * value["num_hidden_layers"], norm)


OLMO2 = Family(
    name="olmo2",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Olmo2", ("sequence",)),
    ignored_tensors=(INV_FREQ,),
)

"""Mistral: Llama without biases, each layer looking back through a sliding window where one is set.

Source: Jiang et al. 2023, arXiv:2310.06825, section 2; transformers, `models/mistral`.
"""

from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.llama import GROUPED_KEYS, INV_FREQ
from alignment.models.families.llama import NAMES as LLAMA_NAMES
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BlockSpec, GatedFeedForwardSpec, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    **GROUPED_KEYS,
    "intermediate_size": Key(int, 14336, 1),
    "num_key_value_heads": Key(int, 8, 1, nullable=True),
    "max_position_embeddings": Key(int, 131072, 1),
    "sliding_window": Key(int, 4096, 1, nullable=True),
}
FIXED = {"attention_bias": (False,), "mlp_bias": (False,)}  # there are no such layers to have one


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Mistral config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, fixed=FIXED, by_hand=ROPE_KEYS)
    attention, attention_problems = grouped_attention(config, value, bias=False, output_bias=False)
    problems += attention_problems + activation_problems(value["hidden_act"])
    raise_all(problems)
    norm = RMSNormSpec(value["rms_norm_eps"])
    block = BlockSpec(
        replace(attention, window=value["sliding_window"]),
        GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=False),
        norm,
    )
    return llama_like(value, attention, (block,) * value["num_hidden_layers"], norm)


MISTRAL = Family(
    name="mistral",
    spec_from_config=spec_from_config,
    names=LLAMA_NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Mistral", ("sequence", "tokens", "span")),
    ignored_tensors=(INV_FREQ,),
)

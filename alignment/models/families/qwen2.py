"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; windows in the upper layers where asked for.

Source: Qwen team 2024, arXiv:2407.10671, section 2.2; transformers, `models/qwen2`.
"""

from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like, windows
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.llama import GROUPED_KEYS, INV_FREQ
from alignment.models.families.llama import NAMES as LLAMA_NAMES
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import AttentionSpec, BlockSpec, GatedFeedForwardSpec, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    **GROUPED_KEYS,
    "vocab_size": Key(int, 151936, 1),
    "intermediate_size": Key(int, 22016, 1),
    "num_key_value_heads": Key(int, 32, 1, nullable=True),
    "max_position_embeddings": Key(int, 32768, 1),
    "use_sliding_window": Key(bool, False),
    "sliding_window": Key(int, 4096, 1, nullable=True),
    "max_window_layers": Key(int, 28, 0),
    "layer_types": Key(list, None),
}
FIXED = {"use_mrope": (False,)}  # the vision models' places in three directions


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Qwen 2 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, fixed=FIXED, by_hand=ROPE_KEYS)
    attention, attention_problems = grouped_attention(config, value, bias=True, output_bias=False)
    return windowed_decoder(value, attention, problems + attention_problems)


def windowed_decoder(value: HFConfig, attention: AttentionSpec, problems: list[str]) -> TransformerSpec:
    """A Llama with windows from Qwen's keys: in layers from `max_window_layers` on, where `use_sliding_window`.

    Raises:
        UserError: `problems` and those found here.
    """
    window = value["sliding_window"] if value["use_sliding_window"] else None
    spans, window_problems = windows(
        value, window, lambda layer: window is not None and layer >= value["max_window_layers"]
    )
    raise_all(problems + window_problems + activation_problems(value["hidden_act"]))
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=False)
    norm = RMSNormSpec(value["rms_norm_eps"])
    blocks = tuple(BlockSpec(replace(attention, window=span), feedforward, norm) for span in spans)
    return llama_like(value, attention, blocks, norm)


QWEN2 = Family(
    name="qwen2",
    spec_from_config=spec_from_config,
    names=LLAMA_NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Qwen2", ("sequence", "tokens", "span"), span_prefix="transformer."),
    ignored_tensors=(INV_FREQ,),
)

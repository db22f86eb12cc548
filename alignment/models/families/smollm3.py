"""SmolLM 3: Llama without rotary positions in every fourth layer; windows, where asked for, in just these layers.

Source: Yang et al. 2025, arXiv:2501.18795 (layers without positions); transformers, `models/smollm3`.
"""

from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like, windows
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.llama import GROUPED_KEYS, INV_FREQ
from alignment.models.families.llama import NAMES as LLAMA_NAMES
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BlockSpec, GatedFeedForwardSpec, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    **GROUPED_KEYS,
    "vocab_size": Key(int, 128256, 1),
    "hidden_size": Key(int, 2048, 1),
    "num_hidden_layers": Key(int, 36, 1),
    "num_attention_heads": Key(int, 16, 1),
    "num_key_value_heads": Key(int, 4, 1, nullable=True),
    "max_position_embeddings": Key(int, 32768, 1),
    "tie_word_embeddings": Key(bool, True),
    "attention_bias": Key(bool, False),
    "mlp_bias": Key(bool, False),
    "no_rope_layers": Key(list, None),
    "no_rope_layer_interval": Key(int, 4, 1),
    "use_sliding_window": Key(bool, False),
    "sliding_window": Key(int, None, 1),
    "layer_types": Key(list, None),
}
HARMLESS = ("max_window_layers", "pretraining_tp")  # in the published file; nothing reads them
THETA = 2e6


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a SmolLM 3 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, by_hand=ROPE_KEYS)
    bias = value["attention_bias"]
    attention, attention_problems = grouped_attention(config, value, bias, bias, theta=THETA)
    problems += attention_problems + activation_problems(value["hidden_act"])
    raise_all(problems)
    turned, turned_problems = _turned(value)
    raise_all(turned_problems)
    window = value["sliding_window"] if value["use_sliding_window"] else None
    spans, window_problems = windows(value, window, lambda layer: window is not None and not turned[layer])
    raise_all(window_problems)
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], value["mlp_bias"])
    norm = RMSNormSpec(value["rms_norm_eps"])
    attentions = [
        replace(attention, rotary=attention.rotary if turns else None, window=span)
        for turns, span in zip(turned, spans, strict=True)
    ]
    return llama_like(value, attention, tuple(BlockSpec(each, feedforward, norm) for each in attentions), norm)


def _turned(value: HFConfig) -> tuple[list[bool], list[str]]:
    """Whether each layer turns its queries and keys: 1 in `no_rope_layers`, whatever its name says."""
    count, listed = value["num_hidden_layers"], value["no_rope_layers"]
    if listed is None:
        return [(layer + 1) % value["no_rope_layer_interval"] != 0 for layer in range(count)], []
    if len(listed) < count or any(entry not in (0, 1) for entry in listed):
        problem = f"config.json: no_rope_layers must be 0 or 1 for each of {count} layers, got {listed!r}"
        return [], [problem]
    return [bool(entry) for entry in listed[:count]], []


SMOLLM3 = Family(
    name="smollm3",
    spec_from_config=spec_from_config,
    names=LLAMA_NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("SmolLM3", ("sequence", "tokens", "span"), span_prefix="transformer."),
    ignored_tensors=(INV_FREQ,),
)

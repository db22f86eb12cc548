"""Mixtral: Mistral with several feed-forwards per layer, of which a router picks two for each token.

transformers holds the experts of a layer in one tensor while it runs and writes them one by one, as published files
have them; the table is of files. Source: Jiang et al. 2024, arXiv:2401.04088; transformers, `models/mixtral`.
"""

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.llama import NAMES as LLAMA_NAMES
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BlockSpec, ExpertsSpec, GatedFeedForwardSpec, RMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 32000, 1),
    "hidden_size": Key(int, 4096, 1),
    "intermediate_size": Key(int, 14336, 1),
    "num_hidden_layers": Key(int, 32, 1),
    "num_attention_heads": Key(int, 32, 1),
    "num_key_value_heads": Key(int, 8, 1),
    "head_dim": Key(int, None, 2),
    "hidden_act": Key(str, "silu"),
    "max_position_embeddings": Key(int, 4096 * 32, 1),
    "initializer_range": Key(float, 0.02, 0),
    "rms_norm_eps": Key(float, 1e-5, 0),
    "tie_word_embeddings": Key(bool, False),
    "attention_dropout": Key(float, 0.0, 0),
    "sliding_window": Key(int, None, 1),
    "num_local_experts": Key(int, 8, 1),
    "num_experts_per_tok": Key(int, 2, 1),
    "output_router_logits": Key(bool, False),
    "router_aux_loss_coef": Key(float, 0.001, 0),
}
FIXED = {"router_jitter_noise": (0,)}  # noise on what the router reads, in training

EXPERTS = (  # Hugging Face name                                    ours
    ("model.layers.{}.block_sparse_moe.gate.weight",                "trunk.blocks.{}.feedforward.router.weight"),
    ("model.layers.{}.block_sparse_moe.experts.{}.w1.weight",       "trunk.blocks.{}.feedforward.experts.{}.gate.weight"),
    ("model.layers.{}.block_sparse_moe.experts.{}.w3.weight",       "trunk.blocks.{}.feedforward.experts.{}.up.weight"),
    ("model.layers.{}.block_sparse_moe.experts.{}.w2.weight",       "trunk.blocks.{}.feedforward.experts.{}.down.weight"),
)  # fmt: skip
NAMES = (*(line for line in LLAMA_NAMES if ".mlp." not in line[0] and not line[0].endswith(".bias")), *EXPERTS)


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Mixtral config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, fixed=FIXED, by_hand=ROPE_KEYS)
    window = value["sliding_window"]
    attention, attention_problems = grouped_attention(config, value, False, False, theta=1e6, window=window)
    problems += attention_problems + activation_problems(value["hidden_act"])
    count, chosen = value["num_local_experts"], value["num_experts_per_tok"]
    if not problems and chosen > count:
        problems.append(f"config.json: num_experts_per_tok = {chosen} is more than num_local_experts = {count}")
    raise_all(problems)
    norm = RMSNormSpec(value["rms_norm_eps"])
    expert = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=False)
    # As over there: the balance is part of the loss only where the router's logits are asked for.
    balance_coef = value["router_aux_loss_coef"] if value["output_router_logits"] else 0.0
    block = BlockSpec(attention, ExpertsSpec(expert, count, chosen, balance_coef=balance_coef), norm)
    return llama_like(value, attention, (block,) * value["num_hidden_layers"], norm)


MIXTRAL = Family(
    name="mixtral",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Mixtral", ("sequence", "tokens", "span")),
    new_model_config={
        "output_router_logits": True
    },  # from random weights a router that is not balanced starves experts
)

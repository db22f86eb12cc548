"""Encoders' configs: published ones understood, values that cannot be refused, what becomes of odd keys."""

from typing import Any

import pytest
import torch

from alignment.errors import UserError
from alignment.models.build import empty_model
from alignment.models.families import family_of
from alignment.models.layers import NoNormSpec

from .encoders import TINY

# The configs as the authors published them, and the parameters of the masked language model.
BERT_BASE = {
    "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12,
    "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2, "use_cache": True,
    "vocab_size": 30522,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "bert": (BERT_BASE, 109_514_298),
    "roberta": (
        {**BERT_BASE, "vocab_size": 50265, "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1,
         "layer_norm_eps": 1e-5},
        124_697_433,
    ),
    "distilbert": (
        {"activation": "gelu", "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "hidden_dim": 3072,
         "initializer_range": 0.02, "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "pad_token_id": 0,
         "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True,
         "vocab_size": 30522},
        66_985_530,
    ),
    "albert": (
        {**BERT_BASE, "attention_probs_dropout_prob": 0, "classifier_dropout_prob": 0.1, "down_scale_factor": 1,
         "embedding_size": 128, "gap_size": 0, "hidden_act": "gelu_new", "hidden_dropout_prob": 0,
         "inner_group_num": 1, "net_structure_type": 0, "num_hidden_groups": 1, "num_memory_blocks": 0,
         "vocab_size": 30000},
        11_221_680,
    ),
    "electra": (
        {**BERT_BASE, "embedding_size": 128, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
         "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first", "summary_use_proj": True},
        13_546_682,
    ),
    "deberta-v2": (
        {"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
         "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 512,
         "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
         "pos_att_type": "p2c|c2p", "layer_norm_eps": 1e-7, "max_relative_positions": -1,
         "position_biased_input": False, "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 0,
         "vocab_size": 128100},
        184_551_780,
    ),
    "modernbert": (
        {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu",
         "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281,
         "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
         "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
         "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
         "intermediate_size": 1152, "layer_norm_eps": 1e-5, "local_attention": 128, "local_rope_theta": 10000.0,
         "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False,
         "norm_eps": 1e-5, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
         "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": True,
         "torch_dtype": "float32", "vocab_size": 50368},
        149_655_232,
    ),
}  # fmt: skip


def spec_of(model_type: str, **changes: Any) -> Any:
    config = {"model_type": model_type, **TINY[model_type], **changes}
    return family_of(config).spec_from_config(config)


@pytest.mark.parametrize("model_type", sorted(PUBLISHED))
def test_published_configs_are_understood_and_give_models_of_the_published_size(model_type):
    config, count = PUBLISHED[model_type]
    with torch.device("meta"):
        model = empty_model({"model_type": model_type, **config}, "language")
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder = True"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads = 5 does not divide"),
        ("bert", {"hidden_act": "mish"}, "hidden_act 'mish' is not one of"),
        ("bert", {"layer_norm_epsilon": 1e-5}, "did you mean 'layer_norm_eps'"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings must be above pad_token_id"),
        ("distilbert", {"n_heads": 3}, "n_heads = 3 does not divide dim"),
        ("albert", {"inner_group_num": 2}, "inner_group_num = 2"),
        ("albert", {"num_hidden_groups": 9}, "num_hidden_groups = 9 is more than"),
        ("electra", {"type_vocab_size": 0}, "type_vocab_size must be at least 1"),
        ("deberta-v2", {"pos_att_type": "c2p|p2p"}, "pos_att_type 'c2p|p2p'"),
        ("deberta-v2", {"norm_rel_ebd": "rms_norm"}, "norm_rel_ebd 'rms_norm'"),
        ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size = 4"),
        ("deberta-v2", {"embedding_size": 16}, "embedding_size = 16 is not supported"),
        ("deberta-v2", {"conv_groups": 5}, "conv_groups = 5 does not divide"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling 'max'"),
        ("modernbert", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ("modernbert", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has 'rope_theta'"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(model_type, changes, message):
    with pytest.raises(UserError) as error:
        spec_of(model_type, **changes)
    assert message in str(error.value)


def test_the_first_rows_of_robertas_places_are_never_used():
    spec = spec_of("roberta", max_position_embeddings=66)
    assert (spec.max_positions, spec.positions.first) == (64, 2)  # padding is token 1, so places begin at row 2


def test_alberts_layers_share_the_blocks_of_their_group():
    spec = spec_of("albert", num_hidden_layers=6, num_hidden_groups=2)
    assert (len(spec.blocks), spec.order) == (2, (0, 0, 0, 1, 1, 1))


def test_modernberts_local_layers_see_half_their_width_on_either_side():
    spec = spec_of("modernbert", num_hidden_layers=4)
    assert [block.attention.window for block in spec.blocks] == [None, 5, 5, None]  # |i - j| <= 4
    assert [block.attention.rotary.theta for block in spec.blocks] == [160_000, 10_000, 10_000, 160_000]
    assert [block.attention_norm for block in spec.blocks] == [NoNormSpec(), None, None, None]


def test_modernberts_thetas_are_read_in_both_spellings():
    new = {"full_attention": {"rope_theta": 9.0, "rope_type": "default"}, "sliding_attention": {"rope_theta": 7.0}}
    assert spec_of("modernbert", rope_parameters=new) == spec_of(
        "modernbert", global_rope_theta=9.0, local_rope_theta=7.0
    )

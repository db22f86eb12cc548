"""Tiny configs of every encoder family."""

from typing import Any

SHAPE = {
    "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
V3 = {
    "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": "p2c|c2p", "max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "bert": SHAPE,
    "roberta": {**SHAPE, "pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {"vocab_size": 61, "max_position_embeddings": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2,
                   "n_heads": 4},
    "albert": {**SHAPE, "embedding_size": 16},
    "electra": {**SHAPE, "embedding_size": 16},
    "deberta-v2": {**SHAPE, **V3},
    "modernbert": {**SHAPE, "pad_token_id": 0, "cls_token_id": 3, "sep_token_id": 4, "local_attention": 8},
}  # fmt: skip

"""Tiny configs of every encoder family, and random checkpoints that transformers writes."""

from typing import Any

import torch
import transformers

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
    "longformer": {**SHAPE, "pad_token_id": 1, "sep_token_id": 4, "type_vocab_size": 1, "attention_window": 8},
    "big_bird": {**SHAPE, "sep_token_id": 4, "block_size": 4, "num_random_blocks": 1},
}  # fmt: skip


def written_by_transformers(config: dict[str, Any], directory: Any, auto_class: str = "AutoModelForCausalLM") -> Any:
    """A random model of transformers, saved there; as drawn, logits are too near zero to show an error."""
    torch.manual_seed(0)
    keys = dict(config)
    full = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = getattr(transformers, auto_class).from_config(full).eval()
    with torch.no_grad():
        for tensor in {id(x): x for x in model.state_dict(keep_vars=True).values() if x.is_floating_point()}.values():
            tensor += 0.15 * torch.randn_like(tensor)
    model.save_pretrained(directory)
    return model

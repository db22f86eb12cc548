"""Open config.json files as they are published: small models with random weights, logits beside transformers'.

    python scripts/published_configs.py FOLDER [--only WORD ...]     one row a file; exit 1 where one is neither equal nor refused

Sizes shrink, and windows, so that they act on a short text; every other key stays as it is in the file. The reference is
transformers' own class on the same file without the keys that it has no use for: code of the checkpoint, quantization.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from alignment.errors import UserError
from alignment.models.huggingface.checkpoint import load_language_model

TOKENS, BOUND = 40, 1e-4
SIZES = {
    64: "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim n_embed",
    96: "intermediate_size ffn_hidden_size n_inner d_ff hidden_dim ffn_dim encoder_ffn_dim decoder_ffn_dim",
    48: "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp shared_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_local_experts "
    "num_experts n_routed_experts linear_num_value_heads linear_num_key_heads",
    2: "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers num_experts_per_tok",
    16: "head_dim d_kv q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_size "
    "query_pre_attn_scalar linear_key_head_dim linear_value_head_dim sliding_window attention_window rotary_dim",
    1: "n_group topk_group first_k_dense_replace num_nextn_predict_layers",
    256: "vocab_size org_vocab_size",
}
SMALL = {key: size for size, keys in SIZES.items() for key in keys.split()}
FOREIGN = (  # keys that the reference is made without
    "_attn_implementation", "_flash_attn_2_enabled", "architectures", "auto_map", "dtype", "quantization_config",
    "torch_dtype", "trust_remote_code",
)  # fmt: skip


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The config with small sizes, nested ones too."""
    small = {
        key: SMALL[key] if isinstance(value, int) and key in SMALL and value else value for key, value in config.items()
    }
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and groups:
        small["num_key_value_heads"] = max(1, 4 * groups // heads)
    if "num_kv_heads" in small and isinstance(small["num_kv_heads"], int):
        small["num_kv_heads"] = 4 if config["num_kv_heads"] == heads else 1
    for key, value in config.items():
        if isinstance(value, dict) and key != "quantization_config":
            small[key] = shrink(value)
        if key in ("layer_types", "no_rope_layers", "mlp_layer_types"):
            small[key] = (value or [])[:2]
        if key.endswith("_token_id") and isinstance(value, int) and value > 255:
            small[key] = 3
        if key in ("short_factor", "long_factor"):
            small[key] = value[: int(16 * config.get("partial_rotary_factor", 1.0)) // 2]
    return small


def reference(config: dict[str, Any], folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' model of the config with random weights, which is saved with the published config.json."""
    kept = {key: value for key, value in config.items() if key not in FOREIGN}
    kind = kept.pop("model_type")
    settings = transformers.AutoConfig.for_model(kind, **kept)
    door = transformers.AutoModelForCausalLM
    if settings.is_encoder_decoder:
        door = transformers.AutoModelForSeq2SeqLM
    elif type(settings) not in door._model_mapping or "MaskedLM" in str(config.get("architectures")):
        door = transformers.AutoModelForMaskedLM
    torch.manual_seed(0)
    model = door.from_config(settings).float().eval()
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        return logits(model, ids, settings.is_encoder_decoder)


def logits(model: Any, ids: torch.Tensor, encoder_decoder: bool) -> torch.Tensor:
    """Logits of a text; of an encoder-decoder with its beginning as the target."""
    return model(ids, **({"decoder_input_ids": ids[:, :9]} if encoder_decoder else {})).logits


def outcome(path: Path) -> tuple[str, str]:
    """The result for a file (equal, refused, different, no peer, error), and the difference or the message."""
    config = shrink(json.loads(path.read_text(encoding="utf-8")))
    ids = torch.arange(TOKENS)[None] * 5 % 250 + 4
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        folder = Path(name)
        expected: torch.Tensor | str
        try:
            expected = reference(config, folder, ids)
        except Exception as error:  # transformers does not know the type, or the shrunk sizes do not fit each other
            expected = f"{type(error).__name__}: {str(error)[:100]}"
            (folder / "config.json").write_text(json.dumps(config))
            save_file({"weight": torch.zeros(256, 96)}, folder / "model.safetensors", metadata={"format": "pt"})
        try:
            ours = load_language_model(folder)
        except UserError as error:
            message = str(error).removeprefix(str(folder)).replace("\n", " | ")
            return "refused", message if torch.is_tensor(expected) else f"{message} [no reference: {expected}]"
        except Exception as error:
            return "error", f"{type(error).__name__}: {error}"
        if isinstance(expected, str):
            return "no peer", expected
        difference = (logits(ours, ids, ours.config.get("is_encoder_decoder", False)) - expected).abs().max().item()
    return ("equal" if difference <= BOUND else "different"), f"{difference:.1e} ({ours.source})"


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds NAME.json files")
    parser.add_argument("--only", nargs="*", default=[], help="words that the names of files must have")
    arguments = parser.parse_args()
    counts: dict[str, int] = {}
    for path in sorted(arguments.folder.glob("*.json")):
        if all(word in path.name for word in arguments.only):
            kind, detail = outcome(path)
            counts[kind] = counts.get(kind, 0) + 1
            print(f"{kind:9} {path.stem[:60]:60} {detail[:220]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return int("different" in counts or "error" in counts)


if __name__ == "__main__":
    sys.exit(main())

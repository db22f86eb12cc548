"""Write a small random checkpoint with the architecture of a real base model, to try a config without the real weights.

    python scripts/shrink.py qwen3-8b --text FILE.jsonl --output DIR

The base is a name in configs/bases, or a config.json. The widths, the layers and the vocabulary shrink; everything else of the
config stays: kinds of attention and their order, norms, tied embeddings, positions. The tokenizer is a byte-level BPE trained
on the `text` of FILE's rows.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from alignment.config.load import packaged_folder
from alignment.data.tokenizers.load import save_tokenizer
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError
from alignment.files import read_json_object
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import save_model

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
SIZES = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 96, "head_dim": HEAD_DIM, "num_attention_heads": HEADS}
PER_LAYER = ("layer_types", "no_rope_layers")  # config keys with one entry for each layer
INTERVALS = ("sliding_window_pattern", "no_rope_layer_interval")  # every so many layers one is of another kind


def shrink(config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The config of a small model of the same architecture.

    Two layers are kept, or as many as hold every kind of layer. As many query heads share a key-value head as before, if
    four heads allow it.
    """
    small = dict(config) | {key: size for key, size in SIZES.items() if key in config}
    small["vocab_size"] = vocabulary
    layers = max([LAYERS, *(_layers_with_every_kind(config[key]) for key in PER_LAYER if config.get(key))])
    small["num_hidden_layers"] = layers = max([layers, *(config.get(key) or 0 for key in INTERVALS)])
    for key in PER_LAYER:
        if config.get(key):
            small[key] = config[key][:layers]
    shared = config["num_attention_heads"] // config.get("num_key_value_heads", config["num_attention_heads"])
    small["num_key_value_heads"] = max(1, HEADS // shared)
    if "query_pre_attn_scalar" in config:
        small["query_pre_attn_scalar"] = HEAD_DIM
    return small


def write_small(config: dict[str, Any], texts: Iterable[str], output: Path, *, seed: int = 0) -> None:
    """Write the small model, with random weights in the type that the config names, and its tokenizer."""
    tokenizer = train_bpe(texts, 512)
    special: dict[str, Any] = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    model = build_language_model(shrink(config, len(tokenizer)) | special)
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    output.mkdir(parents=True, exist_ok=True)
    save_model(model.to(getattr(torch, dtype)), output)
    save_tokenizer(tokenizer, output)


def read_base(name: str) -> dict[str, Any]:
    """The config.json of a base: a file, or a packaged one by its name.

    Raises:
        UserError: there is neither.
    """
    packaged = packaged_folder("configs") / "bases" / f"{name}.json"
    if packaged.is_file():
        return read_json_object(packaged)["config"]
    return read_json_object(Path(name))


def _layers_with_every_kind(kinds: list[Any]) -> int:
    """The smallest number of first layers that hold every kind of layer."""
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a name in configs/bases, or a config.json")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with `text`, for the tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        with open(arguments.text, encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        write_small(read_base(arguments.base), texts, arguments.output, seed=arguments.seed)
    except (UserError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

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

from measuring import write_checkpoint

from alignment.config.load import packaged_folder
from alignment.errors import UserError
from alignment.files import exported_directory, read_json_object

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
SIZES = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 96, "head_dim": HEAD_DIM, "num_attention_heads": HEADS}
PER_LAYER = ("layer_types", "no_rope_layers")  # config keys with one entry for each layer
INTERVALS = ("sliding_window_pattern", "no_rope_layer_interval")  # every so many layers one is of another kind


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a small model of the same architecture, without the size of its vocabulary.

    Two layers are kept, or as many as hold every kind of layer. As many query heads share a key-value head as before, if
    four heads allow it.
    """
    small = config | {key: size for key, size in SIZES.items() if key in config}
    del small["vocab_size"]
    kinds = {key: config[key] for key in PER_LAYER if config.get(key)}
    firsts = [row.index(kind) + 1 for row in kinds.values() for kind in row]
    layers = max([LAYERS, *firsts, *(config.get(key) or 0 for key in INTERVALS)])
    small |= {"num_hidden_layers": layers, **{key: row[:layers] for key, row in kinds.items()}}
    shared = config["num_attention_heads"] // config.get("num_key_value_heads", config["num_attention_heads"])
    small["num_key_value_heads"] = max(1, HEADS // shared)
    if "query_pre_attn_scalar" in config:
        small["query_pre_attn_scalar"] = HEAD_DIM
    return small | {"dtype": config.get("dtype") or config.get("torch_dtype") or "float32"}


def write_small(config: dict[str, Any], texts: Iterable[str], output: Path) -> None:
    """Write the small model, with random weights in the type that the config names, and its tokenizer."""
    with exported_directory(output) as folder:
        write_checkpoint(folder, shrink(config), texts, 512)


def read_base(name: str) -> dict[str, Any]:
    """The config.json of a base: a packaged one by its name, or a file; a UserError where there is neither."""
    packaged = packaged_folder("configs") / "bases" / f"{name}.json"
    return read_json_object(packaged)["config"] if packaged.is_file() else read_json_object(Path(name))


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a name in configs/bases, or a config.json")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with `text`, for the tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        texts = [json.loads(line)["text"] for line in arguments.text.read_text(encoding="utf-8").splitlines()]
        write_small(read_base(arguments.base), texts, arguments.output)
    except (UserError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

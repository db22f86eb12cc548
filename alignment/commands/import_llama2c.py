"""llama2.c checkpoints as Hugging Face Llama directories: safetensors and a fast tokenizer.

Only the float32 export with the 7-integer header is read; quantized and versioned exports are not.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.files import atomic_directory
from alignment.models.build import build_language_model
from alignment.models.huggingface.checkpoint import hf_locations, save_model
from alignment.models.huggingface.weight_map import from_hf

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2, as in every Llama vocabulary
FIRST_BYTE = len(SPECIAL)  # then one token for each byte


class Header(NamedTuple):
    """The checkpoint's first seven integers."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Hugging Face config and tensors of a llama2.c file.

    Raises:
        UserError: the file's size is not what its header asks for.
    """
    data = path.read_bytes()
    if len(data) < 28:
        raise UserError(f"{path}: {len(data)} bytes is too short for a llama2.c header")
    header = Header(*struct.unpack("<7i", data[:28]))
    tied = header.vocab_size > 0  # the export negates the size where the head is a matrix of its own
    header = header._replace(vocab_size=abs(header.vocab_size))
    if min(header) <= 0:
        raise UserError(f"{path}: not a llama2.c header: {header}")
    shapes = _shapes(header, tied)
    needed = sum(int(np.prod(shape)) for shape in shapes.values())
    numbers = np.frombuffer(data, dtype="<f4", offset=28) if len(data) % 4 == 0 else np.empty(0)
    if len(numbers) != needed:
        raise UserError(f"{path}: {len(data) - 28} bytes of weights, the header asks for {4 * needed}")
    pieces = np.split(numbers, np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1])
    blocks = {
        name: torch.from_numpy(piece.reshape(shape).copy())
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
    return _config(header, tied), _hf_tensors(header, blocks, tied)


def _shapes(h: Header, tied: bool) -> dict[str, tuple[int, ...]]:
    """The file's arrays in their order."""
    head_dim = h.dim // h.n_heads
    kv_dim = h.n_kv_heads * head_dim
    return {
        "embed": (h.vocab_size, h.dim),
        "attention_norm": (h.n_layers, h.dim),
        "wq": (h.n_layers, h.dim, h.dim),
        "wk": (h.n_layers, kv_dim, h.dim),
        "wv": (h.n_layers, kv_dim, h.dim),
        "wo": (h.n_layers, h.dim, h.dim),
        "ffn_norm": (h.n_layers, h.dim),
        "w1": (h.n_layers, h.hidden_dim, h.dim),
        "w2": (h.n_layers, h.dim, h.hidden_dim),
        "w3": (h.n_layers, h.hidden_dim, h.dim),
        "norm": (h.dim,),
        "cosines": (h.seq_len, head_dim // 2),
        "sines": (h.seq_len, head_dim // 2),
        **({} if tied else {"head": (h.vocab_size, h.dim)}),
    }


def _config(h: Header, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": h.vocab_size,
        "hidden_size": h.dim,
        "intermediate_size": h.hidden_dim,
        "num_hidden_layers": h.n_layers,
        "num_attention_heads": h.n_heads,
        "num_key_value_heads": h.n_kv_heads,
        "max_position_embeddings": h.seq_len,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _hf_tensors(h: Header, blocks: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    tensors = {"model.embed_tokens.weight": blocks["embed"], "model.norm.weight": blocks["norm"]}
    if not tied:
        tensors["lm_head.weight"] = blocks["head"]
    layer_names = {
        "attention_norm": "input_layernorm",
        "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "w1": "mlp.gate_proj",
        "w2": "mlp.down_proj",
        "w3": "mlp.up_proj",
    }
    heads = {"wq": h.n_heads, "wk": h.n_kv_heads}
    for block, name in layer_names.items():
        for layer, weight in enumerate(blocks[block]):
            weight = half_split(weight, heads[block]) if block in heads else weight
            tensors[f"model.layers.{layer}.{name}.weight"] = weight.contiguous()
    return tensors


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix [heads * K, D], rotary pairs (2i, 2i + 1) of each head moved to (i, i + K/2)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_tokenizer(path: Path, vocabulary: int) -> list[tuple[str, float]]:
    """(piece, score) of every token; a space is written as sentencepiece does.

    Raises:
        UserError: the file ends early, or its special and byte tokens are not where Llama has them.
    """
    data = path.read_bytes()
    pieces: list[tuple[str, float]] = []
    at = 4  # after the longest token's length
    try:
        for _ in range(vocabulary):
            score, length = struct.unpack_from("<fi", data, at)
            pieces.append((data[at + 8 : at + 8 + length].decode("utf-8"), score))
            at += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: token {len(pieces)} of {vocabulary} is unreadable ({error})") from error
    if at != len(data):
        raise UserError(f"{path}: {len(data) - at} bytes left after {vocabulary} tokens; does it fit the checkpoint?")
    for byte in range(256):
        if pieces[FIRST_BYTE + byte][0] != f"<0x{byte:02X}>":
            raise UserError(f"{path}: token {FIRST_BYTE + byte} is {pieces[FIRST_BYTE + byte][0]!r}, not byte {byte}")
    text_tokens = [(piece.replace(" ", "▁"), score) for piece, score in pieces[FIRST_BYTE + 256 :]]
    return [(name, 0.0) for name in SPECIAL] + pieces[FIRST_BYTE : FIRST_BYTE + 256] + text_tokens


def build_tokenizer(pieces: list[tuple[str, float]], max_length: int) -> Any:
    """A fast tokenizer that merges by score, falls back to bytes, and puts BOS and one space in front.

    sentencepiece merges, of all neighbors that make a token, the pair whose token scores highest; so every way to
    cut a token in two is a merge, in the order of the tokens' scores.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    text_tokens = sorted(pieces[FIRST_BYTE + 256 :], key=lambda item: -item[1])
    merges = [
        (piece[:cut], piece[cut:])
        for piece, _ in text_tokens
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", ids["<s>"])]
    )
    # <unk> cannot come out of any text, thanks to the bytes; so it can serve as padding without a new row.
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def convert(checkpoint: Path, tokenizer: Path, output: Path) -> None:
    """Write the directory."""
    config, tensors = read_checkpoint(checkpoint)
    pieces = read_tokenizer(tokenizer, config["vocab_size"])
    model = build_language_model(config)
    locations = hf_locations(model)
    if config["tie_word_embeddings"]:
        del locations["head.weight"]
    model.load_state_dict(from_hf(tensors, locations), strict=not config["tie_word_embeddings"])
    save_model(model, output)
    build_tokenizer(pieces, config["max_position_embeddings"]).save_pretrained(output)


@dataclass(frozen=True)
class ImportConfig:
    """Settings of an import; the result lies in `output/model`.

    Attributes:
        checkpoint: llama2.c's file of weights.
        tokenizer: its file of tokens.
        output: the stage's directory.
    """

    checkpoint: str
    tokenizer: str
    output: str


def run_import(config: ImportConfig) -> Path:
    """Write `output/model` and return it.

    Raises:
        UserError: a file that is missing or no llama2.c export.
    """
    for name in (config.checkpoint, config.tokenizer):
        if not Path(name).is_file():
            raise UserError(f"{name}: no such file")
    directory = Path(config.output) / "model"
    with atomic_directory(directory) as folder:
        convert(Path(config.checkpoint), Path(config.tokenizer), folder)
    return directory

"""llama2.c checkpoints as Hugging Face Llama directories: safetensors and a fast tokenizer.

Only the float32 export with the 7-integer header is read; quantized and versioned exports are not.
"""

import struct
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from alignment.data.rows.hub import copied_model, hub_answers
from alignment.errors import UserError, raise_all
from alignment.files import data_folder, exported_directory, write_json

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2, as in every Llama vocabulary
FIRST_BYTE = len(SPECIAL)  # then one token for each byte


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Hugging Face config and tensors of a llama2.c file."""
    data = path.read_bytes()
    if len(data) < 28:
        raise UserError(f"{path}: {len(data)} bytes is too short for a llama2.c header")
    header = struct.unpack("<7i", data[:28])
    dim, hidden, layers, heads, kv_heads, vocabulary, positions = map(abs, header)
    tied = header[5] > 0  # the export negates the size where the head is a matrix of its own
    if min(*header[:5], vocabulary, header[6]) <= 0:
        raise UserError(f"{path}: not a llama2.c header: {header}")
    half = dim // heads // 2
    shapes: dict[str, tuple[int, ...]] = {  # the file's arrays in their order; {} stands for each layer
        "model.embed_tokens.weight": (vocabulary, dim),
        "model.layers.{}.input_layernorm.weight": (layers, dim),
        "model.layers.{}.self_attn.q_proj.weight": (layers, dim, dim),
        "model.layers.{}.self_attn.k_proj.weight": (layers, kv_heads * half * 2, dim),
        "model.layers.{}.self_attn.v_proj.weight": (layers, kv_heads * half * 2, dim),
        "model.layers.{}.self_attn.o_proj.weight": (layers, dim, dim),
        "model.layers.{}.post_attention_layernorm.weight": (layers, dim),
        "model.layers.{}.mlp.gate_proj.weight": (layers, hidden, dim),
        "model.layers.{}.mlp.down_proj.weight": (layers, dim, hidden),
        "model.layers.{}.mlp.up_proj.weight": (layers, hidden, dim),
        "model.norm.weight": (dim,),
        "cosines": (positions, half),
        "sines": (positions, half),
        **({} if tied else {"lm_head.weight": (vocabulary, dim)}),
    }
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    numbers = np.frombuffer(data, dtype="<f4", offset=28) if len(data) % 4 == 0 else np.empty(0)
    if len(numbers) != sum(sizes):
        raise UserError(f"{path}: {len(data) - 28} bytes of weights, the header asks for {4 * sum(sizes)}")
    tensors: dict[str, Tensor] = {}
    for (name, shape), piece in zip(shapes.items(), np.split(numbers, np.cumsum(sizes)[:-1]), strict=True):
        array = torch.from_numpy(piece.reshape(shape).copy())
        for layer, weight in enumerate(array if "{}" in name else [array]):
            if "q_proj" in name or "k_proj" in name:
                weight = half_split(weight, heads if "q_proj" in name else kv_heads)
            tensors[name.format(layer)] = weight.contiguous()
    del tensors["cosines"], tensors["sines"]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32",
        "vocab_size": vocabulary, "hidden_size": dim, "intermediate_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return config, tensors


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix [heads * K, D], rotary pairs (2i, 2i + 1) of each head moved to (i, i + K/2)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_tokenizer(path: Path, vocabulary: int) -> list[tuple[str, float]]:
    """(piece, score) of every token; a space is written as sentencepiece does."""
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
    names = [name for name, _ in pieces[FIRST_BYTE : FIRST_BYTE + 256]]
    raise_all(
        f"{path}: token {FIRST_BYTE + byte} is {'not there' if name is None else repr(name)}, not byte {byte}"
        for byte, name in zip_longest(range(256), names)
        if name != f"<0x{byte:02X}>"
    )
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
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    write_json(output / "config.json", config)
    build_tokenizer(pieces, config["max_position_embeddings"]).save_pretrained(output)


@dataclass(frozen=True)
class ImportConfig:
    """Settings of an import; the result lies in `output/model`.

    Attributes:
        checkpoint: llama2.c's file of weights; as of the tokenizer a path, or `owner/name/path` of the Hub.
        tokenizer: its file of tokens.
        output: the stage's directory.
    """

    checkpoint: str
    tokenizer: str
    output: str


def find_file(name: str) -> Path:
    """A file at a path, or one of a model's repository, of which a copy below the folder of ALIGNMENT_DATA comes first."""
    path = Path(name)
    if path.is_file():
        return path
    copy = copied_model(str(path.parent))
    if copy is not None and (copy / path.name).is_file():
        return copy / path.name
    if path.is_absolute() or len(path.parts) < 3:
        raise UserError(f"{name}: no such file")
    repository, file = "/".join(path.parts[:2]), "/".join(path.parts[2:])
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, local_files_only=not hub_answers()))
    except Exception as error:  # the library raises a dozen unrelated types
        raise UserError(
            f"{name}: no such file, and the Hub gave no {file} of {repository} ({type(error).__name__}); with a network it "
            f"is fetched by itself, without one put a copy (hf download {repository} {file}) into {data_folder() / repository}, "
            f"where ALIGNMENT_DATA names {data_folder()}"
        ) from error


def run_import(config: ImportConfig) -> Path:
    """Write `output/model` and return it."""
    checkpoint, tokenizer = map(find_file, (config.checkpoint, config.tokenizer))
    directory = Path(config.output) / "model"
    with exported_directory(directory) as folder:
        convert(checkpoint, tokenizer, folder)
    return directory

"""What `alignment inspect attention` does: a model directory and some texts in, a page of attention maps out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from alignment.adapters.files import is_adapter, is_scalar_adapter
from alignment.analysis.attention import attention_maps, encoder_decoder_attention_maps
from alignment.analysis.page import Maps, write_attention_page
from alignment.data.tokenizers.load import check_vocabulary
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.generation import SamplingConfig, decode_responses
from alignment.generation.text import start_token_id
from alignment.loading import find_directory, load_model, load_tokenizer
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.external.models import ExternalModel
from alignment.models.families import FAMILIES
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.native_model import NativeModel
from alignment.models.safetensors_files import read_config
from alignment.reward_model import load_reward_network

LONGEST = 128  # tokens: a cell of an enlarged map then still fits the letters of its token
WRITTEN = 32  # tokens that an encoder-decoder writes where no target is given
VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


def write_attention(
    model: str,
    texts: Sequence[str],
    output: str | Path,
    *,
    layers: Sequence[int] | None = None,
    targets: Sequence[str] = (),
) -> Path:
    """Write a page with the attention maps of every layer and head, and return its path.

    Args:
        model: directory or Hub name of a model with any head, or of an adapter.
        texts: what it reads, with the special tokens its tokenizer puts around a text.
        layers: which to show, from 0; None: all.
        targets: of an encoder-decoder, what its decoder reads for each text; none: what it writes itself, greedily, up to
            32 tokens.

    Raises:
        UserError: no such model or layer; a text that is empty or longer than 128 tokens.
    """
    loaded, tokenizer = load_any(model), load_tokenizer(model)
    check_vocabulary(tokenizer, loaded.spec.vocabulary)
    documents = encoded(tokenizer, texts, "--text")
    if (start := _start_token(loaded)) is not None:
        written = target_ids(loaded, tokenizer, documents, targets, start)
        found = [pair_maps(loaded, tokenizer, *pair) for pair in zip(documents, written, strict=True)]
    elif targets:
        raise UserError(f"--target is for an encoder-decoder, and {model} has one side only; leave it out")
    else:
        found = [own_maps(loaded, tokenizer, ids) for ids in documents]
    chosen = [[_with_layers(maps, layers) for maps in kinds] for kinds in found]
    return write_attention_page(Path(output), str(model), list(zip(texts, chosen, strict=True)))


def load_any(source: str) -> NativeModel | ExternalModel:
    """The model of a directory, with any head that it has; an encoder-decoder keeps its own class."""
    directory = find_directory(source)
    if is_adapter(directory):
        return load_reward_network(source) if is_scalar_adapter(directory) else load_model(source)
    config = read_config(directory)
    if config.get("model_type") in FAMILIES and not config.get("is_encoder_decoder", False):
        return load_pretrained(directory, "language", new_head=True)
    return load_model(source)


def encoded(tokenizer: Tokenizer, texts: Sequence[str], option: str) -> list[list[int]]:
    """Token ids of each text; all that do not fit a page are refused at once."""
    documents = [tokenizer(text, truncation=False, verbose=False)["input_ids"] for text in texts]
    if not documents:
        raise UserError(f"no {option}: give at least one text")
    raise_all(
        f"{option} {number} ({text[:40]!r}): "
        + ("no token" if not ids else f"{len(ids)} tokens, a page shows {LONGEST}")
        for number, (text, ids) in enumerate(zip(texts, documents, strict=True), 1)
        if not 0 < len(ids) <= LONGEST
    )
    return documents


def _start_token(model: NativeModel | ExternalModel) -> int | None:
    """The token that an encoder-decoder's targets begin with; None for other models."""
    spec = model.spec
    return spec.start_token if isinstance(spec, EncoderDecoderSpec) else start_token_id(model.config)


def target_ids(
    model: Any, tokenizer: Tokenizer, documents: Sequence[Sequence[int]], targets: Sequence[str], start: int
) -> list[list[int]]:
    """What the decoder reads for each source, its start token first."""
    if not targets:
        settings = SamplingConfig(max_new_tokens=WRITTEN, temperature=0.0)
        stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        written = decode_responses(model, [list(ids) for ids in documents], settings, stops, start_token=start)
        return [[start, *ids] for ids in written.token_ids]
    if len(targets) != len(documents):
        raise UserError(f"{len(documents)} --text and {len(targets)} --target; give one target for each text, or none")
    return [[start, *ids] for ids in encoded(tokenizer, targets, "--target")]


def own_maps(model: NativeModel | ExternalModel, tokenizer: Tokenizer, ids: Sequence[int]) -> list[Maps]:
    """Maps of a decoder or an encoder."""
    tokens = shown(tokenizer, ids)
    return [Maps("Self-attention", tokens, tokens, _numbered(attention_maps(model, ids)))]


def pair_maps(model: Any, tokenizer: Tokenizer, source: Sequence[int], target: Sequence[int]) -> list[Maps]:
    """Maps of an encoder-decoder: both sides and between them."""
    found = encoder_decoder_attention_maps(model, source, target)
    read, written = shown(tokenizer, source), shown(tokenizer, target)
    return [
        Maps("Encoder: self-attention", read, read, _numbered(found.encoder)),
        Maps("Decoder: self-attention", written, written, _numbered(found.decoder)),
        Maps("Decoder on encoder: cross-attention", written, read, _numbered(found.cross)),
    ]


def _numbered(layers: Sequence[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(layers))


def _with_layers(maps: Maps, layers: Sequence[int] | None) -> Maps:
    """The maps of some layers only."""
    wanted = list(maps.layers) if layers is None else sorted(set(layers))
    if not set(wanted) <= set(maps.layers) or not wanted:
        raise UserError(
            f"--layers {','.join(map(str, wanted))}: the model has layers 0 to {len(maps.layers) - 1} "
            f"({maps.title.lower()}), {len(maps.layers)} in all"
        )
    return Maps(maps.title, maps.rows, maps.columns, {layer: maps.layers[layer] for layer in wanted})


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as a reader knows it, white space made visible; half of a letter as the vocabulary writes it."""
    raw = tokenizer.convert_ids_to_tokens(list(ids))
    texts = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]
    return [_shown(*pair) for pair in zip(texts, raw, strict=True)]


def _shown(text: str, raw: str) -> str:
    whole = text and "\N{REPLACEMENT CHARACTER}" not in text and not raw.startswith("▁")  # decoding drops that mark
    return (text if whole else raw).translate(VISIBLE)

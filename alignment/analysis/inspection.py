"""`alignment inspect attention`: a model directory and texts in, one page of attention maps out that fetches nothing.

Every head is a grey picture of one pixel per weight; a click enlarges it between its tokens. The page's script is the
one thing that may run in it, by its hash.
"""

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from alignment.adapters.files import is_adapter, is_scalar_adapter
from alignment.analysis.attention import attention_maps, encoder_decoder_attention_maps
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary, known_tokens
from alignment.errors import UserError, raise_all
from alignment.files import write_figures
from alignment.generation import SamplingConfig, decode_responses
from alignment.loading import find_directory, load_model, load_tokenizer
from alignment.models.families import FAMILIES
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.model import Model, start_token_of
from alignment.models.outputs import check_numbers
from alignment.models.safetensors_files import read_config
from alignment.reports.html import numbers_of, render_page
from alignment.reward_model import load_reward_network

TEMPLATES = Path(__file__).parent / "templates"
LEVELS = 255  # of grey
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
        targets: of an encoder-decoder, what its decoder reads for each text; none: what it writes itself, greedily, up
            to 32 tokens.
    """
    loaded = load_any(model)
    tokenizer = load_tokenizer(model)
    check_vocabulary(tokenizer, loaded.spec.vocabulary)
    documents = encoded(tokenizer, texts, "--text")
    start = start_token_of(loaded)
    if start is None and targets:
        raise UserError(f"--target is for an encoder-decoder, and {model} has one side only; leave it out")
    decoded = [] if start is None else target_ids(loaded, tokenizer, documents, targets, start)
    text_maps = []
    for i, source in enumerate(documents):
        read = shown(tokenizer, source)
        if start is None:
            kinds = [("Self-attention", read, read, attention_maps(loaded, source))]
        else:
            maps = encoder_decoder_attention_maps(loaded, source, decoded[i])
            written = shown(tokenizer, decoded[i])
            kinds = [
                ("Encoder: self-attention", read, read, maps.encoder),
                ("Decoder: self-attention", written, written, maps.decoder),
                ("Decoder on encoder: cross-attention", written, read, maps.cross),
            ]
        text_maps.append(
            [
                {
                    "title": title,
                    "rows": rows,  # tokens that look, as shown
                    "columns": columns,  # tokens that are looked at
                    "layers": head_maps(title, weights, layers),
                    # pixels of one weight when enlarged: fewer in long documents, never too few for a token's letters
                    "cell": max(13, min(26, 900 // len(columns))),
                }
                for title, rows, columns, weights in kinds
            ]
        )
    script = (TEMPLATES / "attention.js").read_text(encoding="utf-8")
    return render_page(
        Path(output),
        TEMPLATES / "attention.html.jinja",
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=str(model),
        texts=list(zip(texts, text_maps, strict=True)),
        script=script,
    )


def load_any(source: str) -> Any:
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
        f"{option} {index} ({text[:40]!r}): "
        + ("no token" if not ids else f"{len(ids)} tokens, a page shows {LONGEST}")
        for index, (text, ids) in enumerate(zip(texts, documents, strict=True), 1)
        if not 0 < len(ids) <= LONGEST
    )
    return documents


def target_ids(
    model: Model, tokenizer: Tokenizer, documents: Sequence[list[int]], targets: Sequence[str], start: int
) -> list[list[int]]:
    """Token ids that the decoder reads for each source, its start token first."""
    if not targets:
        settings = SamplingConfig(max_new_tokens=WRITTEN, temperature=0.0)
        stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        known = known_tokens(tokenizer)
        written = decode_responses(model, documents, settings, stops, start_token=start, vocabulary=known).token_ids
        return [[start, *ids] for ids in written]
    if len(targets) != len(documents):
        raise UserError(f"{len(documents)} --text and {len(targets)} --target; give one target for each text, or none")
    return [[start, *ids] for ids in encoded(tokenizer, targets, "--target")]


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as a reader knows it, white space made visible; half of a letter as the vocabulary writes it."""
    tokens = []
    for token, raw in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        whole = text and "\N{REPLACEMENT CHARACTER}" not in text and not raw.startswith("▁")  # decoding drops that mark
        tokens.append((text if whole else raw).translate(VISIBLE))
    return tokens


# The page


def write_texts(output: str | Path, template: str, model: str, texts: Sequence[Mapping[str, object]]) -> Path:
    """Write a page of a template and its numbers beside it as JSON, text by text; return the page's path."""
    write_figures(numbers_of(Path(output)), {"model": str(model), "texts": texts})
    return render_page(Path(output), TEMPLATES / template, title=str(model), texts=texts)


def head_maps(title: str, weights: Sequence[Tensor], layers: Sequence[int] | None) -> list[list[dict[str, object]]]:
    """The heads of each layer that is to be shown: layer, number and picture, as an address that holds it.

    Args:
        title: of this kind of attention, for people.
        weights: of each layer, [H, rows, columns].
    """
    wanted = range(len(weights)) if layers is None else sorted(set(layers))
    if not set(wanted) <= set(range(len(weights))) or not wanted:
        raise UserError(
            f"--layers {','.join(map(str, wanted))}: the model has layers 0 to {len(weights) - 1} "
            f"({title.lower()}), {len(weights)} in all"
        )
    for layer in wanted:
        check_numbers(weights[layer], f"layer {layer}, head {{}}".format, "a weight")
    return [
        [{"layer": layer, "head": head, "address": picture(one)} for head, one in enumerate(weights[layer])]
        for layer in wanted
    ]


def picture(weights: Tensor) -> str:
    """An address that holds the picture of a head's weights [T, S]."""
    file = io.BytesIO()
    Image.fromarray(pixels(weights).cpu().numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def pixels(weights: Tensor) -> Tensor:
    """Weights [T, S] as grey from white (0) to black (1), bytes [T, S].

    The root of the weight is what darkens: 0.01 can be seen then, and 255 levels are finest among small weights.
    """
    return LEVELS - (LEVELS * weights.clamp(0, 1).sqrt()).round().to(torch.uint8)

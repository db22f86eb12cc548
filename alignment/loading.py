"""Language models and tokenizers from a directory or the Hub. Reward models are in reward_model/."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from alignment.adapters.files import is_adapter, read_base, read_members, read_revision
from alignment.data.prepare import Preparation, preparation_of
from alignment.data.rows.hub import copied_model
from alignment.data.rows.records import Kind
from alignment.data.text.special_tokens import end_token_ids, stop_token_ids
from alignment.data.text.templates import with_chat_template
from alignment.data.tokenizers.tokenizer import Tokenizer, add_new_tokens, read_tokenizer_files
from alignment.errors import UserError
from alignment.files import CARD, check_directory
from alignment.models.external.load import external_architecture
from alignment.models.external.models import ExternalModel
from alignment.models.families import family_of, is_external_type
from alignment.models.families.family import Architecture
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.models.native_model import NativeModel
from alignment.models.quantization import quantize_blocks, require_bitsandbytes
from alignment.models.safetensors_files import GENERATION_CONFIG, read_config, read_generation_config
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import Quantization, WeightsConfig, set_up_device, warn_of_slow_bfloat16
from alignment.ragged import has_apple_gpu, has_bfloat16

UNUSED = r"[<\[].*(?i:pad|reserved|unused).*[>\]]"  # names of tokens that no text has
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", CARD]  # what a repository of the Hub may have


def find_directory(source: str, revision: str | None = None) -> Path:
    """Return the local directory of a checkpoint; a Hub name is downloaded, unless there is a copy.

    The download has safetensors, JSON, tokenizer files and card. That a copy is read, see `copied_model`, is said once.

    `revision` is a commit on the Hub; None: the newest.
    """
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        check_directory(path)
        if (path / "lineage.json").is_file() and (path / "model").is_dir():
            raise UserError(
                f"{source}: the directory of a run, whose model is below it; did you mean {path / 'model'}?"
            )
        return path
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1 or path.exists():
        raise UserError(f"{source}: {missing_directory(path)}")
    if revision is None and (copy := copied_model(source)) is not None:
        _note_copy(source, copy)
        return copy
    try:
        return _download(source, revision)
    except Exception as error:
        why = f"({type(error).__name__}): {_hub_refusal(error)}"
        raise UserError(f"{source}: no such directory, and the Hub did not give it {why}") from error


@cache
def _note_copy(source: str, copy: Path) -> None:
    print(f"{source}: read from the copy in {copy}", file=sys.stderr)


@cache
def _download(source: str, revision: str | None) -> Path:
    """Once a process: without a network huggingface_hub tries for 20 s each time before it looks into its cache."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, allow_patterns=MODEL_FILES))


def missing_directory(path: Path) -> str:
    """The problem with a path where no model is, and the way out."""
    from alignment.config.load import packaged_writer

    command = packaged_writer(str(path.parent)) if path.name == "model" else None
    advice = f"`{command}` writes it" if command else "give a directory with config.json, or a Hub name"
    return f"no such model directory; {advice}"


def _hub_refusal(error: Exception) -> str:
    from huggingface_hub import errors, is_offline_mode

    if isinstance(error, errors.GatedRepoError):
        return "access has to be granted; accept the terms on the model's page there, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "it has none of that name, or a private one; mind the spelling, and run `hf auth login` for a private one"
        )
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, ConnectionError)):
        if is_offline_mode():
            return "HF_HUB_OFFLINE is set and the model is not in the cache; unset it, or give a local directory"
        return "it cannot be reached and the model is not in the cache; download it elsewhere and give its directory"
    return str(error)


class Checkpoint:
    """A model or adapter directory, found once.

    Attributes:
        source: as the user wrote it.
        directory: the local one.
        base: the directory of the weights: of the adapter's base model, or `directory` itself.
        architecture: of the model, or of the base of an adapter or ensemble; no weights are read.
    """

    def __init__(self, source: str | Path):
        self.source = str(source)
        self.directory = find_directory(str(source))
        self.is_adapter = is_adapter(self.directory)

    @cached_property
    def base(self) -> Path:
        if not self.is_adapter:
            return self.directory
        base = read_base(self.directory)
        revision = read_revision(self.directory)
        try:
            return find_directory(base, revision)
        except UserError as error:
            raise UserError(
                f"{self.directory}: the adapter's base model is missing ({error}); put it back, or write where it is "
                "as base_model_name_or_path into adapter_config.json"
            ) from error

    @cached_property
    def architecture(self) -> Architecture:
        members = read_members(self.directory)
        base = Checkpoint(members[0]).base if members else self.base
        config = read_config(base)
        return external_architecture(base) if is_external_type(config) else family_of(config).architecture

    def file(self, name: str) -> Path:
        """A file of the directory, or of the base where an adapter has none of that name."""
        return (self.base if self.is_adapter and not (self.directory / name).is_file() else self.directory) / name

    def with_adapter(self, model: NativeModel | ExternalModel) -> NativeModel | ExternalModel:
        if not self.is_adapter:
            return model
        from alignment.adapters.attach import load_adapter

        return load_adapter(model, self.directory)


def open_checkpoint(source: str | Checkpoint) -> Checkpoint:
    """Return a checkpoint by its directory or Hub name, or as it is."""
    return source if isinstance(source, Checkpoint) else Checkpoint(source)


def find_base(adapter: Path) -> Path:
    """Return the local directory of an adapter's base model."""
    return Checkpoint(adapter).base


def preparation_for(checkpoint: Checkpoint, kind: Kind) -> Preparation:
    """The preparation of rows for the policy of a checkpoint, a decoder or an encoder-decoder; no weights are read."""
    if checkpoint.architecture != "encoder-decoder":
        return preparation_of(kind)
    from alignment.data.encoder_inputs import TEXT_TO_TEXT

    return Preparation(f"{kind} for an encoder-decoder", kind, TEXT_TO_TEXT[kind])


def load_tokenizer(
    source: str | Checkpoint,
    chat_template: str | None = None,
    *,
    add_tokens: Sequence[str] = (),
    add_special_tokens: Sequence[str] = (),
) -> Tokenizer:
    """The tokenizer of a model directory or Hub name; an adapter without a tokenizer uses its base model's.

    Args:
        chat_template: another template than its own: a built-in one's name, a file, or Jinja text.
        add_tokens, add_special_tokens: new to the vocabulary; see `add_new_tokens`. The template may write them.
    """
    checkpoint = open_checkpoint(source)
    tokenizer = read_tokenizer_files(checkpoint.file("tokenizer.json").parent)
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    tokenizer.published_ends = {*_named_ends(checkpoint)}.intersection(special)
    if add_tokens or add_special_tokens:
        add_new_tokens(tokenizer, add_tokens, add_special_tokens)
    if chat_template is not None:
        return with_chat_template(tokenizer, chat_template)
    return tokenizer


def _named_ends(checkpoint: Checkpoint) -> list[int]:
    """The end tokens in the generation_config.json of a model."""
    path = checkpoint.file(GENERATION_CONFIG)
    named = (read_generation_config(path.parent) or {}).get("eos_token_id")
    named = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in named):
        raise UserError(f"{path}: eos_token_id must be a token's id or a list of ids, got {named!r}")
    return named


def describe_stop_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """Say in one sentence which tokens end a response, and which ordinary ones in generation_config.json do not."""
    stops = stop_token_ids(tokenizer)

    def listed(ids: Iterable[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in sorted(ids))

    unused = set(_named_ends(checkpoint)) - stops
    more = f"; {GENERATION_CONFIG} also names {listed(unused)}, which does not end a response here" if unused else ""
    return f"a response ends at {listed(stops)}{more}"


def load_model(
    source: str | Checkpoint,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    quantize: Quantization | None = None,
) -> Any:
    """Load a language model in eval mode.

    Args:
        source: directory or Hub name of a model, or of an adapter, which is loaded with its base model.
        dtype: "float32", "bfloat16", "float16", or "auto", see `torch_dtype`.
        quantize: hold the matrices of the blocks in 4 bits ("nf4") or 8 ("int8"); everything else as `dtype` says.

    Returns:
        A model: `model(input_ids, attention_mask).logits` is [B, T, V]; `.source` is "native" for an architecture of
        this library and "transformers" for one that runs through transformers' class.
    """
    require_bitsandbytes(quantize)
    checkpoint = open_checkpoint(source)
    model = load_language_model(checkpoint.base, torch_dtype(dtype, device), "cpu" if quantize else device)
    model = model if quantize is None else quantize_blocks(model, quantize).to(device)
    weight = next(model.parameters())
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        warn_of_slow_bfloat16()
    return checkpoint.with_adapter(model).eval()


def load_frozen_model(checkpoint: Checkpoint, bases: SharedWeights, device: str | torch.device = "cpu") -> Any:
    """Load a language model that does not train, such as a reference, in eval mode; `bases` gives its weights.

    It computes in float32, or in the type of the autocast around a call, however its weights are held.
    """
    model = bases.language_model(checkpoint.base).to(device)
    return checkpoint.with_adapter(model).requires_grad_(False).eval()


def torch_dtype(dtype: str | torch.dtype, device: str | torch.device | None = None) -> torch.dtype | None:
    """The torch type of a name such as "bfloat16"; None for "auto", the type that weights have in the checkpoint.

    On a `device` that computes with them auto is float32 if it is a CPU without instructions for bfloat16.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if str(device) == "cpu" and has_bfloat16() is False else None
    return getattr(torch, dtype)


def best_device() -> str:
    """ "cuda" or "mps" where there is a GPU, of NVIDIA's or AMD's kind or Apple's, else "cpu"."""
    set_up_device()
    return "cuda" if torch.cuda.is_available() else "mps" if has_apple_gpu() else "cpu"


def load_on_best_device(source: str | Checkpoint, weights: WeightsConfig) -> Any:
    """`load_model` with the types that a config says, on the GPU where there is one."""
    return load_model(source, weights.dtype, best_device(), quantize=weights.quantize)


def same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    """Return True where two tokenizers map tokens to the same ids and have the same end token."""
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def set_special_tokens(model: NativeModel | ExternalModel, tokenizer: Tokenizer) -> None:
    """Write the tokenizer's padding and stop tokens into the configs of a model about to be saved."""
    try:
        ends = end_token_ids(tokenizer)
        stops = stop_token_ids(tokenizer)
    except UserError:  # a broken template must not keep a trained model from being saved
        ends = stops = set[int]() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if not hasattr(model, "new_cache"):
        return set_padding(model, tokenizer, sorted(ends))
    model.config["pad_token_id"] = None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id
    _set_end_tokens(model, sorted(stops), tokenizer.pad_token_id)


def set_padding(classifier: NativeModel | ExternalModel, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
    """Give a classifier's config and its tokenizer a padding token that ends no text; the config has None without one.

    Hugging Face's decoders read a text at its last token that is no padding, and no batch without padding. In place of
    an end token stands one that no text has: a reserved one, the unknown one of a tokenizer that knows every byte, or a
    new one where the embedding has a row to spare.
    """
    rows = classifier.config.get("vocab_size", 0)
    if tokenizer.pad_token_id in (None, *ends):
        vocabulary = tokenizer.get_vocab()
        free = [name for name in sorted(vocabulary) if re.fullmatch(UNUSED, name) and vocabulary[name] < rows]
        if tokenizer.unk_token_id not in (None, *tokenizer.encode("\U00010348\U0001fae8")):
            free.append(str(tokenizer.unk_token))
        free = [name for name in free if vocabulary[name] not in ends]
        if not free and len(vocabulary) == 1 + max(vocabulary.values()) < rows:
            free = ["<|pad|>"]
        if free:
            tokenizer.add_special_tokens({"pad_token": free[0]})
    pad = tokenizer.pad_token_id
    classifier.config["pad_token_id"] = None if pad in ends else pad


def _set_end_tokens(model: NativeModel | ExternalModel, end_ids: list[int], pad_id: int | None) -> None:
    """Set the end tokens (if there are any) and the padding token in both configs of a model that generates."""
    config = model.generation_config
    if config is None:  # transformers takes the same keys of config.json in its place
        from transformers import GenerationConfig

        keys = [key for key in vars(GenerationConfig()) if not key.startswith("_") and key != "transformers_version"]
        config = {key: model.config[key] for key in keys if model.config.get(key) is not None}
    model.generation_config = dict(config)
    if end_ids:
        model.config["eos_token_id"] = end_ids[0] if len(end_ids) == 1 else end_ids
        model.generation_config["eos_token_id"] = model.config["eos_token_id"]
    if pad_id is not None:
        model.generation_config["pad_token_id"] = pad_id

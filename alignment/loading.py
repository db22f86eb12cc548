"""Models and tokenizers from a directory or the Hub, ready to use. Training starts from here too, see algorithms/assemble.py."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.adapters import is_adapter, is_scalar_adapter, load_adapter, merge_adapter, read_base, read_revision
from alignment.config.load import packaged_writer
from alignment.data.text.chat import prompt_ids, response_ids, stop_token_ids, text_ids
from alignment.data.text.special_tokens import EncodedText, frame_of, tokenize_with_offsets
from alignment.data.tokenizers.load import load_tokenizer as _load_tokenizer_directory
from alignment.data.tokenizers.load import save_tokenizer
from alignment.errors import UserError
from alignment.files import atomic_directory
from alignment.models.classifiers import SequenceClassifier
from alignment.models.external.load import language_kind
from alignment.models.families import FAMILIES, family_of, is_foreign
from alignment.models.huggingface.checkpoint import load_checkpoint, load_language_model, load_scalar_model, save_model
from alignment.models.huggingface.generation_config import GENERATION_CONFIG, read_generation_config, set_end_tokens
from alignment.models.safetensors_files import read_config
from alignment.ragged import Ragged, groups_of
from alignment.untrusted import check_directory


def find_directory(source: str, revision: str | None = None) -> Path:
    """The local directory of a checkpoint; a Hub name is fetched (safetensors, JSON and tokenizer files only).

    Args:
        revision: commit on the Hub; None: the newest.

    Raises:
        UserError: neither a directory nor a Hub name that can be reached, or one whose files lie elsewhere.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        check_directory(path)
        return path
    if path.is_absolute() or source.startswith(".") or source.count("/") > 1 or path.exists():
        command = packaged_writer(str(path.parent)) if path.name == "model" else None
        advice = f"`{command}` writes it" if command else "give a directory with config.json, or a Hub name"
        raise UserError(f"{source}: no such model directory; {advice}")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as error:
        why = f"({type(error).__name__}): {_hub_refusal(error)}"
        raise UserError(f"{source}: no such directory, and the Hub did not give it {why}") from error


def _hub_refusal(error: Exception) -> str:
    """Why the Hub did not give a model, and the way out."""
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


def find_base(adapter: Path) -> Path:
    """The local directory of the model that an adapter sits on.

    Raises:
        UserError: it is neither there nor to be had from the Hub; names the adapter.
    """
    base = read_base(adapter)
    try:
        return find_directory(base, read_revision(adapter))
    except UserError as error:
        raise UserError(
            f"{adapter}: the adapter's base model is missing ({error}); put it back, or write where it is as "
            "base_model_name_or_path into adapter_config.json"
        ) from error


def kind_of(source: str) -> str:
    """decoder, encoder or encoder-decoder, by a model's config.json or that of an adapter's base; no weights are read."""
    directory = find_directory(source)
    directory = find_base(directory) if is_adapter(directory) else directory
    config = read_config(directory)
    if is_foreign(config):
        return {"causal": "decoder", "masked": "encoder", "pairs": "encoder-decoder"}[language_kind(directory)]
    name = family_of(config).tasks["language"].hf_class
    return "encoder" if name.endswith("MaskedLM") else "encoder-decoder" if "Conditional" in name else "decoder"


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a model directory or Hub name; an adapter without one of its own uses its base model's."""
    directory = find_directory(source)
    if is_adapter(directory) and not (directory / "tokenizer.json").exists():
        directory = find_base(directory)
    return _load_tokenizer_directory(directory)


def stops_in_words(source: str, tokenizer: Any) -> str:
    """Which tokens end a response, and which end tokens the checkpoint's files name beside them, in one sentence.

    Args:
        source: directory or Hub name of the model; an adapter without a generation config has its base model's.
        tokenizer: the model's.

    Raises:
        UserError: a generation_config.json that is no JSON object, or whose end tokens are no ids.
    """
    directory = find_directory(source)
    if is_adapter(directory) and not (directory / GENERATION_CONFIG).is_file():
        directory = find_base(directory)
    path = directory / GENERATION_CONFIG
    named = (read_generation_config(directory) or {}).get("eos_token_id")
    named = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in named):
        raise UserError(f"{path}: eos_token_id must be a token's id or a list of ids, got {named!r}")
    stops = stop_token_ids(tokenizer)

    def listed(ids: Iterable[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in sorted(ids))

    unused = set(named) - stops
    more = f"; {path.name} also names {listed(unused)}, which does not end a response here" if unused else ""
    return f"a response ends at {listed(stops)}{more}"


def load_model(source: str, dtype: str | torch.dtype = "float32", device: str = "cpu") -> Any:
    """A language model in eval mode.

    Args:
        source: directory or Hub name; of a model, or of an adapter, whose base model is then loaded with it.
        dtype: "float32", "bfloat16" or "float16".
        device: where its weights go.

    Returns:
        A model: `model(input_ids, attention_mask).logits` is [B, T, V]; `.source` is "native".

    Raises:
        UserError: anything in the directory that is missing, unknown or unsafe.
    """
    directory, options = find_directory(source), {"dtype": _dtype(dtype), "device": device}
    if not is_adapter(directory):
        return load_language_model(directory, **options).eval()
    return load_adapter(load_language_model(find_base(directory), **options), directory).eval()


def load_scalar(source: str, dtype: str | torch.dtype = "float32", device: Any = "cpu") -> Any:
    """A scalar model in eval mode, as `load_model`; its score head must be in the checkpoint or in the adapter."""
    directory, options = find_directory(source), {"dtype": _dtype(dtype), "device": device}
    if not is_adapter(directory):
        _refuse_language_model(source, directory)
        return load_scalar_model(directory, **options).eval()
    if not is_scalar_adapter(directory):
        raise UserError(
            f"{source}: this adapter belongs to a policy and has no score head; give a reward model's directory"
        )
    model = load_scalar_model(find_base(directory), new_head="zero", **options)
    return load_adapter(model, directory).eval()


def _refuse_language_model(source: str, directory: Path) -> None:
    """Refuse a model that was saved without a score head, before its missing tensor is what one hears of."""
    architecture = (read_config(directory).get("architectures") or [""])[0]
    if str(architecture).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise UserError(
            f"{source}: this is no reward model but a language model ({architecture}) without a score head; train one "
            f"from it with `alignment reward CONFIG policy={source}`"
        )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


@dataclass(frozen=True)
class RewardModel:
    """A scalar model, or an encoder with one class, with its tokenizer: texts in, scores out."""

    model: Any
    tokenizer: Any

    def reads_ids_of(self, tokenizer: Any) -> bool:
        """Whether a policy's ids mean the same here: one vocabulary, one chat template, and no frame around the texts.

        A reward model without a chat template reads the policy's; an encoder frames prompt and response by itself.
        """
        own = self.tokenizer
        same_template = not own.chat_template or own.chat_template == tokenizer.chat_template
        return same_vocabulary(own, tokenizer) and same_template and not isinstance(self.model, SequenceClassifier)

    def score(
        self,
        texts: Sequence[str | tuple[Any, str]],
        micro_batch_tokens: int = 16_384,
        ended: Sequence[bool] | None = None,
    ) -> Tensor:
        """Score whole texts, or (prompt, response) pairs; the same alone, batched or padded.

        Args:
            texts: a plain text is read as it stands with the end token added; a pair as in training, its prompt a text
                or a list of messages. An encoder reads both as its tokenizer frames a text and a pair of texts.
            micro_batch_tokens: tokens per forward.
            ended: False where a pair's response was cut off, so that no end token follows it; None: all of them ended.
                An encoder's frame of special tokens does not depend on it.

        Returns:
            Scores, float32 on the CPU, [n].

        Raises:
            UserError: a prompt of messages for an encoder, which has no dialogues.
        """
        if isinstance(self.model, SequenceClassifier):
            framed = self._framed(texts)
            return self.score_ids([one.ids for one in framed], micro_batch_tokens, [one.segments for one in framed])
        whole = [True] * len(texts) if ended is None else ended
        return self.score_ids([self._ids(*row) for row in zip(texts, whole, strict=True)], micro_batch_tokens)

    def _ids(self, text: str | tuple[Any, str], ended: bool) -> list[int]:
        if isinstance(text, str):
            return text_ids(self.tokenizer, text)
        prompt, response = text
        return prompt_ids(self.tokenizer, prompt) + response_ids(self.tokenizer, response, prompt, ended=ended)

    def _framed(self, texts: Sequence[str | tuple[Any, str]]) -> list[EncodedText]:
        """Texts and pairs as an encoder's tokenizer frames them."""
        parts = [(text,) if isinstance(text, str) else text for text in texts]
        if any(not isinstance(part, str) for text in parts for part in text):
            raise UserError("this reward model is an encoder and reads texts; give each prompt as one text")
        frame = frame_of(self.tokenizer)
        pieces = iter(tokenize_with_offsets(self.tokenizer, [part for text in parts for part in text]))
        ids = [[next(pieces).ids for _ in text] for text in parts]
        return [frame.single(*text) if len(text) == 1 else frame.pair(*text) for text in ids]

    @torch.no_grad()
    def score_ids(
        self,
        documents: Sequence[Sequence[int]],
        micro_batch_tokens: int = 16_384,
        segments: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Score token ids as they are, [n]; `segments` say which sentence each token is of, for encoders."""
        scores = torch.zeros(len(documents))
        device = next(self.model.parameters()).device
        for group in groups_of([len(document) for document in documents], micro_batch_tokens):
            batch = Ragged.build([documents[i] for i in group])
            if segments is not None:
                batch = replace(batch, segments=torch.tensor([part for i in group for part in segments[i]]))
            output, last = self.model(batch=batch.to(device)), batch.last.to(device)
            found = output.values[last] if output.scores is None else output.scores[:, 0]
            scores[group] = found.float().cpu()
        return scores


def load_reward_model(source: str, dtype: str | torch.dtype = "float32", device: Any = "cpu") -> RewardModel:
    """A reward model in eval mode with its tokenizer.

    Raises:
        UserError: also where the checkpoint has no trained score head.
    """
    directory = find_directory(source)
    if not is_adapter(directory) and _scores_whole_texts(read_config(directory)):
        return RewardModel(load_checkpoint(directory, "scalar", _dtype(dtype), device), load_tokenizer(source))
    return RewardModel(load_scalar(source, dtype, device), load_tokenizer(source))


def _scores_whole_texts(config: dict[str, Any]) -> bool:
    """Whether a config is an encoder's, which has one score for a text and none for each token."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and "scalar" in family.tasks and family.tasks["scalar"].readout is not None


def same_vocabulary(one: Any, other: Any) -> bool:
    """Whether two tokenizers give the same ids the same meaning and end texts alike."""
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def export(model: str, adapter: str | None, output: str) -> Path:
    """Write a model, its adapter merged in, as one plain Hugging Face directory.

    Raises:
        UserError: an adapter that cannot be merged (a prefix is no change of weights).
    """
    directory = find_directory(model)
    scalar = _is_scalar(find_directory(adapter) if adapter else directory)
    if adapter is None:
        merged = load_scalar(model) if scalar else load_model(model)
    else:
        bare = load_scalar_model(directory, new_head="zero") if scalar else load_language_model(directory)
        merged = load_adapter(bare, find_directory(adapter))
    if adapter is not None or is_adapter(directory):
        merged = merge_adapter(merged)
    tokenizer = load_tokenizer(adapter or model)
    set_special_tokens(merged, tokenizer)
    with atomic_directory(Path(output)) as directory:
        save_model(merged, directory)
        save_tokenizer(tokenizer, directory)
    return Path(output)


def set_special_tokens(model: Any, tokenizer: Any) -> None:
    """Put the tokenizer's padding and stop tokens into the configs of a model about to be saved."""
    ends = _end_ids(tokenizer)
    # Hugging Face's classifiers look for the last token that is no padding; an end token must not count as such.
    model.config["pad_token_id"] = None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id
    set_end_tokens(model, ends, tokenizer.pad_token_id)


def _end_ids(tokenizer: Any) -> list[int]:
    """Tokens that end a response, or a document where the tokenizer has no chat template that works; may be empty."""
    try:
        return sorted(stop_token_ids(tokenizer))
    except UserError:  # nothing was trained on such a template, and the model is worth saving all the same
        return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _is_scalar(directory: Path) -> bool:
    """Whether a directory holds a reward model, or an adapter for one."""
    if is_adapter(directory):
        return is_scalar_adapter(directory)
    architectures = read_config(directory).get("architectures") or [""]
    return str(architectures[0]).endswith("ForSequenceClassification")

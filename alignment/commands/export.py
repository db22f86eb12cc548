"""The command `alignment export`: a model and its adapter as one plain Hugging Face directory."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alignment.adapters import is_adapter, is_scalar_adapter, load_adapter, merge_adapter
from alignment.adapters.files import read_members, score_rows
from alignment.data.text.named_templates import with_template_tokens
from alignment.data.tokenizers.load import add_new_tokens, save_tokenizer
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import atomic_directory, write_json
from alignment.loading import (
    find_base,
    find_directory,
    load_model,
    load_tokenizer,
    set_special_tokens,
    torch_dtype,
)
from alignment.models.external.models import ExternalModel
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model, save_model
from alignment.models.native_model import NativeModel
from alignment.models.new_weights import grow_vocabulary
from alignment.models.quantization import read_quantization, require_bitsandbytes, round_blocks
from alignment.models.safetensors_files import read_config, widest_type
from alignment.models.weights_config import Quantization
from alignment.reward_model import RewardModel, load_reward_model
from alignment.reward_model.calibration import read_calibration
from alignment.reward_model.canaries import check_canaries, read_canaries, score_canaries, weights_precision

ERRORS = "quantization_error.json"


def export_model(
    model: str,
    adapter: str | None,
    output: str,
    *,
    dtype: str = "auto",
    quantize: Quantization | None = None,
    chat_template: str | None = None,
    add_tokens: Sequence[str] = (),
    add_special_tokens: Sequence[str] = (),
) -> Path:
    """Write a model with its adapter merged as one plain Hugging Face directory and return that directory.

    The sum of a weight and its update is computed in float32. An adapter that was trained on quantized weights is merged
    into these weights as they were, and how far they are from the original ones is printed, and written for each matrix.

    Args:
        model: directory or Hub name of a model or an adapter.
        adapter: directory or Hub name of an adapter for it.
        output: directory to write.
        dtype: type of the weights written; "auto": that of the model, or of the adapter's base. A score head is float32.
        chat_template: give the tokenizer this template, a built-in one's name or a file; the special tokens that a built-in
            one needs are added to the vocabulary, their rows the mean of the others.
        add_tokens, add_special_tokens: further tokens to add in the same way; see `add_new_tokens`.
        quantize: how the weights were quantized that the adapter was trained on; None: as its directory says.

    A reward model keeps its calibration and the texts whose scores tell a damaged model: they are scored again, must have
    the scores that they had, and are written with those of the model that is written.

    Raises:
        UserError: the adapter cannot be merged (a prefix does not change weights); `quantize` without an adapter; an
            ensemble of adapters; a reward model whose scores are not those that were saved with it.
    """
    directory = find_directory(model)
    _refuse_ensemble(model, directory)
    updates = find_directory(adapter) if adapter else directory if is_adapter(directory) else None
    scalar = _is_scalar(updates or directory)
    tokenizer = load_tokenizer(adapter or model)
    changed, added = _with_tokens(tokenizer, add_tokens, add_special_tokens, chat_template)
    errors: Mapping[str, tuple[float, float]] = {}
    if updates is None:
        if quantize is not None:
            raise UserError("--quantize is for the weights below an adapter, and there is none to merge; leave it out")
        written: Any = load_reward_model(model, dtype).model if scalar else load_model(model, dtype)
    else:
        base = directory if adapter else find_base(directory)
        quantize = quantize or read_quantization(updates)
        written, errors = _merge(base, updates, dtype, quantize, scalar=scalar)
    if scalar and updates is not None:
        check_canaries(RewardModel(written.eval(), tokenizer), updates, str(updates), rounded=bool(errors))
    _add_rows(written, added)
    set_special_tokens(written, changed)
    with atomic_directory(Path(output)) as folder:
        save_model(written, folder)
        save_tokenizer(changed, folder)
        if scalar:
            _write_scale_and_canaries(RewardModel(written.eval(), changed), updates or directory, folder)
        if errors:
            write_json(folder / ERRORS, {name: {"max": most, "mean": mean} for name, (most, mean) in errors.items()})
    return Path(output)


def _merge(
    base: Path, updates: Path, dtype: str, quantize: Quantization | None, *, scalar: bool
) -> tuple[Any, Mapping[str, tuple[float, float]]]:
    """A base with an adapter merged into it, and the largest and mean error of each matrix that was quantized."""
    require_bitsandbytes(quantize)
    members = score_rows(updates) if scalar else 0
    model = load_scalar_model(base, new_head="zero", members=members) if scalar else load_language_model(base)
    types = _types(model, base, torch_dtype(dtype), scalar=scalar)
    errors: Mapping[str, tuple[float, float]] = {}
    if quantize is not None:
        errors = round_blocks(model, quantize)
        print(_describe_errors(errors, quantize, base), file=sys.stderr)
    merged = merge_adapter(load_adapter(model, updates))
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(types.get(name, torch.float32))
    return merged, errors


def _with_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], special_tokens: Sequence[str], chat_template: str | None
) -> tuple[Tokenizer, dict[int, str]]:
    """The tokenizer with further tokens and another chat template, and the tokens that are new, by their ids."""
    known = tokenizer.get_vocab()
    add_new_tokens(tokenizer, tokens, special_tokens)
    changed = tokenizer if chat_template is None else with_template_tokens(tokenizer, chat_template)
    return changed, {index: token for token, index in changed.get_vocab().items() if token not in known}


def _add_rows(model: NativeModel | ExternalModel, added: Mapping[int, str]) -> None:
    """Give the model rows for the ids of new tokens, and say which."""
    if added:
        grow_vocabulary(model, min(added), max(added) + 1)
        names = ", ".join(added[index] for index in sorted(added))
        print(f"added to the vocabulary, rows at the mean of the others: {names}", file=sys.stderr)


def _refuse_ensemble(model: str, directory: Path) -> None:
    if (members := read_members(directory)) is not None:
        raise UserError(
            f"{model}: an ensemble of {len(members)} adapters over one base has no weights to merge them into; export each "
            f"member as a reward model of its own (`alignment export --model {model}/{members[0].name} ...`), or train "
            "ensemble.kind=heads, which is one model"
        )


def _write_scale_and_canaries(reward_model: RewardModel, source: Path, directory: Path) -> None:
    """Give a written reward model the scale of its scores, and the canaries' scores in the type that it is written in."""
    read_calibration(source).write(directory)
    saved = read_canaries(source)
    if saved is not None:
        scores = score_canaries(reward_model, saved.texts)
        replace(saved, scores=scores, precision=weights_precision(reward_model.model)).write(directory)


def _types(
    model: NativeModel | ExternalModel, base: Path, dtype: torch.dtype | None, *, scalar: bool
) -> dict[str, torch.dtype]:
    """The type to write each parameter in; `dtype` None: that of the base's file."""
    names = [name for name, _ in model.named_parameters()]
    found = dict.fromkeys(names, dtype or widest_type(base))
    if dtype is None and isinstance(model, NativeModel):
        unread: Any = (
            load_scalar_model(base, None, "meta", "zero") if scalar else load_language_model(base, None, "meta")
        )
        found = {name: parameter.dtype for name, parameter in unread.named_parameters()}
    head = (
        {id(parameter) for parameter in model.get_submodule("head").parameters()} if _has_head(model, scalar) else set()
    )
    return found | {name: torch.float32 for name, parameter in model.named_parameters() if id(parameter) in head}


def _has_head(model: NativeModel | ExternalModel, scalar: bool) -> bool:
    return scalar and isinstance(model, NativeModel)


def _describe_errors(errors: Mapping[str, tuple[float, float]], quantize: Quantization, base: Path) -> str:
    """One sentence on how far quantized weights are from the original ones."""
    worst = max(errors, key=lambda name: errors[name][0])
    mean = sum(mean for _, mean in errors.values()) / len(errors)
    return (
        f"merged into the {quantize} weights that the adapter was trained on: they differ from those of {base} by "
        f"{errors[worst][0]:.2g} at most (in {worst}) and by {mean:.2g} on average over {len(errors)} matrices; {ERRORS} "
        "has each"
    )


def _is_scalar(directory: Path) -> bool:
    """Whether a directory holds a reward model or the adapter of one."""
    if is_adapter(directory):
        return is_scalar_adapter(directory)
    architectures = read_config(directory).get("architectures") or [""]
    return str(architectures[0]).endswith("ForSequenceClassification")

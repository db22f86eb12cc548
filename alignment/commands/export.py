"""The command `alignment export`: a model and its adapter as one plain Hugging Face directory."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_gguf_available

from alignment.adapters import is_adapter, is_scalar_adapter, load_adapter, merge_adapter
from alignment.adapters.files import read_members, score_rows
from alignment.data.text.templates import with_template_tokens
from alignment.data.tokenizers.tokenizer import add_new_tokens, save_tokenizer
from alignment.errors import UserError, install_advice
from alignment.files import exported_directory, refuse_foreign
from alignment.loading import find_base, find_directory, load_model, load_tokenizer, set_special_tokens, torch_dtype
from alignment.models.external.models import ExternalModel
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model, save_model
from alignment.models.native_model import NativeModel
from alignment.models.new_weights import grow_vocabulary
from alignment.models.quantization import read_quantization, require_bitsandbytes, round_blocks
from alignment.models.safetensors_files import max_dtype, read_config
from alignment.models.weights_config import Quantization
from alignment.reward_model import RewardModel, load_reward_model
from alignment.reward_model.model import (
    check_canaries,
    read_calibration,
    read_canaries,
    score_canaries,
    weights_precision,
)


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

    The sum of a weight and its update is computed in float32. An adapter trained on quantized weights is merged into
    these weights as they were, and their distance from the original ones is printed. A reward model keeps its
    calibration and its canaries, which must score as before and are written with their new scores.

    Args:
        model: a model or adapter directory, or a .gguf file, whose weights become those of a plain directory.
        dtype: type of the weights written; "auto": that of the model, or of the adapter's base, float32 of a GGUF file.
            A score head is float32.
        quantize: how the weights were quantized that the adapter was trained on; None: as its directory says.
        chat_template: a built-in one's name or a file; the special tokens that it needs are added to the vocabulary,
            their rows the mean of the others, as are `add_tokens` and `add_special_tokens`.

    Raises:
        UserError: `output` is read from, or holds anything but an earlier export; the adapter cannot be merged, such
            as a prefix; `quantize` without an adapter; an ensemble of adapters; a reward model with other scores.
    """
    if model.endswith(".gguf"):
        return export_gguf(Path(model), Path(output), torch_dtype(dtype) or torch.float32)
    directory = find_directory(model)
    updates = find_directory(adapter) if adapter else directory if is_adapter(directory) else None
    base = find_base(directory) if updates == directory else directory
    target = _target(output, [directory, base, updates or base])
    scalar = _is_scalar(model, directory, updates)
    tokenizer = load_tokenizer(adapter or model)
    known = tokenizer.get_vocab()
    add_new_tokens(tokenizer, add_tokens, add_special_tokens)
    changed = tokenizer if chat_template is None else with_template_tokens(tokenizer, chat_template)
    if updates is None:
        if quantize is not None:
            raise UserError("--quantize is for the weights below an adapter, and there is none to merge; leave it out")
        written: Any = load_reward_model(model, dtype).model if scalar else load_model(model, dtype)
    else:
        quantize = quantize or read_quantization(updates)
        written = _merge(base, updates, dtype, quantize, scalar=scalar)
        if scalar:
            check_canaries(RewardModel(written.eval(), tokenizer), updates, str(updates), rounded=quantize is not None)
    if added := {index: token for token, index in changed.get_vocab().items() if token not in known}:
        grow_vocabulary(written, min(added), max(added) + 1)
        names = ", ".join(added[index] for index in sorted(added))
        print(f"added to the vocabulary, rows at the mean of the others: {names}", file=sys.stderr)
    set_special_tokens(written, changed)
    with exported_directory(target) as folder:
        save_model(written, folder)
        save_tokenizer(changed, folder)
        if scalar:
            _write_scale_and_canaries(RewardModel(written.eval(), changed), updates or directory, folder)
    return Path(output)


def _target(output: str, sources: Sequence[Path]) -> Path:
    """The directory to write (of a link, the one it leads to), where it may be written and is none of `sources`."""
    target = Path(os.path.realpath(output))
    if target in [source.resolve() for source in sources]:
        raise UserError(f"{output}: the model is read from there; choose another directory for the result")
    refuse_foreign(target)
    return target


def _is_scalar(model: str, directory: Path, updates: Path | None) -> bool:
    """True where there is a reward model, or the adapter of one, to write; an ensemble of adapters is refused."""
    if (members := read_members(directory)) is not None:
        raise UserError(
            f"{model}: an ensemble of {len(members)} adapters over one base has no weights to merge them into; export "
            f"each member as a reward model of its own (`alignment export --model {model}/{members[0].name} ...`), or "
            "train ensemble.kind=heads, which is one model"
        )
    if updates is not None:
        return is_scalar_adapter(updates)
    return str((read_config(directory).get("architectures") or [""])[0]).endswith("ForSequenceClassification")


def _merge(base: Path, updates: Path, dtype: str, quantize: Quantization | None, *, scalar: bool) -> Any:
    """A base with an adapter merged into it, every parameter in the type to be written."""
    require_bitsandbytes(quantize)
    members = score_rows(updates) if scalar else 0
    model = load_scalar_model(base, new_head="zero", members=members) if scalar else load_language_model(base)
    types = _types(model, base, torch_dtype(dtype), scalar=scalar)
    if quantize is not None:
        errors = round_blocks(model, quantize)
        worst = max(most for most, _ in errors.values())
        mean = fmean(mean for _, mean in errors.values())
        print(
            f"merged into the {quantize} weights that the adapter was trained on: they differ from those of {base} by "
            f"{worst:.2g} at most and by {mean:.2g} on average over {len(errors)} matrices",
            file=sys.stderr,
        )
    merged = merge_adapter(load_adapter(model, updates, rounded=quantize))
    for name, parameter in merged.named_parameters():
        parameter.data = parameter.data.to(types.get(name, torch.float32))
    return merged


def _write_scale_and_canaries(reward_model: RewardModel, source: Path, directory: Path) -> None:
    """Give a written reward model the scale of its scores, and the canaries' scores in the type it is written in."""
    read_calibration(source).write(directory)
    saved = read_canaries(source)
    if saved is not None:
        scores = score_canaries(reward_model, saved.texts)
        replace(saved, scores=scores, precision=weights_precision(reward_model.model)).write(directory)


def _types(
    model: NativeModel | ExternalModel, base: Path, dtype: torch.dtype | None, *, scalar: bool
) -> dict[str, torch.dtype]:
    """The type to write each parameter in; `dtype` None: that of the base's file. A score head is float32."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied head may get its own weight
    types = dict.fromkeys(names, dtype or max_dtype(base))
    if not isinstance(model, NativeModel):
        return types
    if dtype is None:
        load = partial(load_scalar_model, new_head="zero") if scalar else load_language_model
        stored = load(base, None, "meta").named_parameters(remove_duplicate=False)
        types = {name: parameter.dtype for name, parameter in stored}
    return types | {name: torch.float32 for name in types if scalar and name.startswith("head.")}


def export_gguf(path: Path, output: Path, dtype: torch.dtype) -> Path:
    """Write the model and the tokenizer of a GGUF file, its quantized weights as numbers of `dtype`.

    Raises:
        UserError: there is no such file, gguf is not installed, or transformers does not read the file's architecture.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    refuse_foreign(output)
    if not is_gguf_available():
        raise UserError(f"{path}: a GGUF file is read by the package gguf; {install_advice('gguf')}")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # of any type, depending on what the file lacks
        raise UserError(f"{path}: transformers could not read it ({type(error).__name__}: {error})") from error
    del loaded.config.quantization_config
    loaded.config.__dict__.pop("_model_name_or_path", None)
    with torch.device("meta"):  # the model that was read says that it is quantized, and is not saved
        plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    with exported_directory(output) as folder:
        plain.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
    return output

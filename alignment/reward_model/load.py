"""Reward models loaded from a directory or the Hub: decoders, encoders, adapters, ensembles; canaries checked."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from alignment.adapters.attach import load_adapter
from alignment.adapters.files import is_adapter, is_scalar_adapter, read_members, score_rows
from alignment.errors import UserError
from alignment.loading import find_base, find_directory, load_tokenizer, torch_dtype
from alignment.models.families import FAMILIES
from alignment.models.frozen_weights import store_frozen
from alignment.models.heads import score_outputs
from alignment.models.huggingface.checkpoint import load_pretrained, load_scalar_model
from alignment.models.quantization import quantize_blocks, require_bitsandbytes
from alignment.models.safetensors_files import read_config
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import Quantization, WeightsConfig
from alignment.reward_model.model import (
    AdapterEnsemble,
    Combine,
    Network,
    RewardModel,
    check_canaries,
    read_calibration,
    read_canaries,
)

Load = Callable[..., Any]  # (directory, new_head=, members=) -> a scalar model


def load_reward_model(
    source: str,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    quantize: Quantization | None = None,
    combine: Combine = "mean",
    std_coef: float = 1.0,
) -> RewardModel:
    """Load a reward model in eval mode with its tokenizer.

    Its scores are normalized where the run that trained it had `normalize`, and its canaries are scored again.

    Args:
        source: directory or Hub name of a reward model, or of the adapter of one, or of an ensemble.
        dtype, device, quantize: as for `load_model`; combine, std_coef: as for `RewardModel`.

    Raises:
        UserError: something in the directory is missing, unknown or unsafe, there is no trained score head, or the
            canary texts have other scores than when the model was saved.
    """
    model = load_reward_network(source, dtype, device, quantize=quantize)
    return _with_files(model, source, find_directory(source), combine, std_coef)


def load_frozen_reward_model(
    source: str,
    bases: SharedWeights,
    device: str | torch.device = "cpu",
    *,
    combine: Combine = "mean",
    std_coef: float = 1.0,
) -> RewardModel:
    """Load in eval mode a reward model that does not train; `bases` gives weights that other networks may share."""
    directory = find_directory(source)
    if (members := read_members(directory)) is not None:
        model: Any = _ensemble(members, bases, device)
    elif _is_encoder(directory):
        model = store_frozen(load_pretrained(directory, "scalar", None), bases.weights).to(device)
    else:
        base = _load_reward_base(source, directory, bases.scalar_model).to(device)
        model = load_adapter(base, directory).requires_grad_(False) if is_adapter(directory) else base
    return _with_files(model.eval(), source, directory, combine, std_coef)


def load_reward_network(
    source: str,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    *,
    quantize: Quantization | None = None,
) -> Any:
    """Load the model of a reward model's directory or adapter in eval mode, without its tokenizer."""
    require_bitsandbytes(quantize)
    directory = find_directory(source)
    if (members := read_members(directory)) is not None:
        weights = WeightsConfig(cast(Any, str(dtype).removeprefix("torch.")), quantize)
        return _ensemble(members, SharedWeights(weights), device)
    options: dict[str, Any] = {"dtype": torch_dtype(dtype, device), "device": "cpu" if quantize else device}
    if _is_encoder(directory):
        model = load_pretrained(directory, "scalar", **options)
    else:
        model = _load_reward_base(source, directory, partial(load_scalar_model, **options))
    model = model if quantize is None else quantize_blocks(model, quantize).to(device)
    return (load_adapter(model, directory) if is_adapter(directory) else model).eval()


def member_count(directory: Path) -> int:
    """Members of a saved ensemble, of adapters or of heads; 1 for a single reward model. No model is built."""
    if (members := read_members(directory)) is not None:
        return len(members)
    return score_rows(directory) if is_adapter(directory) else score_outputs(read_config(directory))


def _is_encoder(directory: Path) -> bool:
    """True for an encoder, which has one score for the text and none per token."""
    if read_members(directory) is not None or is_adapter(directory):
        return False
    family = FAMILIES.get(str(read_config(directory).get("model_type")))
    return family is not None and "scalar" in family.tasks and family.tasks["scalar"].head is not None


def _ensemble(folders: list[Path], bases: SharedWeights, device: str | torch.device) -> AdapterEnsemble:
    """The members of an ensemble of adapters over one base, which is read once; nothing trains."""
    models = []
    for folder in folders:
        base = _load_reward_base(str(folder), folder, bases.scalar_model).to(device)
        models.append(load_adapter(base, folder).requires_grad_(False))
    return AdapterEnsemble(models).eval()


def _load_reward_base(source: str, directory: Path, load: Load) -> Any:
    """The scalar model of a reward model's directory, or of the base of its adapter, which is still to be loaded."""
    if is_adapter(directory):
        if not is_scalar_adapter(directory):
            raise UserError(
                f"{source}: this adapter belongs to a policy and has no score head; give a reward model's directory"
            )
        return load(find_base(directory), new_head="zero", members=score_rows(directory))
    # Refused by its class, before the error about a missing head tensor would come.
    architecture = str((read_config(directory).get("architectures") or [""])[0])
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise UserError(
            f"{source}: this is no reward model but a language model ({architecture}) without a score head; train one "
            f"from it with `alignment reward CONFIG policy={source}`"
        )
    return load(directory)


def _with_files(model: Network, source: str, directory: Path, combine: Combine, std_coef: float) -> RewardModel:
    """The model with its tokenizer and the files beside the weights, its canaries checked."""
    saved = read_canaries(directory)
    loss = None if saved is None else saved.loss
    loaded = RewardModel(model, load_tokenizer(source), read_calibration(directory), combine, std_coef, loss)
    check_canaries(loaded, directory, source)
    return loaded

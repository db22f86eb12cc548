"""Hugging Face directory <-> our state dict, both ways, strict, safetensors only. Tokenizers and adapters are not here.

Strict: every tensor is consumed, every parameter found, every config key understood; anything else is refused by name.
How one file tensor becomes several of ours and back is in layout.py.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment.errors import UserError, raise_all
from alignment.files import write_atomic, write_json
from alignment.models.build import empty_model
from alignment.models.classifiers import ScalarModel
from alignment.models.external.load import is_external, load_external, save_external
from alignment.models.external.models import ExternalScalarModel
from alignment.models.families import FAMILIES, family_of, is_external_type
from alignment.models.families.family import Family
from alignment.models.huggingface.generation_config import read_generation_config, write_generation_config
from alignment.models.huggingface.legacy_names import drop_other_heads, drop_tied_copy, in_trunk, rename_legacy_keys
from alignment.models.huggingface.weight_map import HFLocation, from_hf, map_weights, to_hf
from alignment.models.init_weights import initialize_layer
from alignment.models.safetensors_files import CONFIG, WEIGHTS, check_sizes, read_config, read_shapes, read_state_dict


def load_language_model(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Any:
    """The language model of a Hugging Face directory, in eval mode; see `load_pretrained`."""
    return load_pretrained(directory, "language", dtype, device)


def load_scalar_model(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    new_head: Literal["normal", "zero"] | None = None,
) -> ScalarModel | ExternalScalarModel:
    """The scalar model (reward or value) of a Hugging Face directory, in eval mode.

    Args:
        new_head: None: the head must be in the file. "normal" or "zero": whatever head the file has, a language head
            commonly, is left aside and a new one made; "normal" has standard deviation 1 / sqrt(D + 1).

    Raises:
        UserError: as for `load_pretrained`; also where the head is missing, or an encoder's, which has one number for a
            whole text and none per token.

    Source: the initial deviation is Stiennon et al. 2020, arXiv:2009.01325, appendix B.1.
    """
    model = load_pretrained(directory, "scalar", dtype, device, new_head=new_head is not None)
    if not isinstance(model, ScalarModel | ExternalScalarModel):
        raise UserError(
            f"{directory}: an encoder scores whole texts (alignment.load_reward_model does), while training and values "
            "need a number at every token; take a decoder"
        )
    if new_head == "zero":
        nn.init.zeros_(model.head.weight)
    if new_head == "normal":
        nn.init.normal_(model.head.weight, std=(model.head.in_features + 1) ** -0.5)
    return model


def load_pretrained(
    directory: str | Path,
    task: str = "language",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    new_head: bool = False,
    config: dict[str, Any] | None = None,
) -> Any:
    """The model of a Hugging Face directory, in eval mode; `model.train()` turns its dropout on.

    A `model_type` without a table of ours is opened through transformers' own class (`model.source` says which).

    Args:
        task: language, scalar, next_sentence, sequence, tokens or span, as far as the family has it.
        new_head: leave the file's heads aside, whichever they are, and draw a new one.
        config: changes to config.json, for example the number of labels of a new head.

    Raises:
        UserError: naming every missing, unexpected or misshapen tensor and every unknown config key.
    """
    directory = Path(directory)
    filed = read_config(directory)
    if is_external_type(filed):
        return load_external(directory, task, dtype, device, new_head=new_head, config=config)
    check_sizes(directory, filed, read_shapes(directory))
    tensors = read_state_dict(directory)
    family, model = _empty(directory, {**filed, **(config or {})}, tensors, task)
    places = hf_names(model)
    needed = {place.name for place in places.values()}
    tensors = rename_legacy_keys(tensors, family, task, needed)
    tensors = drop_other_heads(tensors, family, task, new_head, places)
    aliases = _aliases(model)
    for alias, original in aliases.items():
        copy = places.pop(alias)
        drop_tied_copy(tensors, copy.name, places[original].name, directory)
    for name, original in family.copies:
        if name not in needed and original in needed:
            drop_tied_copy(tensors, name, original, directory)
    fresh = {
        name: place for name, place in places.items() if new_head and not in_trunk(name) and place.name not in tensors
    }
    wanted = {name: place for name, place in places.items() if name not in fresh}
    shapes = _expected_shapes(model, wanted)
    zeros = {name for name in family.zeros if name in shapes and name not in tensors}
    raise_all(f"{directory}: {problem}" for problem in _problems(tensors, shapes, zeros))
    tensors |= {name: torch.zeros(shapes[name]) for name in zeros}
    state = {name: x.to(dtype=dtype, device=device) for name, x in from_hf(tensors, wanted).items()}
    _assign(model, state, aliases)
    if new_head:
        _draw_heads(model, fresh, dtype, device)
    if hasattr(model, "new_cache"):
        model.generation_config = read_generation_config(directory)
    return model.eval()


def _empty(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], task: str) -> tuple[Family, Any]:
    """The family and a model without memory behind it: every weight comes from the file."""
    try:
        family = family_of(config)
        with torch.device("meta"):
            return family, empty_model(family.as_filed(config, tensors), task)
    except UserError as error:
        lines = str(error).split("\n")
        raise UserError(
            "\n".join(f"{directory}/{line}" if line.startswith(CONFIG) else line for line in lines)
        ) from error
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise UserError(f"{directory}/{CONFIG}: no model can be of these sizes ({error})") from error


def save_model(model: Any, directory: str | Path, *, state: dict[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors so that plain transformers opens them, and any generation_config.json.

    Args:
        state: our-named full state dict, where the live model is sharded; None: the model's own.

    Raises:
        ValueError: the state has parameters the architecture does not have (an adapter still attached) or lacks some.
    """
    if is_external(model):
        return save_external(model, directory, state=state)
    live: dict[str, Tensor] = model.state_dict() if state is None else state
    places = hf_names(model)
    expected = set(places) - set(_aliases(model))
    extra = set(live) - set(places)
    if extra or not expected <= set(live):
        raise ValueError(
            f"the state does not fit the architecture: missing {sorted(expected - set(live))}, "
            f"unexpected {sorted(extra)}; merge or detach adapters before saving"
        )
    tensors = to_hf({name: live[name].cpu() for name in expected}, places)
    directory = Path(directory)
    config = _config_to_save(model, next(iter(tensors.values())).dtype)
    write_atomic(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_generation_config(model, directory)
    write_json(directory / CONFIG, config)


def hf_names(model: Any) -> dict[str, HFLocation]:
    """Every parameter of the architecture, by our name, with its place in a Hugging Face file.

    An attached prefix or adapter is no part of the architecture and is not listed.
    """
    family = family_of(model.config)
    with torch.device("meta"):
        bare = empty_model(model.config, model.task)
    shapes = {name: parameter.shape for name, parameter in bare.state_dict().items()}
    prefix, usual = family.prefix(model.task), family.trunk_prefix
    lines = (*family.names, *family.renamed(model.config))
    trunk = ((prefix + hf.removeprefix(usual) if hf.startswith(usual) else hf, ours) for hf, ours in lines)
    return map_weights(shapes, (*trunk, *family.tasks[model.task].names), family, bare.spec)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another one once more -> that one's name.

    By identity, not by what a config once said: the two may have been parted since.
    """
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            aliases[name] = original
    return aliases


def _assign(model: nn.Module, state: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Give parameters without memory their tensors; shared ones stay shared."""
    model.load_state_dict(state, assign=True, strict=False)
    for alias, original in aliases.items():
        owner, _, leaf = alias.rpartition(".")
        if original in state:
            setattr(model.get_submodule(owner), leaf, model.get_parameter(original))


def _draw_heads(model: Any, fresh: Iterable[str], dtype: torch.dtype, device: str | torch.device) -> None:
    """Fresh weights for what is not in the trunk."""
    init = getattr(model.spec, "decoder", model.spec).init
    for owner in sorted({name.rpartition(".")[0] for name in fresh}):
        module = model.get_submodule(owner)
        kept = {name: x for name, x in module.named_parameters(recurse=False) if not x.is_meta}
        module.to_empty(device=device, recurse=False).to(dtype)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        else:
            initialize_layer(module, init, owner)
        for name, parameter in kept.items():
            setattr(module, name, parameter)


def _expected_shapes(model: nn.Module, places: dict[str, HFLocation]) -> dict[str, torch.Size]:
    """Shapes as the file should have them, by the file's names."""
    meta = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name in places}
    return {name: tensor.shape for name, tensor in to_hf(meta, places).items()}


def _problems(tensors: dict[str, Tensor], shapes: dict[str, torch.Size], zeros: set[str]) -> Iterable[str]:
    yield from (f"tensor {name} is missing" for name in sorted(shapes.keys() - tensors.keys() - zeros))
    yield from (f"unexpected tensor {name}" for name in sorted(tensors.keys() - shapes.keys()))
    for name in sorted(shapes.keys() & tensors.keys()):
        if tensors[name].shape != shapes[name]:
            yield f"tensor {name} has shape {tuple(tensors[name].shape)}, the config asks for {tuple(shapes[name])}"


def _config_to_save(model: Any, dtype: torch.dtype) -> dict[str, Any]:
    task = FAMILIES[model.config["model_type"]].tasks[model.task]
    config = {key: value for key, value in model.config.items() if key not in ("torch_dtype", "_name_or_path")}
    vocabulary = (model.encoder if hasattr(model, "encoder") else model.trunk).embed.num_embeddings
    config |= {"dtype": str(dtype).removeprefix("torch."), "vocab_size": vocabulary, "architectures": [task.hf_class]}
    if isinstance(model, ScalarModel):
        return config | {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    if task.readout is None or model.task == "span":  # neither has classes: an answer's start and end are fixed
        for key in ("num_labels", "id2label", "label2id"):
            config.pop(key, None)
    return config if task.readout else config | {"tie_word_embeddings": "head.weight" in _aliases(model)}

"""Models loaded from and saved to Hugging Face directories, safetensors only.

Loading is strict: every tensor of the file is used, every parameter is found and every config key is understood;
anything else is an error that names it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alignment.errors import UserError, raise_all
from alignment.files import byte_count, write_json
from alignment.models.build import empty_model
from alignment.models.classifiers import ScalarModel
from alignment.models.external.load import load_external, save_external
from alignment.models.external.models import ExternalModel, ExternalScalarModel
from alignment.models.families import FAMILIES, family_of, is_external_type
from alignment.models.families.family import Family
from alignment.models.heads import NO_LANGUAGE_MODEL, check_score_labels, score_labels
from alignment.models.huggingface.weight_map import (
    HFLocation,
    StoredParameter,
    drop_tied_copy,
    in_trunk,
    map_weights,
    placeholder,
    present_names,
    stored_parameter,
    stream_to_hf,
    to_hf,
    without_heads,
)
from alignment.models.init_weights import initialize_layer
from alignment.models.model import Model
from alignment.models.native_model import NativeModel
from alignment.models.safetensors_files import (
    CONFIG,
    HFConfig,
    StoredTensor,
    check_sizes,
    read_config,
    read_generation_config,
    stored_tensors,
    write_generation_config,
    write_weights,
)
from alignment.models.transformer import Transformer

MAX_SHARD_SIZE = "5GB"  # of a file of weights, as transformers had it for long


def load_language_model(
    directory: str | Path, dtype: torch.dtype | None = torch.float32, device: str | torch.device = "cpu"
) -> Any:
    """Load the language model of a Hugging Face directory in eval mode; errors as in `load_pretrained`."""
    return load_pretrained(directory, "language", dtype, device)


def load_scalar_model(
    directory: str | Path,
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
    new_head: Literal["normal", "zero"] | None = None,
    members: int = 1,
) -> ScalarModel | ExternalScalarModel:
    """Load the scalar model (reward or value) of a Hugging Face directory in eval mode.

    The file must contain the head; with `new_head` its head, usually a language head, is dropped and a new one of
    `members` outputs (those of an ensemble) drawn; see `draw_score_head`. UserError as in `load_pretrained`, and for an
    encoder.
    """
    labels = None if new_head is None else score_labels(members)
    model = load_pretrained(directory, "scalar", dtype, device, new_head=new_head is not None, config=labels)
    if not isinstance(model, ScalarModel | ExternalScalarModel):
        raise UserError(
            f"{directory}: an encoder scores whole texts (alignment.load_reward_model does), while training and values "
            "need a number at every token; take a decoder"
        )
    if new_head is not None:
        draw_score_head(model.head, new_head)
    return model


def draw_score_head(head: nn.Linear, kind: Literal["normal", "zero"]) -> None:
    """Fill a new score head [k, D] with standard deviation 1 / sqrt(D + 1), or with zeros.

    Source: Stiennon et al. 2020, arXiv:2009.01325, appendix B.1.
    """
    if kind == "zero":
        nn.init.zeros_(head.weight)
    else:
        nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)


def load_pretrained(
    directory: str | Path,
    task: str = "language",
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
    *,
    new_head: bool = False,
    config: HFConfig | None = None,
) -> Any:
    """Load the model of a Hugging Face directory in eval mode, one without a family of ours by transformers' own class.

    Args:
        directory: a local model directory.
        task: language, scalar, next_sentence, sequence, tokens or span, if the family has it.
        dtype: type of the weights; None: that of each tensor in the file, float32 for a new head.
        device: of the weights. One tensor of the file is read at a time. "meta": none is read, and every parameter of
            the file is a placeholder that knows where its data lies (see weight_map.py), so that each process
            can read its own part; a model of transformers' own class is read all the same, to the CPU.
        new_head: drop the file's heads and create a new one.
        config: changes to config.json, for example the number of labels of a new head.

    Raises:
        UserError: naming every missing, unexpected or misshapen tensor and every unknown config key.
    """
    directory = Path(directory)
    stored = read_config(directory)
    if task == "scalar" and not new_head:
        check_score_labels(stored, directory)
    if is_external_type(stored):
        return load_external(directory, task, dtype, _real(device), new_head=new_head, config=config)
    tensors = stored_tensors(directory)
    check_sizes(directory, stored, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    family, model = _empty_model(directory, {**stored, **(config or {})}, tensors, task)
    locations = hf_locations(model)
    needed = {location.name for location in locations.values()}
    tensors = present_names(tensors, family, task, needed)
    if new_head:
        tensors = without_heads(tensors, family, task, locations)
    aliases = _aliases(model)
    copies = [(locations.pop(alias).name, locations[original].name) for alias, original in aliases.items()]
    copies += [(copy, original) for copy, original in family.tied_copies if copy not in needed and original in needed]
    for copy, original in copies:
        drop_tied_copy(tensors, copy, original, directory)
    new = {
        name for name, location in locations.items() if new_head and not in_trunk(name) and location.name not in tensors
    }
    locations = {name: location for name, location in locations.items() if name not in new}
    meta = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name in locations}
    shapes = {name: tensor.shape for name, tensor in to_hf(meta, locations).items()}
    _check_tensors(directory, tensors, shapes, family)
    sources = {
        name: stored_parameter(tensors[location.name], location, dtype) if location.name in tensors else None
        for name, location in locations.items()
    }
    _fill(model, sources, aliases, dtype or torch.float32, device)
    _initialize(model, new, dtype or torch.float32, _real(device))
    if hasattr(model, "new_cache"):
        model.generation_config = read_generation_config(directory)
    return model.eval()


def _empty_model(directory: Path, config: HFConfig, tensors: dict[str, StoredTensor], task: str) -> tuple[Family, Any]:
    """The family and its model on the meta device, without memory for the weights."""
    try:
        family = family_of(config)
        with torch.device("meta"):
            return family, empty_model(family.config_from_tensors(config, tensors), task)
    except UserError as error:
        lines = str(error).split("\n")
        raise UserError(
            "\n".join(f"{directory}/{line}" if line.startswith(CONFIG) else line for line in lines)
        ) from error
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise UserError(f"{directory}/{CONFIG}: no model can be of these sizes ({error})") from error


def save_model(
    model: Model,
    directory: str | Path,
    *,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write weights, any generation_config.json and, last, config.json so that plain transformers can load them.

    The weights are model.safetensors, or shards and an index where they are larger than `max_shard_size`.

    Args:
        tensors: the weights of a sharded model by our names, one at a time, in any order; in that of `saved_names` at
            most one shard of them is held. None: the model's own.
        max_shard_size: such as "5GB" or "500MB".

    Raises:
        ValueError: the tensors lack parameters of the architecture or have others (an adapter is still attached).
    """
    if isinstance(model, ExternalModel):
        return save_external(model, directory, tensors=tensors, max_shard_size=max_shard_size)
    locations = hf_locations(model)
    names = saved_names(model)
    if tensors is None:
        state: dict[str, Tensor] = model.state_dict()
        _check_names(set(names) - state.keys(), state.keys() - locations.keys())
        tensors = ((name, state[name].detach().cpu()) for name in names)
    directory = Path(directory)
    config = _config_to_save(model)  # before it is written to: a wrong config leaves no half of a model
    whole = stream_to_hf(_checked(tensors, names, locations), {name: locations[name] for name in names})
    dtype = write_weights(whole, directory, byte_count(max_shard_size))
    write_generation_config(model.generation_config, directory)
    write_json(directory / CONFIG, config | {"dtype": str(dtype).removeprefix("torch.")})


def saved_names(model: Model) -> list[str]:
    """State dict names of the tensors that `save_model` writes; parts of one file tensor follow each other."""
    if isinstance(model, ExternalModel):
        return list(model.state_dict())
    aliases = _aliases(model)
    by_file_name = {}
    for name, location in hf_locations(model).items():
        if name not in aliases:
            by_file_name.setdefault(location.name, []).append(name)
    return [name for names in by_file_name.values() for name in names]


def _checked(
    tensors: Iterable[tuple[str, Tensor]], names: Iterable[str], locations: dict[str, HFLocation]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, which must be all of `names`; second names of shared parameters may be among them."""
    missing = set(names)
    for name, tensor in tensors:
        _check_names((), {name} - locations.keys())
        missing.discard(name)
        yield name, tensor
    _check_names(missing, ())


def _check_names(missing: Iterable[str], extra: Iterable[str]) -> None:
    if missing or extra:
        raise ValueError(
            f"the state does not fit the architecture: missing {sorted(missing)}, unexpected {sorted(extra)}; merge or "
            "detach adapters before saving"
        )


def hf_locations(model: Model) -> dict[str, HFLocation]:
    """The location of each parameter of the architecture, without adapters, in a Hugging Face file, by our name."""
    family = family_of(model.config)
    with torch.device("meta"):
        base = empty_model(model.config, model.task)
    shapes = {name: parameter.shape for name, parameter in base.state_dict().items()}
    prefix = family.prefix(model.task)
    usual = family.trunk_prefix
    trunk = (
        (prefix + hf.removeprefix(usual) if hf.startswith(usual) else hf, ours)
        for hf, ours in (*family.names, *family.names_from_config(family.values(model.config)))
    )
    return map_weights(shapes, (*trunk, *family.tasks[model.task].names), family, base.spec)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Second names of shared parameters -> their first name.

    Sharing is seen by identity and not by the config, since a model may have been untied after loading.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(names.items())}
    return {name: first[id(parameter)] for name, parameter in names.items() if first[id(parameter)] != name}


def _fill(
    model: nn.Module,
    sources: dict[str, StoredParameter | None],
    aliases: dict[str, str],
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    """Put tensors in place of those on the meta device, one read at a time; shared parameters stay shared.

    A source of None is zero, in `dtype`; the device "meta" leaves parameters unread.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    unread = {name for name, _ in model.named_parameters()} if str(device) == "meta" else set()
    state: dict[str, Tensor] = {}
    for name, source in sources.items():
        if source is None:
            state[name] = torch.zeros(shapes[name], dtype=dtype, device=_real(device))
        else:
            state[name] = placeholder(shapes[name], source.dtype) if name in unread else source.read(_real(device))
    model.load_state_dict(state, assign=True, strict=False)
    for name in unread:
        if sources.get(name) is not None:
            model.get_parameter(name).stored = sources[name]  # type: ignore[attr-defined]
    for alias, original in aliases.items():
        owner, _, leaf = alias.rpartition(".")
        if original in state:
            setattr(model.get_submodule(owner), leaf, model.get_parameter(original))


def _real(device: str | torch.device) -> str | torch.device:
    """The device of tensors that are read or made in any case."""
    return "cpu" if str(device) == "meta" else device


def _initialize(model: NativeModel, names: Iterable[str], dtype: torch.dtype, device: str | torch.device) -> None:
    """Initialize the modules of the named parameters, the parameters of a new head."""
    for owner in sorted({name.rpartition(".")[0] for name in names}):
        module = model.get_submodule(owner)
        loaded = {name: x for name, x in module.named_parameters(recurse=False) if not x.is_meta}
        module.to_empty(device=device, recurse=False).to(dtype)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        else:
            initialize_layer(module, model.spec.init, owner)
        for name, parameter in loaded.items():
            setattr(module, name, parameter)


def _check_tensors(
    directory: Path, tensors: dict[str, StoredTensor], shapes: dict[str, torch.Size], family: Family
) -> None:
    """Refuse, by name, unexpected and misshapen tensors, and missing ones that the family does not let a file omit."""
    if "score.weight" in tensors.keys() - shapes.keys():
        raise UserError(f"{directory}: {NO_LANGUAGE_MODEL}")
    missing = shapes.keys() - tensors.keys() - set(family.zeros_if_missing)
    problems = [f"{directory}: tensor {name} is missing" for name in sorted(missing)]
    problems += [f"{directory}: unexpected tensor {name}" for name in sorted(tensors.keys() - shapes.keys())]
    problems += [
        f"{directory}: tensor {name} has shape {tuple(tensors[name].shape)}, the config asks for {tuple(shapes[name])}"
        for name in sorted(shapes.keys() & tensors.keys())
        if tensors[name].shape != shapes[name]
    ]
    raise_all(problems)


def _config_to_save(model: Model) -> HFConfig:
    """config.json of a saved model: its config with the class and sizes of the weights, their type left open."""
    task = FAMILIES[model.config["model_type"]].tasks[model.task]
    config = {key: value for key, value in model.config.items() if key not in ("torch_dtype", "_name_or_path")}
    vocabulary = next(x for x in model.children() if isinstance(x, Transformer)).embed.num_embeddings
    config |= {"dtype": None, "vocab_size": vocabulary, "architectures": [task.hf_class]}
    if isinstance(model, ScalarModel):
        return config | score_labels(model.head.out_features)
    if task.head is None or model.task == "span":  # a span head has two fixed outputs and no classes
        for key in ("num_labels", "id2label", "label2id"):
            config.pop(key, None)
    return config if task.head else config | {"tie_word_embeddings": "head.weight" in _aliases(model)}

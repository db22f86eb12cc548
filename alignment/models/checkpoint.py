"""Hugging Face directory <-> our state dict, both ways, strict, safetensors only. Tokenizers and adapters are not here.

Strict: every tensor is consumed, every parameter found, every config key understood; anything else is refused by name.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment.errors import UserError, raise_all
from alignment.files import write_atomic, write_json
from alignment.models.build import empty_model
from alignment.models.directory import CONFIG, WEIGHTS, read_config, read_tensors
from alignment.models.families import family_of
from alignment.models.families.family import Family
from alignment.models.heads import LanguageModel, ScalarModel


class Place(NamedTuple):
    """Where a parameter of ours lives in a Hugging Face file.

    Attributes:
        name: of the tensor there.
        part, parts: this parameter is slice `part` of `parts` along its output axis.
        transposed: the matrix is stored [in, out].
    """

    name: str
    part: int = 0
    parts: int = 1
    transposed: bool = False


def load_language_model(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LanguageModel:
    """The language model of a Hugging Face directory, in eval mode; `model.train()` turns its dropout on.

    Raises:
        UserError: naming every missing, unexpected or misshapen tensor and every unknown config key.
    """
    directory = Path(directory)
    model = _empty(LanguageModel, directory)
    family = family_of(model.config)
    tensors = _read_trunk_names(directory, family)
    if model.spec.tied_head:
        _drop_tied_copy(tensors, family, directory)
    _fill(model, tensors, directory, dtype, device)
    return model


def load_scalar_model(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    new_head: Literal["normal", "zero"] | None = None,
) -> ScalarModel:
    """The scalar model (reward or value) of a Hugging Face directory, in eval mode.

    Args:
        new_head: None: the head must be in the file. "normal" or "zero": whatever head the file has, a language head
            commonly, is left aside and a new one made; "normal" has standard deviation 1 / sqrt(D + 1).

    Raises:
        UserError: as for `load_language_model`; also where the head is missing.

    Source: the initial deviation is Stiennon et al. 2020, arXiv:2009.01325, appendix B.1.
    """
    directory = Path(directory)
    model = _empty(ScalarModel, directory)
    family = family_of(model.config)
    tensors = _read_trunk_names(directory, family)
    if new_head is not None:
        for head in (family.language_head, family.scalar_head):
            tensors.pop(head, None)
        weight = torch.zeros(1, model.spec.width)
        if new_head == "normal":
            nn.init.normal_(weight, std=(model.spec.width + 1) ** -0.5)
        tensors[family.scalar_head] = weight
    _fill(model, tensors, directory, dtype, device)
    return model


def save_model(
    model: LanguageModel | ScalarModel, directory: str | Path, *, state: dict[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors so that plain transformers opens them.

    Args:
        state: our-named full state dict, where the live model is sharded; None: the model's own.

    Raises:
        ValueError: the state has parameters the architecture does not have (an adapter still attached) or lacks some.
    """
    state = model.state_dict() if state is None else state
    places = hf_names(model)
    tied = _head_is_tied(model)
    expected = set(places) - ({"head.weight"} if tied else set())
    extra = set(state) - set(places)
    if extra or not expected <= set(state):
        raise ValueError(
            f"the state does not fit the architecture: missing {sorted(expected - set(state))}, "
            f"unexpected {sorted(extra)}; merge or detach adapters before saving"
        )
    tensors = to_hf({name: state[name].cpu() for name in expected}, places)
    directory = Path(directory)
    config = _config_to_save(model, tied, next(iter(tensors.values())).dtype)
    write_atomic(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_json(directory / CONFIG, config)


def hf_names(model: LanguageModel | ScalarModel) -> dict[str, Place]:
    """Every parameter of the architecture, by our name, with its place in a Hugging Face file.

    An attached prefix or adapter is no part of the architecture and is not listed.
    """
    family = family_of(model.config)
    head = family.scalar_head if isinstance(model, ScalarModel) else family.language_head
    places = {"head.weight": Place(head)}
    for hf, ours in family.names:
        parts = (ours,) if isinstance(ours, str) else ours
        transposed = hf.endswith(family.transposed)
        for layer in range(len(model.spec.blocks)) if "{}" in hf else (0,):
            for part, name in enumerate(parts):
                places[name.format(layer)] = Place(hf.format(layer), part, len(parts), transposed)
    with torch.device("meta"):
        present = empty_model(type(model), model.config).state_dict()
    return {name: place for name, place in places.items() if name in present}


def to_hf(state: dict[str, Tensor], places: dict[str, Place]) -> dict[str, Tensor]:
    """Our tensors under Hugging Face's names: slices joined, matrices turned where the family stores them so."""
    slices: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        slices.setdefault(places[name].name, {})[places[name].part] = tensor.detach()
    transposed = {place.name for place in places.values() if place.transposed}
    joined = {name: torch.cat([parts[i] for i in range(len(parts))]) for name, parts in slices.items()}
    return {name: (tensor.T if name in transposed else tensor).contiguous() for name, tensor in joined.items()}


def from_hf(tensors: dict[str, Tensor], places: dict[str, Place]) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names; the inverse of `to_hf`."""
    state = {}
    for name, place in places.items():
        tensor = tensors[place.name].T if place.transposed else tensors[place.name]
        state[name] = tensor.chunk(place.parts)[place.part].clone(memory_format=torch.contiguous_format)
    return state


def _empty(kind: Callable[..., Any], directory: Path) -> Any:
    """A model without memory behind it: every weight comes from the file."""
    config = read_config(directory)
    with torch.device("meta"):
        return empty_model(kind, config)


def _read_trunk_names(directory: Path, family: Family) -> dict[str, Tensor]:
    """The file's weights, as a file with a head would name them; buffers of older files left out."""
    tensors = read_tensors(directory)
    tensors = {name: x for name, x in tensors.items() if not any(re.fullmatch(p, name) for p in family.ignored)}
    heads = (family.language_head, family.scalar_head)
    if any(name.startswith(family.trunk_prefix) for name in tensors):
        return tensors
    return {name if name in heads else family.trunk_prefix + name: x for name, x in tensors.items()}


def _drop_tied_copy(tensors: dict[str, Tensor], family: Family, directory: Path) -> None:
    """A tied model's file may hold the head once more; it must then be the embedding."""
    copy = tensors.pop(family.language_head, None)
    embedding = tensors.get(family.names[0][0])
    if copy is not None and embedding is not None and not torch.equal(copy, embedding):
        raise UserError(
            f"{directory}: config.json says tie_word_embeddings, but {family.language_head} differs from "
            f"{family.names[0][0]}; one of the two is wrong"
        )


def _fill(
    model: LanguageModel | ScalarModel,
    tensors: dict[str, Tensor],
    directory: Path,
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    """Give every parameter of a model without memory its tensor, or refuse."""
    places = hf_names(model)
    tied = isinstance(model, LanguageModel) and model.spec.tied_head
    if tied:
        del places["head.weight"]
    shapes = _expected_shapes(model, places)
    raise_all(f"{directory}: {problem}" for problem in _problems(tensors, shapes))
    state = {name: x.to(dtype=dtype, device=device) for name, x in from_hf(tensors, places).items()}
    if tied:
        state["head.weight"] = state["trunk.embed.weight"]
    model.load_state_dict(state, assign=True)
    if tied:
        model.head.weight = model.trunk.embed.weight
    model.eval()


def _expected_shapes(model: nn.Module, places: dict[str, Place]) -> dict[str, torch.Size]:
    """Shapes as the file should have them, by the file's names."""
    meta = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name in places}
    return {name: tensor.shape for name, tensor in to_hf(meta, places).items()}


def _problems(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> Iterable[str]:
    yield from (f"tensor {name} is missing" for name in sorted(shapes.keys() - tensors.keys()))
    yield from (f"unexpected tensor {name}" for name in sorted(tensors.keys() - shapes.keys()))
    for name in sorted(shapes.keys() & tensors.keys()):
        if tensors[name].shape != shapes[name]:
            yield f"tensor {name} has shape {tuple(tensors[name].shape)}, the config asks for {tuple(shapes[name])}"


def _head_is_tied(model: LanguageModel | ScalarModel) -> bool:
    """By identity, not by what a config once said: the two may have been parted since."""
    return isinstance(model, LanguageModel) and model.head.weight is model.trunk.embed.weight


def _config_to_save(model: LanguageModel | ScalarModel, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    family = family_of(model.config)
    config = {key: value for key, value in model.config.items() if key not in ("torch_dtype", "_name_or_path")}
    config |= {"dtype": str(dtype).removeprefix("torch."), "vocab_size": model.trunk.embed.num_embeddings}
    if isinstance(model, ScalarModel):
        config |= {"architectures": [family.scalar_class], "num_labels": 1}
        return config | {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    for key in ("num_labels", "id2label", "label2id"):
        config.pop(key, None)
    return config | {"architectures": [family.language_class], "tie_word_embeddings": tied}

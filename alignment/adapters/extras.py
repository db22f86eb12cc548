"""What an adapter trains beside its own weights: rows of the token embedding, and further modules as a whole.

The model's own weights stay as they are: the rows and modules are copies that take their place while the adapter acts.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.adapters.layer_names import BEFORE, INNER
from alignment.errors import UserError
from alignment.models.classifiers import ScalarModel
from alignment.models.external.models import ExternalModel, ExternalScalarModel
from alignment.models.heads import LanguageHead
from alignment.models.huggingface.checkpoint import hf_locations
from alignment.models.huggingface.weight_map import HFLocation, cut, to_hf
from alignment.models.native_model import NativeModel

if TYPE_CHECKING:
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

AnyModel = NativeModel[Any] | ExternalModel
ROWS, COPY = "token_rows.rows", ".modules_to_save.default."
ROWS_IN_FILE = ".token_adapter.trainable_tokens_delta"


class TokenRows(nn.Module):
    """Trained rows of the token embedding, and of a language head tied to it.

    Attributes:
        rows: fp32, [n, D].
        ids: token of each row, [n].
        slots: token id -> its row, -1 where it has none, [V].
        enabled: whether the rows act.
    """

    ids: Tensor
    slots: Tensor

    def __init__(self, weight: Tensor, tokens: tuple[int, ...]):
        super().__init__()
        ids = torch.tensor(tokens, device=weight.device)
        slots = torch.full((len(weight),), -1, device=weight.device)
        slots[ids] = torch.arange(len(tokens), device=weight.device)
        self.rows = nn.Parameter(weight.detach()[ids].float())
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("slots", slots, persistent=False)
        self.enabled = True
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []

    def forward(self) -> Tensor:
        """The rows, [n, D]."""
        return self.rows


def _replace_vectors(rows: TokenRows, embedding: nn.Module, args: tuple[Tensor, ...], vectors: Tensor) -> Tensor:
    """Token vectors [..., D] with the trained ones in place of the embedding's own: a hook of the embedding."""
    if not rows.enabled:
        return vectors
    slots = rows.slots[args[0]]
    scale = getattr(embedding, "embed_scale", 1.0)  # some classes of transformers multiply in the embedding
    trained = (F.embedding(slots.clamp(min=0), rows()) * scale).to(vectors.dtype)
    return torch.where((slots >= 0)[..., None], trained, vectors)


def _replace_logits(rows: TokenRows, head: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
    """Logits [..., V] where the trained rows give the logits of their tokens: a hook of a tied head."""
    if not rows.enabled:
        return logits
    x, bias = args[0], getattr(head, "bias", None)
    cap = None
    if isinstance(head, LanguageHead):
        x = (x if head.transform is None else head.transform(x)) * head.spec.scale
        cap = head.spec.softcap
    trained = F.linear(x, rows().to(x.dtype), None if bias is None else bias[rows.ids].to(x.dtype))
    if isinstance(head, LanguageHead) and head.offset is not None:
        trained = trained + head.offset[0, rows.ids]
    trained = trained if cap is None else cap * torch.tanh(trained / cap)
    return logits.index_copy(-1, rows.ids, trained.to(logits.dtype))


def attach_extras(model: nn.Module, modules_to_save: tuple[str, ...], tokens: tuple[int, ...] = ()) -> None:
    """Add the trained modules and rows of an adapter's settings to a model that is frozen.

    Raises:
        UserError: a token id has no row, a name names no module, or the file could not hold the module alone.
    """
    if not tokens and not modules_to_save:
        return
    if not isinstance(model, NativeModel | ExternalModel):
        raise UserError("adapter.token_rows and adapter.modules_to_save are not there for a model with two heads")
    _wrap_modules(model, modules_to_save)
    if tokens:
        embedding = _embedding(model)
        if not isinstance(embedding, nn.Embedding):
            raise UserError(
                "adapter.token_rows: adapter.modules_to_save already trains the whole embedding; leave one of them out"
            )
        if max(tokens) >= len(embedding.weight):
            raise UserError(
                f"adapter.token_rows: there is no row for token {max(tokens)}, only {len(embedding.weight)} rows"
            )
        model.token_rows = rows = TokenRows(embedding.weight, tokens)
        _hook_rows(model, rows, embedding.weight)


def _hook_rows(model: nn.Module, rows: TokenRows, weight: Tensor) -> None:
    """Let the rows act wherever the embedding's weight is used."""
    for module in list(model.modules()):
        if getattr(module, "weight", None) is weight:
            hook = _replace_vectors if isinstance(module, nn.Embedding) else _replace_logits
            rows.hooks.append(module.register_forward_hook(partial(hook, rows)))


def _embedding(model: AnyModel) -> nn.Module:
    """The token embedding."""
    if isinstance(model, ExternalModel):
        return model.inner.get_input_embeddings()
    trunk = getattr(model, "trunk", None)
    return (model.encoder if trunk is None else trunk).embed  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]


def _locations(model: AnyModel) -> dict[str, HFLocation]:
    """The location in a Hugging Face file of each weight of the model without its adapter, by our names."""
    if isinstance(model, NativeModel):
        return hf_locations(model)
    names = {}
    for name in model.state_dict():
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".").removeprefix(INNER)
        adapter = COPY in name or name == ROWS or any(f".{leaf}." in name for leaf in ("lora_A", "lora_B", "ia3_l"))
        if not adapter and "lora_" not in name:
            names[INNER + plain] = HFLocation(plain)
    return names


def _wrap_modules(model: AnyModel, wanted: tuple[str, ...]) -> None:
    """Put copies that are trained in place of the named modules.

    Raises:
        UserError: a name names no module, one with an adapter, or one that a file cannot hold alone.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    for name in dict.fromkeys(each for text in wanted for each in _modules_named(model, text)):
        module = model.get_submodule(name)
        if any(isinstance(each, BaseTunerLayer) for each in module.modules()):
            raise UserError(
                f"adapter.modules_to_save: {name} has the adapter's own weights too; leave it out of `layers`"
            )
        wrapper = ModulesToSaveWrapper(module, "default")
        wrapper.modules_to_save.float().requires_grad_(True)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, wrapper)


def _modules_named(model: AnyModel, text: str) -> list[str]:
    """Our names of the modules with weights that a name, ours or a file's, means.

    Raises:
        UserError: there is none, or a file holds only a part of what it means.
    """
    locations = _locations(model)
    owners = {name.rpartition(".")[0]: location.name.rpartition(".")[0] for name, location in locations.items()}

    def means(name: str) -> bool:
        return f".{name}".endswith(f".{text}")

    found = [ours for ours in owners if means(ours)] or [ours for ours, file_name in owners.items() if means(file_name)]
    if not found:
        raise UserError(
            f"adapter.modules_to_save: {text!r} names no module with weights of its own; such as "
            f"{', '.join(list(owners)[:3])} or {', '.join(list(owners.values())[-3:])}"
        )
    in_file = {owners[name] for name in found}
    torn = [ours for ours, file_name in owners.items() if file_name in in_file and ours not in found]
    if torn:
        raise UserError(
            f"adapter.modules_to_save: a file holds {', '.join(found)} together with {', '.join(torn)}; name "
            f"{', '.join(sorted(in_file))} instead"
        )
    return found


def wrappers(model: nn.Module) -> "dict[str, ModulesToSaveWrapper]":
    """The modules that are trained whole, by our names."""
    from peft.utils.other import ModulesToSaveWrapper

    return {name: module for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}


def token_rows(model: nn.Module) -> TokenRows | None:
    """The trained rows of a model's embedding; None where there are none."""
    return cast(TokenRows | None, getattr(model, "token_rows", None))


def is_extra_weight(name: str) -> bool:
    """Whether a name of a model's state dict is a trained row or a weight of a module trained whole."""
    return name == ROWS or COPY in name


@contextmanager
def extras_switched_off(model: nn.Module) -> Iterator[None]:
    """Let the model's own rows and modules act within the block."""
    rows = token_rows(model)
    rows_before = rows is not None and rows.enabled
    if rows is not None:
        rows.enabled = False
    try:
        with layers_switched_off(wrappers(model).values()):
            yield
    finally:
        if rows is not None:
            rows.enabled = rows_before


@contextmanager
def layers_switched_off(layers: "Iterable[IA3Layer | ModulesToSaveWrapper]") -> Iterator[None]:
    """Let the modules under peft's layers act alone within the block."""
    before = [(layer, layer._disable_adapters) for layer in layers]
    for layer, _ in before:  # peft's own switch also changes requires_grad, which sharded optimizers must not see
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was_disabled in before:
            layer._disable_adapters = was_disabled


def merge_layers(model: nn.Module, layers: "Mapping[str, LoraLayer | IA3Layer]") -> None:
    """Merge peft's layers, by name, into the weights under them, with the extras; all parameters are trainable afterwards."""
    for name, layer in layers.items():
        layer.merge(safe_merge=True)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    merge_extras(model)
    model.requires_grad_(True)


@torch.no_grad()
def merge_extras(model: nn.Module) -> None:
    """Put the trained rows and modules in the place of the model's own."""
    rows = token_rows(model)
    if rows is not None:
        assert isinstance(model, NativeModel | ExternalModel)
        weight = cast(nn.Embedding, _embedding(model)).weight
        weight[rows.ids] = rows.rows.to(weight.dtype)
        for hook in rows.hooks:
            hook.remove()
        del model.token_rows
    for name, wrapper in wrappers(model).items():
        parent, _, own = name.rpartition(".")
        trained = wrapper.modules_to_save["default"]
        for parameter, old in zip(trained.parameters(), wrapper.original_module.parameters(), strict=True):
            parameter.data = parameter.data.to(old.dtype)
        setattr(model.get_submodule(parent), own, trained)


def replace_extras(model: nn.Module, state: Mapping[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Put the trained rows and modules of a state dict into the one without the adapter."""
    for name, value in state.items():
        if COPY in name:
            own = name.replace(COPY, ".")
            plain[own] = value.to(plain[own].dtype)
    rows = token_rows(model)
    if rows is not None:
        assert isinstance(model, NativeModel | ExternalModel)
        embedding = cast(nn.Embedding, _embedding(model)).weight
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter is embedding:
                old = plain[name].cpu()
                plain[name] = old.index_copy(0, rows.ids.cpu(), state[ROWS].cpu().to(old.dtype))


@dataclass(frozen=True)
class ExtrasInFile:
    """What is trained besides, as a file holds it.

    Attributes:
        tensors: by the file's names.
        modules_to_save: names of the modules; None: none.
        token_rows: name of the embedding -> token ids; None: none.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    modules_to_save: list[str] | None = None
    token_rows: dict[str, list[int]] | None = None


def extras_to_file(model: nn.Module, state: Mapping[str, Tensor]) -> ExtrasInFile:
    """The rows' and modules' tensors in peft's format, and the options of peft's config that name them.

    Args:
        model: a model with an adapter; the score head of a scalar model is named, and its tensor left out.
        state: the weights of the adapter by our names.
    """
    rows, names = token_rows(model), ["score"] if isinstance(model, ScalarModel | ExternalScalarModel) else []
    if rows is None and not wrappers(model):
        return ExtrasInFile(modules_to_save=names or None)
    assert isinstance(model, NativeModel | ExternalModel)
    locations = _locations(model)
    plain = {name.replace(COPY, "."): value.cpu() for name, value in state.items() if COPY in name}
    tensors = {f"{BEFORE}{name}": value for name, value in to_hf(plain, locations).items()}
    names += sorted({locations[name].name.rpartition(".")[0] for name in plain})
    if rows is None:
        return ExtrasInFile(tensors, names or None)
    embedding = embedding_in_file(model)
    tensors[f"{BEFORE}{embedding}{ROWS_IN_FILE}"] = state[ROWS]
    return ExtrasInFile(tensors, names or None, {embedding: rows.ids.tolist()})


def embedding_in_file(model: AnyModel) -> str:
    """The name of the token embedding in a Hugging Face file."""
    embedding = _embedding(model)
    ours = next(name for name, module in model.named_modules() if module is embedding)
    if isinstance(model, ExternalModel):
        return ours.removeprefix(INNER)
    return hf_locations(model)[f"{ours}.weight"].name.removesuffix(".weight")


def tokens_trained(model: nn.Module) -> tuple[int, ...]:
    """The value of `token_rows` that gives a model's rows again."""
    rows = token_rows(model)
    return () if rows is None else tuple(rows.ids.tolist())


def extras_from_file(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Take the tensors of a model's rows and modules out of a file's and return them by our names."""
    found: dict[str, Tensor | None] = {}
    if token_rows(model) is None and not wrappers(model):
        return found
    assert isinstance(model, NativeModel | ExternalModel)
    if token_rows(model) is not None:
        found[ROWS] = tensors.pop(f"{BEFORE}{embedding_in_file(model)}{ROWS_IN_FILE}", None)
    locations, used = _locations(model), set()
    for name in model.state_dict():
        if COPY in name:
            location = locations[name.replace(COPY, ".")]
            used.add(f"{BEFORE}{location.name}")
            tensor = tensors.get(f"{BEFORE}{location.name}")
            found[name] = None if tensor is None else cut(tensor, location).clone()
    for name in used:
        tensors.pop(name, None)
    return found


def rows_of_config(config: Mapping[str, object], where: str) -> list[int]:
    """The token ids in `trainable_token_indices` of a file that another program wrote.

    Raises:
        UserError: it names several tables.
    """
    rows = config.get("trainable_token_indices") or []
    if isinstance(rows, dict):
        if len(rows) != 1:
            raise UserError(
                f"{where}: trainable_token_indices names {len(rows)} tables, {', '.join(rows)}; only rows of the token "
                "embedding, and of a head that is tied to it, are supported"
            )
        [rows] = rows.values()
    return rows  # pyright: ignore[reportReturnType]  # checked with the other settings


def modules_of_config(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules in `modules_to_save` of a file that another program wrote, but for the head of a reward model.

    Args:
        config: content of adapter_config.json.
        tensors: the tensors of the file; a module that it does not hold was not there either when it was written.
    """
    named = config.get("modules_to_save") or []
    held = {name.removeprefix(BEFORE).rpartition(".")[0] for name in tensors}
    modules = [module for module in sorted(held) if f".{module}".endswith(tuple(f".{name}" for name in named))]  # pyright: ignore
    return [module for module in modules if module not in ("score", "classifier")]

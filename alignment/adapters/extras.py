"""Adapters made of peft's layers: their common part, and the rows and modules that they train beside their own weights.

The model's own weights stay as they are: trained rows of the token embedding and modules that are trained as a whole
are copies that take their place while the adapter acts.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.adapters.files import CONFIG, SPEC, WEIGHTS, build_spec, read_adapter_config, read_own_settings
from alignment.adapters.layer_names import BEFORE, INNER, AnyModel, FileLayer, file_layers, layer_sizes, linear_layers
from alignment.errors import UserError, raise_all
from alignment.models.classifiers import ScalarModel
from alignment.models.external.models import ExternalModel, ExternalScalarModel, ExternalSeq2SeqModel
from alignment.models.heads import LanguageHead
from alignment.models.huggingface.checkpoint import hf_locations
from alignment.models.huggingface.weight_map import HFLocation, cut, to_hf
from alignment.models.native_model import NativeModel
from alignment.models.transformer import Transformer
from alignment.settings import search_names

DEFAULT = "default"  # peft's name of the one adapter that is trained
ROWS = "token_rows.rows"
COPY = f".modules_to_save.{DEFAULT}."
ROWS_IN_FILE = ".token_adapter.trainable_tokens_delta"
OPTIONS = {  # of peft's config, for every kind
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "fan_in_fan_out",
}

Change = tuple[object, str, object]  # an object, the name of its attribute, a value
State = dict[str, Tensor]
Spec = TypeVar("Spec")


@contextmanager
def changed(changes: Iterable[Change]) -> Iterator[None]:
    """Set attributes within the block, also when the block raises."""
    changes = list(changes)
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    for target, name, value in changes:
        setattr(target, name, value)
    try:
        yield
    finally:
        for target, name, value in before:
            setattr(target, name, value)


# Rows of the token embedding


class TokenRows(nn.Module):
    """Trained rows of the token embedding, and of a language head tied to it: fp32, [n, D]."""

    ids: Tensor  # token of each row, [n]
    slots: Tensor  # token id -> its row, -1 where it has none, [V]

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
    x = args[0]
    bias = getattr(head, "bias", None)
    ours = head if isinstance(head, LanguageHead) else None
    if ours is not None:
        x = (x if ours.transform is None else ours.transform(x)) * ours.spec.scale
    trained = F.linear(x, rows().to(x.dtype), None if bias is None else bias[rows.ids].to(x.dtype))
    if ours is not None and ours.offset is not None:
        trained = trained + ours.offset[0, rows.ids]
    if ours is not None and ours.spec.softcap is not None:
        trained = ours.spec.softcap * torch.tanh(trained / ours.spec.softcap)
    return logits.index_copy(-1, rows.ids, trained.to(logits.dtype))


def token_rows(model: nn.Module) -> TokenRows | None:
    """The trained rows of a model's embedding."""
    return cast(TokenRows | None, getattr(model, "token_rows", None))


def reading_stack(model: nn.Module) -> Transformer:
    """The stack that reads the user's text: a decoder's or encoder's trunk, the encoder of an encoder-decoder."""
    return cast(Transformer, model.get_submodule("trunk" if hasattr(model, "trunk") else "encoder"))


def _embedding(model: nn.Module) -> nn.Embedding:
    if isinstance(model, ExternalModel):
        return cast(nn.Embedding, model.inner.get_input_embeddings())
    return reading_stack(model).embed


def _train_rows(model: AnyModel, tokens: tuple[int, ...]) -> None:
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
    for module in list(model.modules()):  # the rows act wherever the embedding's weight is used, below a head's update
        shares = getattr(module, "weight", None) is embedding.weight
        if shares and any(getattr(module, "use_dora", {}).values()):
            raise UserError("adapter.token_rows: dora on a tied head takes the length of the old rows; use kind: lora")
        if shares and not hasattr(module, "base_layer"):
            hook = _replace_vectors if isinstance(module, nn.Embedding) else _replace_logits
            rows.hooks.append(module.register_forward_hook(partial(hook, rows)))


def _embedding_in_file(model: AnyModel) -> str:
    ours = next(name for name, module in model.named_modules() if module is _embedding(model))
    if isinstance(model, ExternalModel):
        return ours.removeprefix(INNER)
    return hf_locations(model)[f"{ours}.weight"].name.removesuffix(".weight")


# Modules that are trained as a whole


def wrappers(model: nn.Module) -> dict[str, Any]:
    """The modules that are trained whole, by our names."""
    from peft.utils.other import ModulesToSaveWrapper

    return {name: module for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}


def plain_name(name: str) -> str:
    """The name of a weight under an adapter as in the model without it."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _locations(model: AnyModel) -> dict[str, HFLocation]:
    """Our name of each weight of the model without its adapter -> its location in a Hugging Face file."""
    if isinstance(model, NativeModel):
        return hf_locations(model)
    names = [plain_name(name).removeprefix(INNER) for name in model.state_dict() if COPY not in name and name != ROWS]
    return {INNER + name: HFLocation(name) for name in names if ".lora_" not in name and ".ia3_l." not in name}


def _train_module(model: AnyModel, name: str) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    module = model.get_submodule(name)
    if any(isinstance(submodule, BaseTunerLayer) for submodule in module.modules()):
        raise UserError(f"adapter.modules_to_save: {name} has the adapter's own weights too; leave it out of `layers`")
    if isinstance(module, nn.Embedding) and _holders(model, nn.Embedding)[module.weight] > 1:
        raise UserError(
            f"adapter.modules_to_save: the table of {name} is one of several modules, which a file holds once; train "
            "rows of it (adapter.token_rows), or every weight of the model (leave `adapter` out)"
        )
    wrapper = ModulesToSaveWrapper(module, DEFAULT)
    wrapper.modules_to_save.float().requires_grad_(True)
    model.set_submodule(name, wrapper)


def _holders(model: nn.Module, kind: type[nn.Module] = nn.Module) -> Counter[Tensor]:
    """The number of modules of a kind that have each parameter: 2 for a token table that is also the head."""
    holders = Counter[Tensor]()
    for module in model.modules():
        if isinstance(module, kind):
            holders.update(module.parameters(recurse=False))
    return holders


def _give_own_weights(model: AnyModel, changing: Iterable[nn.Module]) -> None:
    """Copy what modules about to change share with others, and say in the config that head and table differ."""
    holders = _holders(model)
    untied = False
    for module in changing:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if holders[parameter] > 1:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
                untied = True
    # In transformers' encoder-decoders the key also ties the tables of both stacks; two tensors in the file suffice.
    if untied and not isinstance(model, ExternalSeq2SeqModel):
        model.config = model.config | {"tie_word_embeddings": False}
        if isinstance(model, ExternalModel):
            model.inner.config.tie_word_embeddings = False


def _modules_named(model: AnyModel, text: str) -> list[str]:
    """Our names of the modules with weights that a name, ours or a file's, means."""
    owners = {ours.rpartition(".")[0]: place.name.rpartition(".")[0] for ours, place in _locations(model).items()}
    ours = [name for name in owners if f".{name}".endswith(f".{text}")]
    names = ours or [name for name, in_file in owners.items() if f".{in_file}".endswith(f".{text}")]
    if not names:
        raise UserError(
            f"adapter.modules_to_save: {text!r} names no module with weights of its own; such as "
            f"{', '.join(list(owners)[:3])} or {', '.join(list(owners.values())[-3:])}"
        )
    in_file = {owners[name] for name in names}
    torn = [name for name, file_name in owners.items() if file_name in in_file and name not in names]
    if torn:
        raise UserError(
            f"adapter.modules_to_save: a file holds {', '.join(names)} together with {', '.join(torn)}; name "
            f"{', '.join(sorted(in_file))} instead"
        )
    return names


# Both


def attach_extras(model: nn.Module, modules_to_save: tuple[str, ...], tokens: tuple[int, ...] = ()) -> None:
    """Add the trained modules and rows of an adapter's settings to a model that is frozen."""
    if not tokens and not modules_to_save:
        return
    if not isinstance(model, NativeModel | ExternalModel):
        raise UserError("adapter.token_rows and adapter.modules_to_save are not supported for a model with two heads")
    for name in dict.fromkeys(module_name for text in modules_to_save for module_name in _modules_named(model, text)):
        _train_module(model, name)
    if tokens:
        _train_rows(model, tokens)


@torch.no_grad()
def _merge_rows(model: nn.Module) -> None:
    """Put the trained rows in the place of the embedding's own."""
    if (rows := token_rows(model)) is not None:
        weight = _embedding(model).weight
        weight[rows.ids] = rows.rows.to(weight.dtype)
        for hook in rows.hooks:
            hook.remove()
        del model.token_rows


def _merge_modules(model: nn.Module) -> None:
    """Put the modules that are trained whole in the place of the model's own."""
    for name, wrapper in wrappers(model).items():
        trained = wrapper.modules_to_save[DEFAULT]
        for parameter, old in zip(trained.parameters(), wrapper.original_module.parameters(), strict=True):
            parameter.data = parameter.data.to(old.dtype)
        model.set_submodule(name, trained)


def replace_extras(model: nn.Module, state: State, plain: State) -> None:
    """Put the trained rows and modules of a state dict into the one without the adapter."""
    for name, value in state.items():
        if COPY in name:
            weight_name = name.replace(COPY, ".")
            plain[weight_name] = value.to(plain[weight_name].dtype)
    if (rows := token_rows(model)) is not None:
        embedding = _embedding(model).weight
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter is embedding:
                old = plain[plain_name(name)].cpu()
                plain[plain_name(name)] = old.index_copy(0, rows.ids.cpu(), state[ROWS].cpu().to(old.dtype))


def extras_to_file(model: nn.Module, state: State) -> tuple[State, dict[str, object]]:
    """The rows' and modules' tensors in peft's format, and the options of peft's config that name them.

    The score head of a scalar model is named, and its tensor left out.
    """
    names = ["score"] if isinstance(model, ScalarModel | ExternalScalarModel) else []
    copies = {name.replace(COPY, "."): value.cpu() for name, value in state.items() if COPY in name}
    tensors = State()
    options = dict[str, object]()
    if copies:
        locations = _locations(cast(AnyModel, model))
        tensors = {f"{BEFORE}{name}": value for name, value in to_hf(copies, locations).items()}
        names += sorted({locations[name].name.rpartition(".")[0] for name in copies})
    if (rows := token_rows(model)) is not None:
        embedding = _embedding_in_file(cast(AnyModel, model))
        tensors[f"{BEFORE}{embedding}{ROWS_IN_FILE}"] = state[ROWS]
        options["trainable_token_indices"] = {embedding: rows.ids.tolist()}
    return tensors, {**options, "modules_to_save": names or None}


def extras_from_file(model: nn.Module, tensors: State) -> dict[str, Tensor | None]:
    """Take the tensors of a model's rows and modules out of a file's and return them by our names."""
    weights: dict[str, Tensor | None] = {}
    if token_rows(model) is not None:
        weights[ROWS] = tensors.pop(f"{BEFORE}{_embedding_in_file(cast(AnyModel, model))}{ROWS_IN_FILE}", None)
    copies = [name for name in model.state_dict() if COPY in name]
    locations = _locations(cast(AnyModel, model)) if copies else {}
    in_file = {name: locations[name.replace(COPY, ".")] for name in copies}
    for name, location in in_file.items():
        tensor = tensors.get(f"{BEFORE}{location.name}")
        weights[name] = None if tensor is None else cut(tensor, location).clone()
    for location in in_file.values():
        tensors.pop(f"{BEFORE}{location.name}", None)
    return weights


def modules_of_file(directory: Path, tensors: State) -> tuple[str, ...]:
    """The modules in `modules_to_save` of a directory that another program wrote, but for the head of a reward model.

    A module that the file does not hold was not there either when it was written.
    """
    named = tuple(f".{name}" for name in read_adapter_config(directory).get("modules_to_save") or [])
    held = {name.removeprefix(BEFORE).rpartition(".")[0] for name in tensors}
    return tuple(module for module in sorted(held - {"score", "classifier"}) if f".{module}".endswith(named))


# A file beside its base and its config


def check_fits_base(model: AnyModel, tensors: State, directory: Path, leaf: str) -> None:
    """Refuse updates that this model cannot have or that the config leaves out; warn of those that it names in vain.

    Args:
        tensors: a file's; the layers that peft saves beside their updates, which must be the base's, are taken out.
        leaf: begins the names of an update's tensors behind the name of its layer.
    """
    config = read_adapter_config(directory)
    weights = model.state_dict(keep_vars=True)
    holders = _holders(model)
    linear = {layer.file_name for layer in file_layers(model)}
    updated = {name.removeprefix(BEFORE).partition(leaf)[0] for name in tensors if leaf in name}
    whole = {name.removeprefix(BEFORE).rpartition(".")[0] for name in tensors} | {"score"}
    saved = tuple(f".{name}" for name in config.get("modules_to_save") or ())
    problems: dict[str, str] = {}
    for ours, location in _locations(model).items():
        module, _, part = location.name.rpartition(".")
        base = tensors.pop(f"{BEFORE}{module}.base_layer.{part}", None)
        if base is not None and not _same_values(base, weights[ours]):
            problems[module] = "was saved beside its update (base_layer), and is not the base's"
        elif module in updated - linear:
            problems[module] = "is no plain linear layer here, to be one of target_modules"
        elif config.get("ensure_weight_tying") and holders[weights[ours]] > 1 and module in updated | whole:
            problems[module] = "is tied, which ensure_weight_tying trains as one, and this library apart"
        elif f".{module}".endswith(saved) and module not in whole:
            problems[module] = "is one of modules_to_save, and the file holds nothing of it"
    fitting = _fitting(config, linear | updated, updated)
    for layer in updated - fitting - problems.keys():
        problems[layer] = "has an update, and target_modules or layers_to_transform leave it out"
    advice = "save the adapter again, or merge it with peft (merge_and_unload) and give the result"
    raise_all(f"{WEIGHTS}: {module} {problem}; {advice}" for module, problem in sorted(problems.items()))
    unread = sorted(fitting - updated - whole)
    if unread and not config.get("exclude_modules"):
        warnings.warn(
            f"{directory}: {CONFIG} names {', '.join(unread[:3])}, whose update is not in the file", stacklevel=3
        )


def _same_values(saved: Tensor, weight: Tensor) -> bool:
    """True where a saved weight is the model's, in the lower of their two types."""
    stored = getattr(weight, "stored", None)  # not read yet, see weight_map.py
    weight = weight.cpu() if stored is None else stored.read()
    lower = min(saved.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(saved.to(lower), weight.to(lower))


def _fitting(config: Mapping[str, object], layers: set[str], updated: set[str]) -> set[str]:
    """Those of a file's layers that target_modules and layers_to_transform of a peft config mean."""
    targets = config.get("target_modules")
    indices = config.get("layers_to_transform")
    if targets is None or targets == "all-linear":
        layers = updated
    elif isinstance(targets, str):
        layers = set(search_names(f"^({targets})$", sorted(layers), "target_modules"))
    else:
        ends = tuple(f".{name}" for name in cast(Iterable[str], targets))
        layers = {layer for layer in layers if f".{layer}".endswith(ends)}
    if indices is None or indices == [] or config.get("layers_pattern"):
        return layers
    wanted = set(map(str, indices if isinstance(indices, list) else [indices]))
    return {layer for layer in layers if wanted & set(re.findall(r"\.(\d+)\.", f".{layer}")[:1])}


# What the kinds share


class AdapterKind:
    """A kind of adapter: `attach` and `from_file` put it on a model, `to_file` gives tensors and peft's config.

    Attributes:
        peft_type: name of the kind in a file.
        before_head: precedes `score.weight` in the file of a scalar model's adapter.
        unmergeable: why it cannot be put into the weights.
    """

    peft_type = ""
    before_head = BEFORE
    unmergeable = ""

    def own_settings(self, model: nn.Module, state: State) -> dict[str, object]:
        """The settings that peft's config does not hold."""
        return {}


class InjectedKind(AdapterKind):
    """Layers of peft in place of linear layers, with rows and modules that are trained besides.

    Attributes:
        weights: part of the names of the kind's weights in a state dict.
        options: options of peft's config that are supported beside `OPTIONS`.
    """

    weights = ""
    options: frozenset[str] = frozenset()

    def layers(self, model: nn.Module) -> dict[str, Any]:
        """peft's layers of this kind by our names of the linear layers."""
        raise NotImplementedError

    def is_attached(self, model: nn.Module) -> bool:
        """True where a model has such an adapter."""
        return bool(self.layers(model))

    def changes_when_off(self, model: nn.Module) -> list[Change]:
        """The attributes that switch the adapter off, and their values then.

        peft's own switch also changes requires_grad, which sharded optimizers must not see.
        """
        rows = token_rows(model)
        modules = [*wrappers(model).values(), *self.layers(model).values()]
        off: list[Change] = [] if rows is None else [(rows, "enabled", False)]
        return off + [(module, "_disable_adapters", True) for module in modules]

    def holds(self, name: str) -> bool:
        """True for names of the model's state dict that are weights of the adapter."""
        return self.weights in name or name == ROWS or COPY in name

    def merge(self, model: nn.Module) -> None:
        """Put the adapter into the weights and remove it; all parameters are trainable afterwards.

        A head that shares the token table's weight gets one of its own, and the table keeps its own.
        """
        layers = self.layers(model).values()
        _merge_rows(model)  # first: the update of a tied head lies on them
        bases = [layer.get_base_layer() for layer in layers]
        _give_own_weights(
            cast(AnyModel, model), bases + [wrapper.original_module for wrapper in wrappers(model).values()]
        )
        for layer in layers:
            layer.merge(safe_merge=True)
        self.detach(model)
        _merge_modules(model)
        model.requires_grad_(True)

    def detach(self, model: nn.Module) -> None:
        """Put the base's layers back in place of peft's."""
        for name, layer in self.layers(model).items():
            model.set_submodule(name, layer.get_base_layer())
        if hasattr(model, "peft_config"):
            del model.peft_config

    def read_options(
        self, spec: type[Spec], own: Mapping[str, object], config: Mapping[str, object], directory: Path
    ) -> Spec:
        """The settings in a directory: ours where we wrote it, else `own` from peft's config, without its layers."""
        if (settings := read_own_settings(directory)) is not None:
            return build_spec(spec, settings, str(directory / SPEC))
        raise_all(f"{directory}/{CONFIG}: {problem}" for problem in self._unsupported(config))
        return build_spec(spec, dict(own), f"{directory}/{CONFIG}")

    def _unsupported(self, config: Mapping[str, object]) -> Iterator[str]:
        """One message per option of an adapter_config.json that would change the result and is not supported."""
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

        defaults = vars(PEFT_TYPE_TO_CONFIG_MAPPING[cast(Any, self.peft_type)]())
        for key, value in config.items():
            if key in OPTIONS | self.options or not value or value == defaults.get(key):
                continue
            yield f"{key} = {value!r} is not supported" + (f", only {defaults[key]!r}" if key in defaults else "")

    def file_parts(self, model: nn.Module) -> Iterator[tuple[FileLayer, list[int]]]:
        """The layers of a Hugging Face file of which a part has an adapter, and the outputs of each of their parts."""
        adapted = self.layers(model)
        linear = linear_layers(model)
        for layer in file_layers(model):
            if adapted.keys() & set(layer.layers):
                yield layer, [layer_sizes(linear[name])[1] for name in layer.layers]

"""From YAML, the user's or the package's own, to checked config dataclasses; all mistakes at once, each with a way out.

Values of keys that hold secrets are not shown."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from alignment.config.yaml_source import SourcedYaml, dotted, fill, override, read_yaml, references
from alignment.errors import UserError, is_hidden, raise_all, spelling_hint, suggest, without_secrets
from alignment.files import data_folder, packaged_folder
from alignment.settings import BOUNDS, Key, broken_rules, default_text, deferred_checks, leaves, limit_text

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

EXPECTED = {  # pydantic error type -> what the value must be
    "bool_type": "must be true or false",
    "dataclass_type": "must be a section of keys",
    "dict_type": "must be a section of keys",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "none_required": "must be null",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}

# Key of trl, transformers, axolotl, LLaMA-Factory or OpenRLHF -> our key, and what differs; `|`: or.
KEYS_OF_OTHER_LIBRARIES = {
    "actor_learning_rate": "optim.learning_rate", "advantage_estimator": "advantages",
    "apply_chat_template": "data.as_messages", "base_model": "policy", "beta": "kl_coef",
    "bf16": "training.precision=bf16", "buffer_size": "data.shuffle_buffer",
    "center_rewards_coefficient": "center_coef", "chat_template_path": "chat_template", "cliprange": "clip_range",
    "cliprange_value": "value_clip_range", "completion_only_loss": "loss_on (completion or all)",
    "critic_learning_rate": "value_optim.learning_rate", "critic_pretrain": "value_model",
    "cutoff_len": "data.max_length", "dataset": "data.train", "dataset_name": "data.train",
    "dataset_text_field": "data.columns (our name of a column: the file's)", "datasets": "data.train",
    "delta": "dual_clip", "eps_clip": "clip_range", "epsilon": "clip_range", "epsilon_high": "clip_range_high",
    "eval_dataset": "data.evaluation", "eval_steps": "training.evaluate_every_steps",
    "eval_strategy": "training.evaluate_every_steps",
    "finetuning_type": "adapter.kind (lora; without an adapter every weight trains)",
    "fp16": "training.precision (bf16 or fp32; there is no fp16)", "freezing_actor_steps": "value_warmup_steps",
    "generate_max_len": "max_new_tokens",
    "gradient_accumulation_steps": "training.micro_batch_tokens (tokens per forward; accumulation follows from it)",
    "importance_sampling_level": "ratio (token or sequence)", "init_kl_coef": "kl_coef",
    "input_key": "data.columns (our name of a column: the file's)",
    "interleave_probs": "data.mixing=weights (each source of data.train has a weight)",
    "kto_chosen_weight": "desirable_weight", "kto_rejected_weight": "undesirable_weight", "lam": "gae_lambda",
    "lambd": "gae_lambda", "load_best_model_at_end": "training.keep_best", "load_in_4bit": "weights.quantize=nf4",
    "load_in_8bit": "weights.quantize=int8", "lora_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank", "lora_rank": "adapter.rank", "lora_target": "adapter.layers",
    "lora_target_linear": "adapter.layers=all-linear", "lora_target_modules": "adapter.layers",
    "loss_type": "loss|loss_normalization", "lr": "optim.learning_rate", "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule", "mask_history": "data.turns=last",
    "max_completion_length": "max_new_tokens", "max_epochs": "epochs|training.epochs",
    "max_prompt_length": "data.max_length (tokens of prompt and response together)", "max_samples": "data.max_rows",
    "max_seq_length": "data.max_length",
    "micro_batch_size": "training.micro_batch_tokens (tokens per forward, not rows)",
    "micro_train_batch_size": "training.micro_batch_tokens (tokens per forward, not rows)",
    "model_name_or_path": "policy", "n_samples_per_prompt": "responses_per_prompt",
    "neftune_noise_alpha": "neftune_alpha", "num_episodes": "training.epochs", "num_epochs": "training.epochs",
    "num_generations": "responses_per_prompt", "num_iterations": "epochs", "num_ppo_epochs": "epochs",
    "num_train_epochs": "training.epochs", "optimizer": "optim.name", "output_dir": "output",
    "peft_config": "adapter",
    "per_device_eval_batch_size": "training.micro_batch_tokens (tokens per forward, not rows)",
    "per_device_train_batch_size": "training.batch_size (rows per update over all devices)", "ppo_epochs": "epochs",
    "ppo_target": "kl_target", "precompute_ref_log_probs": "reference_log_probs=cache", "pref_beta": "beta",
    "pref_ftx": "sft_coef", "pref_loss": "loss", "prompt_data": "data.train",
    "prompt_max_len": "data.max_length (tokens of prompt and response together)", "ptx_coef": "pretrain_coef",
    "quantization": "weights.quantize (nf4 or int8)", "quantization_bit": "weights.quantize (nf4 or int8)",
    "quantize": "weights.quantize (nf4 or int8)", "r": "adapter.rank", "ref_model": "reference",
    "report_to": "training.trackers", "reward_funcs": "rewards (a list of entries, such as function: module:name)",
    "reward_model_path": "reward_model", "reward_pretrain": "reward_model",
    "reward_weights": "rewards (each entry has a weight)",
    "rollout_batch_size": "training.batch_size (prompts of an iteration)", "run_name": "training.tracking.name",
    "save_path": "output", "save_steps": "training.save_every_steps", "save_strategy": "training.save_every_steps",
    "save_total_limit": "training.keep_last_checkpoints", "saves_per_epoch": "training.save_every_steps",
    "scale_rewards": "advantages (dr_grpo does not divide by the deviation)", "sequence_len": "data.max_length",
    "sft_model_path": "policy", "simpo_gamma": "gamma", "target_modules": "adapter.layers",
    "template": "chat_template", "train_batch_size": "minibatches|training.batch_size (rows per update)",
    "train_on_inputs": "loss_on=all", "train_on_prompt": "loss_on=all", "use_dora": "adapter.kind=dora",
    "use_kl_loss": "kl_in=loss", "use_rslora": "adapter.rank_stabilized", "use_vllm": "servers.urls",
    "val_set_size": "data.evaluation_share", "val_size": "data.evaluation_share", "value_clip": "value_clip_range",
    "vllm_num_engines": "servers.urls", "wandb_project": "training.tracking.project",
}  # fmt: skip
NEEDLESS = {  # key of another library -> why there is none here
    **dict.fromkeys(
        ("packing", "sample_packing", "padding_free"), "rows always lie end to end and see only themselves"
    ),
    **dict.fromkeys(
        ("flash_attn", "flash_attention", "attn_implementation"),
        "attention takes the fastest kernel that fits by itself",
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "zero_stage"), "the command has --launch, such as launch/zero3 or launch/fsdp2"
    ),
    "assistant_only_loss": "loss_on=completion, the default, counts responses alone; data.turns chooses the turns",
    **dict.fromkeys(("eos_token", "pad_token"), "the tokenizer's own count, and its template's end of a turn"),
    "device_map": "a model lies whole on its device; the command has --launch launch/fsdp2 to spread it",
    "logging_steps": "every update is logged",
    "resume_from_checkpoint": "the same command goes on with a stopped run",
}


class _Located(NamedTuple):
    """One of pydantic's errors: the path of keys to the value, and the union members that pydantic names on the way."""

    key: Key
    members: tuple[str, ...]
    error: "ErrorDetails"


def explain_errors(cls: type, values: object, errors: "Sequence[ErrorDetails]") -> list[tuple[Key, str]]:
    """Each wrong key, and why, of what pydantic found in `values`."""
    by_key: dict[Key, list[_Located]] = {}
    for failure in _errors_of_matching_members([_locate(values, error) for error in errors]):
        by_key.setdefault(failure.key, []).append(failure)
    for key, group in by_key.items():  # a key that one member of a union knows is not unknown to the user
        by_key[key] = [failure for failure in group if failure.error["type"] != "unexpected_keyword_argument"] or group
    return [(key, _reason(cls, group)) for key, group in by_key.items()]


def fill_placeholder(cls: type, values: object, key: Key) -> Key | None:
    """Let another value stand in for a wrong or missing one: the default, or a value of its type that means nothing.

    Returns the key (of a list's item, that of the list: the others would change places); None where nothing can stand
    in.
    """
    while key and isinstance(key[-1], int):
        key = key[:-1]
    section = functools.reduce(lambda inner, part: inner[part], key[:-1], cast(Any, values))
    if not key or not isinstance(section, dict):
        return None
    name = str(key[-1])
    section.pop(name, None)
    for section_class in _sections(cls, key[:-1]):
        for entry in dataclasses.fields(section_class):
            if entry.name == name and MISSING is entry.default is entry.default_factory:
                section[name] = _value_of(get_type_hints(section_class)[name], name)
    return key


def _value_of(hint: Any, name: str) -> object:
    while get_origin(hint) in (Union, UnionType, Literal):
        hint = get_args(hint)[0]
    if dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return {}
    return {list: [], tuple: [], str: name, float: 1.0, int: 1}.get(get_origin(hint) or hint, hint)


def _locate(values: Any, error: "ErrorDetails") -> _Located:
    """Separate keys from union members in an error's location: a key is in the values, or missing from them."""
    key: list[str | int] = []
    members: list[str] = []
    location = error["loc"][1:]
    for depth, part in enumerate(location):
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else None
        elif depth < len(location) - 1 or error["type"] != "missing":
            members.append(str(part))
            continue
        key.append(part)
    return _Located(tuple(key), tuple(members), error)


def _errors_of_matching_members(located: Sequence[_Located]) -> list[_Located]:
    """The errors of those union members that the user's value matches best.

    Pydantic tries `adapter: {kind: lora, rnk: 8}` as every kind of adapter and reports each failure; only those of
    `lora` help. Likewise `[1, 2]` for `text or list of texts` is reported at its items, as a list.
    """
    wrong_kinds = [
        failure
        for failure in located
        if failure.members and failure.key[-1:] == ("kind",) and failure.error["type"] == "literal_error"
    ]
    others = {  # errors of a member whose `kind` is not the value's
        id(failure)
        for failure in located
        for wrong in wrong_kinds
        if failure.key[: len(wrong.key) - 1] == wrong.key[:-1]
        and failure.members[: len(wrong.members)] == wrong.members
    }
    matching = [failure for failure in located if id(failure) not in others]
    explained = {
        failure.key[:depth] for failure in matching if failure.members for depth in range(len(failure.key) + 1)
    }
    deeper = {failure.key[:depth] for failure in matching for depth in range(len(failure.key))}
    # No member matches: the kind is wrong.
    kinds = [failure for failure in wrong_kinds if failure.key[:-1] not in explained]
    return [*kinds, *(failure for failure in matching if not (failure.members and failure.key in deeper))]


def _reason(cls: type, group: Sequence[_Located]) -> str:
    """Why one key is wrong, and the way out: what each member of a union expects, and the value it got."""
    first, *others = dict.fromkeys(_expected(cls, failure) for failure in group)
    text = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
    key = group[0].key
    error = group[0].error
    if error["type"] in ("value_error", "missing", "unexpected_keyword_argument") or is_hidden(key):
        return text
    got = repr(error["input"]) if isinstance(error["input"], str) else json.dumps(without_secrets(error["input"]))
    shown = got if len(got) <= 80 else got[:77] + "..."
    unquoted = is_number(error["input"]) and any(failure.error["type"] == "string_type" for failure in group)
    sections = _sections(cls, key[:-1]) if error.get("ctx", {}).keys() & BOUNDS.keys() else []
    default = default_text(sections[0], str(key[-1])) if sections else ""
    is_kind = isinstance(error["input"], str) and has_key(cls, (*key, "kind"))
    kind = f"; say {dotted(key)}.kind={error['input']}" if is_kind else ""
    return f"{text}, got {shown}{default}{kind}" + ("; put it in quotes" if unquoted else "")


def _expected(cls: type, located: _Located) -> str:
    """Description of a right value, or the message of the config's own check."""
    key, members, error = located
    kind = error["type"]
    context = error.get("ctx", {})
    name = str(key[-1]) if key else ""
    if kind == "unexpected_keyword_argument":
        sections = _sections(cls, key[:-1])
        matching = [section for section in sections if section.__name__ in members] or sections
        names = {field.name for section in matching for field in dataclasses.fields(section)}
        return f"unknown key; {key_here(cls, name) or suggest(name, names)}"
    if kind == "missing":
        return "is missing; add it"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    if bounds := context.keys() & BOUNDS.keys():
        (bound,) = bounds
        return limit_text(bound, context[bound])
    message = error["msg"]
    return EXPECTED[kind] if kind in EXPECTED else message[:1].lower() + message[1:]


def key_here(cls: type, name: str) -> str:
    """Our name for a key of another library or another section, or why none is needed; empty where it is unknown."""
    if name in NEEDLESS:
        return f"there is none here: {NEEDLESS[name]}"
    for ours in filter(None, KEYS_OF_OTHER_LIBRARIES.get(name, "").split("|")):
        if has_key(cls, tuple(re.split("[ =]", ours)[0].split("."))):
            return f"here it is called {ours}"
    below = [(field.name, name) for field in dataclasses.fields(cast(Any, cls)) if has_key(cls, (field.name, name))]
    return "here it is called " + " or ".join(dotted(key) for key in below) if below else ""


def has_key(cls: type, key: Key) -> bool:
    """True where a config class has a key."""
    return any(key[-1] == field.name for section in _sections(cls, key[:-1]) for field in dataclasses.fields(section))


@functools.cache
def _sections(kind: Hashable, key: Key) -> list[Any]:
    """The dataclasses that the value at a key may be, `kind` being the type of the whole."""
    if dataclasses.is_dataclass(kind):
        if not key:
            return [kind]
        hint = get_type_hints(kind).get(str(key[0]))
        return [] if hint is None else _sections(hint, key[1:])
    is_container = get_origin(kind) in (list, tuple, dict)
    if is_container and not key:
        return []
    return [section for part in get_args(kind) for section in _sections(part, key[1:] if is_container else key)]


def is_number(value: object) -> TypeGuard[bool | int | float]:
    """True for a number or a truth value, which quotes would make text."""
    return isinstance(value, (bool, int, float))


T = TypeVar("T")
Check = Callable[[object], Iterable[tuple[Key, str]]]  # a config -> its keys that are wrong, and why

code_folders: list[Path] = []  # of the config or recipe read last: Python modules that it names lie beside it

# int64, and what float32 divides by without overflow
LARGEST = 2**63 - 1
SMALLEST = 1e-30


def load_config(cls: type[T], source: str, overrides: Sequence[str] = (), check: Check | None = None) -> T:
    """A config from a file, with overrides applied; every problem at once, a line each: `file:line: key: why; way out`.

    `${configs}` in it is the folder of packaged configs, `${data}` that of real data.

    Args:
        source: path of a YAML file, or a packaged name such as `sft/tiny`; a path wins. Of the form key=value it
            is the first of the overrides, which then give the whole config.
        overrides: `dotted.key=value`, each value read as YAML.
        check: see `build`.
    """
    if "=" in source and not Path(source).is_file():
        code_folders[:] = [Path()]
        document = override(SourcedYaml({}), [source, *overrides])
    else:
        path = find_packaged(source, "configs")
        code_folders[:] = [path.parent]
        document = override(read_yaml(path), overrides)
    names = {"configs": str(packaged_folder("configs")), "data": str(data_folder())}
    unknown = sorted(references(document.values) - set(names))
    raise_all(f"{source}: ${{{name}}} is not defined outside a recipe; {suggest(name, names)}" for name in unknown)
    return build(cls, SourcedYaml(fill(document.values, names), document.locations), check)


# Packaged files


def find_packaged(name: str, kind: str) -> Path:
    """The file at a path, or the packaged file of that name.

    `kind` is `configs` (names are `stage/variant`), `launch` (Accelerate's launch files, `launch/zero3`) or `recipes`
    (names are those of folders with a recipe.yaml; FOLDER/FILE is another recipe in one).
    """
    given = Path(name)
    if given.is_file():
        return given
    if kind == "recipes" and (given / "recipe.yaml").is_file():
        return given / "recipe.yaml"
    if kind == "recipes" and (other := packaged_folder(kind) / f"{name}.yaml").is_file():
        return other
    known = packaged_names(kind)
    if name not in known:
        near = spelling_hint(name, [*known, *map(str, given.parent.glob("*.y*ml"))])
        way = near or "give the path of a YAML file, or a packaged name, which `alignment STAGE --help` lists"
        raise UserError(f"{name}: there is no such file, and no packaged one of that name; {way}")
    return known[name]


def packaged_names(kind: str) -> dict[str, Path]:
    """The packaged files of a kind, see `find_packaged`: name -> path."""
    if kind == "recipes":
        return {path.parent.name: path for path in sorted(packaged_folder("recipes").glob("*/recipe.yaml"))}
    root = packaged_folder("configs")
    files = [path for path in sorted(root.glob("*/*.yaml")) if (path.parent.name == "launch") == (kind == "launch")]
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in files}


def config_that_writes(output: str, near: Path | None = None) -> Path | None:
    """The config of the run with this `output`: one in the folder `near`, else a packaged one; None: no such config."""
    near_configs = [] if near is None else sorted(near.glob("*.yaml"))
    for path in [*near_configs, *packaged_names("configs").values()]:
        values = read_yaml(path).values if path.parent.name not in ("evaluate", "launch") else None
        if isinstance(values, dict) and "data" in values and values.get("output") == output:
            return path
    return None


def packaged_writer(output: str) -> str | None:
    """The command that runs the packaged config with this `output`; None where no config has it."""
    path = config_that_writes(output)
    return None if path is None else f"alignment {path.parent.name.replace('_', '-')} {path.parent.name}/{path.stem}"


# Checking


def build(cls: type[T], document: SourcedYaml, check: Check | None = None) -> T:
    """Return the config in a document; every key is known, every type and limit right, no two values contradict.

    A value stands in for each wrong one, so that the sections around it can be made and asked for contradictions; those
    that read a value that stands in are not named. `check` finds what else is wrong, such as files that are not there.
    """
    values = json.loads(json.dumps({} if document.values is None else document.values, default=str))
    problems = dict(_numbers_out_of_range(values))
    replaced = set[Key]()
    config, wrong = _validate(cls, values)
    while wrong:
        problems = {key: why for key, why in wrong if not _within(key, replaced)} | problems
        stood_in = {key for name, _ in wrong if (key := fill_placeholder(cls, values, name)) is not None} - replaced
        if not stood_in:
            break
        replaced |= stood_in
        config, wrong = _validate(cls, values)
    lines = [(key, why) for key, why in problems.items()]
    lines += [
        (key, why)
        for key, why, read in broken_rules(config)
        if not any(_within(read_key, replaced) for read_key in read)
    ]
    if check is not None and config is not None:
        lines += [(key, why) for key, why in check(config) if not _within(key, replaced)]
    raise_all(dict.fromkeys(f"{document.location(key)}: {dotted(key)}: {why}" for key, why in lines))
    return cast(T, config)


def _within(key: Key, sections: Iterable[Key]) -> bool:
    return any(key[: len(section)] == section for section in sections)


def _validate(cls: type[T], values: object) -> tuple[T | None, list[tuple[Key, str]]]:
    from pydantic import ValidationError

    try:
        # From JSON, strict mode accepts a list for a tuple and 1 for 1.0, but never text for a number.
        with deferred_checks():
            return _checker(cls).model_validate_json(json.dumps({"config": values}, default=str)).config, []
    except ValidationError as error:
        return None, explain_errors(cls, values, error.errors(include_url=False))


def _numbers_out_of_range(values: object) -> Iterator[tuple[Key, str]]:
    """Keys of numbers too large or too small to compute with; pydantic refuses infinite ones."""
    for key, value in leaves(values):
        if is_number(value) and (0 < abs(value) < SMALLEST or LARGEST < abs(value) < math.inf) and not is_hidden(key):
            yield key, f"must be 0 or between {SMALLEST} and {LARGEST} (64 bits) in size"


@functools.cache
def _checker(cls: type) -> Any:
    """A pydantic model around a dataclass; its settings reach the plain dataclasses below it."""
    from pydantic import ConfigDict, create_model

    strict = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True
    )
    return create_model("Checked", __config__=strict, config=(cls, ...))

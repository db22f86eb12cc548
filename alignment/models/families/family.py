"""The description of a family: the architectures of one `model_type`, its config keys and its weight names."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment.errors import raise_all
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.families.config_keys import KEYS, Key, keys_without_effect, refused_keys, transformers_defaults
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.safetensors_files import HFConfig, StoredTensor
from alignment.models.transformer import TransformerSpec
from alignment.settings import refusal

# One line of a weight table: Hugging Face name, our name; {} stands for a number, of a layer or of an expert. The names
# of a module stand for its weight and, if it has one, its bias; others end with the tensor's own name. A tuple of our
# names: the tensor of the file is cut along its output axis into several of ours.
Name = tuple[str, str | tuple[str, ...]]
Head = Callable[[HFConfig], ClassificationHeadSpec]
Architecture = Literal["decoder", "encoder", "encoder-decoder"]

LEAVES = (".weight", ".bias", ".offset")
QUERY_KEY_VALUE = tuple(f"trunk.blocks.{{}}.attention.{part}" for part in ("query", "key", "value"))
BLOCK = "trunk.blocks.{}."
GATE_UP = ("trunk.blocks.{}.feedforward.gate", "trunk.blocks.{}.feedforward.up")


@dataclass(frozen=True)
class Task:
    """One model class of a family: the trunk with one kind of head."""

    hf_class: str  # transformers' class, `architectures` in config.json.
    names: tuple[Name, ...]  # the head's weight table
    head: Head | None = None  # config's values -> specification of the head; None for language and scalar
    trunk_prefix: str | None = None  # prefix of the trunk's names in files of this class; None: the family's
    kept_by_new_head: tuple[str, ...] = ()  # tensors of the file that a new head starts from, such as BERT's pooler
    unused: tuple[str, ...] = ()  # patterns of tensors that files of other classes have and this one drops
    trunk: Callable[[HFConfig], Mapping[str, Any]] = (
        lambda value: {}
    )  # config's values -> other fields of the trunk's spec


@dataclass(frozen=True)
class Family:
    """One architecture as Hugging Face's files describe it. "Values" are a config with defaults filled in.

    Attributes:
        name: `model_type` in config.json.
        spec: config's values -> specification; raises UserError where they contradict each other.
        keys: config keys that `spec` reads, all of them in config_keys.KEYS.
        names: the trunk's weight table; a later line replaces an earlier one for the same tensor of ours.
        trunk_prefix: prefix of the trunk's names in a file with a head; files of a bare trunk omit it.
        tasks: model classes by our name: language, scalar, next_sentence, sequence, tokens, span.
        defaults: of `keys` that transformers' config class does not have, or not with this meaning.
        limits: of `keys` that have other limits here than in KEYS.
        by_hand: config keys that `spec` reads and checks itself.
        harmless: config keys that do not change the forward pass, besides HARMLESS.
        fixed: config keys with the values that are supported, besides FIXED.
        old_keys: config keys of older files -> their present name.
        transposed: suffixes of tensors that are stored [in, out].
        interleaved: suffixes of fused tensors that have, key head by key head, the rows of its queries, of the key and
            of the value; other fused tensors have all rows of one part after all of another.
        ignored_tensors: patterns of tensors in files that are no weights, or belong to no head of ours. A model that
            needs such a tensor has it all the same.
        legacy_names: suffix of a tensor's name in older files -> its present suffix.
        tied_copies: (name, original) of tensors that a file may contain twice; both must be equal.
        names_from_config: config's values -> further lines of `names`, where the config decides on a tensor's name.
        zeros_if_missing: tensors that a file may lack; they are zero then.
        new_model_config: config values of a new model that differ from transformers' defaults.
        config_from_tensors: config, tensors -> the config, corrected by what only the tensors show.
    """

    name: str
    spec: Callable[[HFConfig], TransformerSpec | EncoderDecoderSpec]
    keys: tuple[str, ...]
    names: tuple[Name, ...]
    trunk_prefix: str
    tasks: Mapping[str, Task]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Key] = field(default_factory=dict)
    by_hand: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    old_keys: Mapping[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    legacy_names: Mapping[str, str] = field(default_factory=dict)
    tied_copies: tuple[tuple[str, str], ...] = ()
    names_from_config: Callable[[HFConfig], tuple[Name, ...]] = lambda value: ()
    zeros_if_missing: tuple[str, ...] = ()
    new_model_config: Mapping[str, Any] = field(default_factory=dict)
    config_from_tensors: Callable[[HFConfig, Mapping[str, StoredTensor]], HFConfig] = lambda config, tensors: config

    @property
    def architecture(self) -> Architecture:
        """Decoder, encoder or encoder-decoder, by the class of the language model."""
        name = self.tasks["language"].hf_class
        return "encoder" if name.endswith("MaskedLM") else "encoder-decoder" if "Conditional" in name else "decoder"

    def prefix(self, task: str) -> str:
        """Prefix of the trunk's names in a file of this task's class."""
        task_prefix = self.tasks[task].trunk_prefix
        return self.trunk_prefix if task_prefix is None else task_prefix

    def default(self, key: str) -> Any:
        """The value of one of `keys` where the config leaves it out."""
        return self.defaults[key] if key in self.defaults else transformers_defaults()[self.name][key]

    def values(self, config: HFConfig) -> HFConfig:
        """The config under present names, with the defaults of `keys` filled in; nothing is checked."""
        present = {key: value for key, value in config.items() if key not in self.old_keys}
        for old, key in self.old_keys.items():
            if old in config:
                present.setdefault(key, config[old])
        return {key: self.default(key) for key in self.keys if key not in present} | present

    def read(self, config: HFConfig) -> HFConfig:
        """The values of the keys of a config that act; UserError names each that is unknown or has a wrong value."""
        value = self.values(config)
        problems = [
            f"config.json: {old} = {config[old]!r} and {key} = {value[key]!r} are the same thing"
            for old, key in self.old_keys.items()
            if old in config and config[old] != value[key]
        ]
        known = {*self.keys, *self.by_hand, *self.harmless}
        idle = keys_without_effect(value, {*known, *self.fixed})
        value = {key: item for key, item in value.items() if key not in idle}
        problems += refused_keys(value, known, self.fixed)
        wrong = [problem for key in self.keys if (problem := self._value_problem(key, value[key]))]
        understood = {key: value[key] for key in value if key in known}
        contradictions = "" if wrong else refusal(self.spec, understood)
        raise_all(problems + wrong + contradictions.splitlines())
        return value

    def _value_problem(self, key: str, value: object) -> str | None:
        if value is None and (KEYS[key].nullable or self.default(key) is None):
            return None
        return self.limits.get(key, KEYS[key]).problem(key, value)

    def spec_from_config(self, config: HFConfig) -> TransformerSpec | EncoderDecoderSpec:
        """The specification of a config; raises as `read`."""
        return self.spec(self.read(config))


def names_under(hf: str, ours: str, **parts: str) -> tuple[tuple[str, str], ...]:
    """Lines of a weight table whose names share their beginnings: our name of a part, its Hugging Face name."""
    return tuple((hf + theirs, ours + part) for part, theirs in parts.items())


def tensor_names(table: Iterable[Name]) -> Iterable[Name]:
    """The lines of a weight table with modules written out as weight and bias."""
    for hf, ours in table:
        if isinstance(ours, str) and ours.endswith(LEAVES):
            yield hf, ours
        else:
            for leaf in (".weight", ".bias"):
                yield hf + leaf, ours + leaf if isinstance(ours, str) else tuple(part + leaf for part in ours)


CLASSIFIER = (("classifier", "head.output"),)


def decoder_tasks(
    stem: str,
    heads: Iterable[str] = ("sequence", "tokens"),
    span_prefix: str | None = None,
    language: tuple[str, str] = ("ForCausalLM", "lm_head"),
    classifier: tuple[str, ...] = (),
) -> dict[str, Task]:
    """The tasks of a decoder whose classes of transformers begin with `stem`, such as Llama in LlamaForCausalLM.

    Args:
        heads: those of sequence, tokens and span that transformers has a class for.
        span_prefix: prefix of the trunk's names in files of the span class; None: the family's.
        language: the ending of the language model's class name, and its head's name.
        classifier: keys of the dropout before a head for tokens that is named so; none: it is named score.
    """

    def last_token(value: HFConfig) -> ClassificationHeadSpec:
        return ClassificationHeadSpec(num_labels(value), pooling="last", bias=False)

    tasks = {
        "language": Task(stem + language[0], ((f"{language[1]}.weight", "head.weight"),)),
        "scalar": Task(f"{stem}ForSequenceClassification", (("score.weight", "head.weight"),)),
        "sequence": Task(f"{stem}ForSequenceClassification", (("score", "head.output"),), last_token),
        "tokens": Task(
            f"{stem}ForTokenClassification",
            (("classifier" if classifier else "score", "head.output"),),
            token_head(*classifier),
        ),
        "span": span_task(stem, trunk_prefix=span_prefix),
    }
    return {name: task for name, task in tasks.items() if name in ("language", "scalar", *heads)}


def num_labels(value: HFConfig, default: int = 2) -> int:
    """Number of classes in a config, by transformers' rule."""
    return int(value.get("num_labels") or len(value.get("id2label") or ()) or default)


def dropout_of(value: HFConfig, *keys: str) -> float:
    """The first of these dropouts that a config sets; 0 where it sets none."""
    return next((value[key] for key in keys if value.get(key) is not None), 0.0)


def token_head(*dropout: str) -> Head:
    """One linear layer on every token, after the first of these dropouts that the config sets."""
    return lambda value: ClassificationHeadSpec(num_labels(value), dropout=dropout_of(value, *dropout))


def span_task(stem: str, *dropout: str, trunk_prefix: str | None = None) -> Task:
    """Start and end of an answer: one linear layer on every token with two outputs; dropout as `token_head`."""

    def head(value: HFConfig) -> ClassificationHeadSpec:
        return ClassificationHeadSpec(2, dropout=dropout_of(value, *dropout))

    return Task(f"{stem}ForQuestionAnswering", (("qa_outputs", "head.output"),), head, trunk_prefix)

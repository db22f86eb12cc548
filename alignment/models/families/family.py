"""The description of a family (one architecture of Hugging Face), and the strict reading of configs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment.errors import spelling_hint
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.safetensors_files import HFConfig, StoredTensor
from alignment.models.transformer import TransformerSpec

# One line of a weight table: Hugging Face name, our name. A tuple of our names: the tensor of the file is cut along
# its output axis into several of ours. {} stands for a number, of a layer or of an expert.
Name = tuple[str, str | tuple[str, ...]]
Architecture = Literal["decoder", "encoder", "encoder-decoder"]


@dataclass(frozen=True)
class Task:
    """One model class of a family: the trunk with one kind of head.

    Attributes:
        hf_class: transformers' class, `architectures` in config.json.
        names: the head's weight table.
        head: config -> specification of the head; None for language and scalar.
        other_heads: patterns of tensors of other heads, which a file may contain and which are dropped.
        trunk_prefix: prefix of the trunk's names in files of this class; None: the family's.
        kept_by_new_head: tensors of the file that a new head starts from, such as BERT's pooler.
    """

    hf_class: str
    names: tuple[Name, ...]
    head: Callable[[HFConfig], ClassificationHeadSpec] | None = None
    other_heads: tuple[str, ...] = ()
    trunk_prefix: str | None = None
    kept_by_new_head: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One architecture as Hugging Face's files describe it.

    Attributes:
        name: `model_type` in config.json.
        spec_from_config: config -> specification; raises UserError.
        names: the trunk's weight table.
        trunk_prefix: prefix of the trunk's names in a file with a head; files of a bare trunk omit it.
        tasks: model classes by our name: language, scalar, next_sentence, sequence, tokens, span.
        transposed: suffixes of tensors that are stored [in, out].
        interleaved: suffix of a fused tensor -> function of the specification that gives its number of groups; each
            group has some rows of every part. Without an entry there is one group.
        ignored_tensors: patterns of tensors in files that are no weights, or not used by this config.
        legacy_names: suffix of a tensor's name in older files -> its present suffix.
        tied_copies: (name, original) of tensors that a file may contain twice; both must be equal.
        names_from_config: config -> lines that replace lines of `names`, where the config decides on a tensor's name.
        zeros_if_missing: tensors that a file may lack; they are zero then.
        new_model_config: config values of a new model that differ from transformers' defaults.
        config_from_tensors: config, tensors -> the config, corrected by what only the tensors show.
    """

    name: str
    spec_from_config: Callable[[HFConfig], TransformerSpec | EncoderDecoderSpec]
    names: tuple[Name, ...]
    trunk_prefix: str
    tasks: Mapping[str, Task]
    transposed: tuple[str, ...] = ()
    interleaved: Mapping[str, Callable[[Any], int]] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()
    legacy_names: Mapping[str, str] = field(default_factory=dict)
    tied_copies: tuple[tuple[str, str], ...] = ()
    names_from_config: Callable[[HFConfig], tuple[Name, ...]] = lambda config: ()
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
        own = self.tasks[task].trunk_prefix
        return self.trunk_prefix if own is None else own


def decoder_tasks(
    stem: str, heads: Iterable[str] = ("sequence", "tokens"), span_prefix: str | None = None
) -> dict[str, Task]:
    """The tasks of a decoder with transformers' usual class names and head names.

    Args:
        stem: class names begin with it, such as Llama in LlamaForCausalLM.
        heads: those of sequence, tokens and span that transformers has a class for.
        span_prefix: prefix of the trunk's names in files of the span class; None: the family's.
    """
    tasks = {
        "language": Task(f"{stem}ForCausalLM", (("lm_head.weight", "head.weight"),)),
        "scalar": Task(f"{stem}ForSequenceClassification", (("score.weight", "head.weight"),)),
        "sequence": Task(
            f"{stem}ForSequenceClassification", (("score.weight", "head.output.weight"),), last_token_head
        ),
        "tokens": Task(
            f"{stem}ForTokenClassification",
            (("score.weight", "head.output.weight"), ("score.bias", "head.output.bias")),
            token_head,
        ),
        "span": Task(
            f"{stem}ForQuestionAnswering",
            (("qa_outputs.weight", "head.output.weight"), ("qa_outputs.bias", "head.output.bias")),
            span_head,
            trunk_prefix=span_prefix,
        ),
    }
    return {name: task for name, task in tasks.items() if name in ("language", "scalar", *heads)}


def num_labels(config: HFConfig, default: int = 2) -> int:
    """Number of classes in a config, by transformers' rule."""
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or default)


def last_token_head(config: HFConfig) -> ClassificationHeadSpec:
    """One linear layer without bias on the last token."""
    return ClassificationHeadSpec(num_labels(config), pooling="last", bias=False)


def token_head(config: HFConfig) -> ClassificationHeadSpec:
    """One linear layer on every token."""
    return ClassificationHeadSpec(num_labels(config))


def span_head(config: HFConfig) -> ClassificationHeadSpec:
    """One linear layer on every token with two outputs, start and end of the answer."""
    return ClassificationHeadSpec(2)


# Keys of any family that do not change the forward pass of a decoder. Sampling defaults are among them on purpose: a run
# has its own sampling settings.
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels", "architectures",
        "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "id2label", "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "max_new_tokens",
        "min_length", "model_type", "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
        "pad_token_id", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
        "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
        "transformers_version", "typical_p", "unk_token_id", "use_bfloat16", "use_cache",
    }
)  # fmt: skip

# Keys that change the forward pass, with the values that are supported.
FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),  # a decoder-only model is one either way
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
}


@dataclass(frozen=True)
class Key:
    """A config key that the specification depends on.

    Attributes:
        type: type of its value; an integer also passes for float.
        default: transformers' default.
        least: smallest value allowed.
        nullable: null is allowed; it also is where the default is null.
    """

    type: type
    default: Any
    least: float | None = None
    nullable: bool = False


def read_keys(
    config: HFConfig,
    keys: Mapping[str, Key],
    *,
    harmless: Iterable[str] = (),
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
    by_hand: Iterable[str] = (),
) -> tuple[HFConfig, list[str]]:
    """The values of `keys` with defaults filled in, and every problem found in `config`.

    Args:
        config: a Hugging Face config.
        keys: the keys to read.
        harmless: further keys of this family that do not change the forward pass.
        fixed: further keys with the values that are supported.
        by_hand: keys that the caller reads itself.
    """
    fixed = {**FIXED, **(fixed or {})}
    known = {*keys, *by_hand, *fixed, *HARMLESS, *harmless}
    problems = [
        f"config.json: unknown key {name!r}{hint(name, known)}; a key that is not understood is never ignored"
        for name in config
        if name not in known
    ]
    problems += [
        f"config.json: {name} = {config[name]!r} is not supported, only {' or '.join(map(repr, allowed))}"
        for name, allowed in fixed.items()
        if name in config and config[name] not in allowed
    ]
    values = {name: config.get(name, key.default) for name, key in keys.items()}
    problems += [problem for name, key in keys.items() if (problem := _value_problem(name, values[name], key))]
    return values, problems


def _value_problem(name: str, value: Any, key: Key) -> str | None:
    if value is None and (key.nullable or key.default is None):
        return None
    number = key.type is float and isinstance(value, int) and not isinstance(value, bool)
    if not number and (not isinstance(value, key.type) or (key.type is int and isinstance(value, bool))):
        return f"config.json: {name} must be {key.type.__name__}, got {value!r}"
    if key.least is not None and value is not None and value < key.least:
        return f"config.json: {name} must be at least {key.least:g}, got {value!r}"
    return None


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known names, or an empty text."""
    found = spelling_hint(name, known)
    return f"; {found}" if found else ""


def divides(small: object, large: object) -> bool:
    """Whether `small` divides `large`; False for values of a wrong type, which `read_keys` reports."""
    return isinstance(small, int) and isinstance(large, int) and small > 0 and large % small == 0

"""What a family is, and the strict reading of a config that all share: each key understood, or known to be harmless."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor

from alignment.models.spec import ReadoutSpec, TransformerSpec
from alignment.models.spec_encoder_decoder import EncoderDecoderSpec

# One line of a weight table: Hugging Face name, our name. A tuple on our side: one tensor there, cut along its
# output axis, is several here. {} is a number: of the layer, of the expert.
Name = tuple[str, str | tuple[str, ...]]
Architecture = Literal["decoder", "encoder", "encoder-decoder"]


@dataclass(frozen=True)
class Task:
    """One kind of model that a family has: trunk and head.

    Attributes:
        hf_class: for `architectures` in config.json.
        names: the head's weight table.
        readout: config -> what the head is, for tasks other than language and scalar.
        beside: patterns of tensors of other heads that may lie in the file and are left aside.
        trunk_prefix: what precedes trunk names with this head, where it is not the family's.
        kept: tensors that a new head starts from where the file has them, as BERT's pooler.
    """

    hf_class: str
    names: tuple[Name, ...]
    readout: Callable[[Mapping[str, Any]], ReadoutSpec] | None = None
    beside: tuple[str, ...] = ()
    trunk_prefix: str | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One architecture as Hugging Face writes it.

    Attributes:
        name: `model_type`.
        spec_from_config: config -> specification; raises UserError.
        names: the trunk's weight table.
        trunk_prefix: what precedes trunk names in a file with a head, and is absent in a bare trunk's.
        tasks: by our name: language, scalar, next_sentence, sequence, tokens, span.
        transposed: endings of names whose matrices are stored [in, out].
        interleaved: ending of a name whose rows are cut into several of ours -> how many groups they come in, each
            group with rows of all parts one after the other; without an entry there is one group.
        ignored: patterns of tensors that files carry and that are no weights, or none that this config uses.
        older: endings of names in older files -> what they are called now.
        copies: (name, original) of tensors that files may hold twice; both must then be equal.
        renamed: config -> lines that take the place of lines above, where it decides how files name a tensor.
        zeros: tensors that files may lack, being zeros then.
        fresh_config: values for a new model where transformers' default would not do.
        as_filed: config, tensors -> the config of a file whose tensors tell what its config.json does not.
    """

    name: str
    spec_from_config: Callable[[dict[str, Any]], TransformerSpec | EncoderDecoderSpec]
    names: tuple[Name, ...]
    trunk_prefix: str
    tasks: Mapping[str, Task]
    transposed: tuple[str, ...] = ()
    interleaved: Mapping[str, Callable[[Any], int]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    older: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    renamed: Callable[[Mapping[str, Any]], tuple[Name, ...]] = lambda config: ()
    zeros: tuple[str, ...] = ()
    fresh_config: Mapping[str, Any] = field(default_factory=dict)
    as_filed: Callable[[dict[str, Any], Mapping[str, Tensor]], dict[str, Any]] = lambda config, tensors: config

    @property
    def architecture(self) -> Architecture:
        """Decoder, encoder or encoder-decoder, by the class of the language model."""
        name = self.tasks["language"].hf_class
        return "encoder" if name.endswith("MaskedLM") else "encoder-decoder" if "Conditional" in name else "decoder"

    def prefix(self, task: str) -> str:
        """What precedes the trunk's names in a file with the head of `task`."""
        own = self.tasks[task].trunk_prefix
        return self.trunk_prefix if own is None else own


def decoder_tasks(
    stem: str, heads: Iterable[str] = ("sequence", "tokens"), span_prefix: str | None = None
) -> dict[str, Task]:
    """The tasks of a decoder whose classes are named `stem`ForCausalLM and so on, with the usual names of heads.

    Args:
        heads: which of sequence, tokens and span transformers has a class for.
        span_prefix: what that for span puts before the trunk's names, where it is not the family's.
    """
    tasks = {
        "language": Task(f"{stem}ForCausalLM", (("lm_head.weight", "head.weight"),)),
        "scalar": Task(f"{stem}ForSequenceClassification", (("score.weight", "head.weight"),)),
        "sequence": Task(
            f"{stem}ForSequenceClassification", (("score.weight", "head.output.weight"),), last_token_readout
        ),
        "tokens": Task(
            f"{stem}ForTokenClassification",
            (("score.weight", "head.output.weight"), ("score.bias", "head.output.bias")),
            token_readout,
        ),
        "span": Task(
            f"{stem}ForQuestionAnswering",
            (("qa_outputs.weight", "head.output.weight"), ("qa_outputs.bias", "head.output.bias")),
            span_readout,
            trunk_prefix=span_prefix,
        ),
    }
    return {name: task for name, task in tasks.items() if name in ("language", "scalar", *heads)}


def labels_of(config: Mapping[str, Any], default: int = 2) -> int:
    """Classes of a classifier, as transformers counts them: `default` where nothing is said."""
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or default)


def last_token_readout(config: Mapping[str, Any]) -> ReadoutSpec:
    """One linear layer without bias on the last token."""
    return ReadoutSpec(labels_of(config), pooling="last", bias=False)


def token_readout(config: Mapping[str, Any]) -> ReadoutSpec:
    """One linear layer on every token."""
    return ReadoutSpec(labels_of(config))


def span_readout(config: Mapping[str, Any]) -> ReadoutSpec:
    """One linear layer on every token: does an answer start here, does it end here."""
    return ReadoutSpec(2)


# Keys of any family that change nothing in the forward pass of a decoder. Sampling defaults are among them on purpose:
# how to sample is the run's to say.
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

# Keys that would change the forward pass, with the values that leave it alone.
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
    """A config key we act on: its type, the default transformers gives it, and the least value allowed.

    `nullable`: null is a value of its own; where the default is null it is anyway.
    """

    type: type
    default: Any
    least: float | None = None
    nullable: bool = False


def read_keys(
    config: dict[str, Any],
    keys: Mapping[str, Key],
    *,
    harmless: Iterable[str] = (),
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
    by_hand: Iterable[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The values of `keys`, defaults filled in, and every problem found in `config`.

    Args:
        config: a Hugging Face config.
        harmless: further keys of this family that change nothing.
        fixed: further keys with the only values we can follow.
        by_hand: keys the caller reads itself.
    """
    fixed = {**FIXED, **(fixed or {})}
    known = {*keys, *by_hand, *fixed, *HARMLESS, *harmless}
    problems = [
        f"config.json: unknown key {name!r}{nearest(name, known)}; a key that is not understood is never ignored"
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


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' with the closest known name, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {close[0]!r}?" if close else ""


def divides(small: Any, large: Any) -> bool:
    """Whether `small` goes into `large`; values of a wrong type, reported elsewhere, give False."""
    return isinstance(small, int) and isinstance(large, int) and small > 0 and large % small == 0

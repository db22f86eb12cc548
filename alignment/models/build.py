"""Hugging Face config -> model: the family gives the specs, each spec builds its module."""

from dataclasses import replace
from typing import Any

from alignment.errors import UserError
from alignment.models.classifiers import ScalarModel, SequenceClassifier, TokenClassifier
from alignment.models.encoder_decoder import EncoderDecoderSpec, Seq2SeqClassifier, Seq2SeqModel
from alignment.models.families import family_of
from alignment.models.heads import ClassificationHeadSpec, VocabularyHead, score_labels, score_outputs
from alignment.models.init_weights import initialize
from alignment.models.language_model import LanguageModel, MaskedLanguageModel
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec


def build_model(config: HFConfig, task: str = "language") -> Any:
    """A model with fresh weights, in eval mode.

    Args:
        config: a Hugging Face config, at least {"model_type": ...}. Keys left out have transformers' defaults, but
            dropout is off unless asked for.
        task: language, scalar, next_sentence, sequence, tokens or span, as far as the family has it.

    Raises:
        UserError: unknown family, unknown key, or a value that cannot be; a task the family does not have.
    """
    config = {**family_of(config).new_model_config, **config}
    return initialize(empty_model(config, task))


def build_language_model(config: HFConfig) -> Any:
    """A language model with fresh weights, in eval mode; see `build_model`."""
    return build_model(config, "language")


def build_scalar_model(config: HFConfig) -> ScalarModel:
    """A scalar model (reward or value) with fresh weights; `config` as for `build_model`."""
    return build_model(config, "scalar")


def empty_model(config: HFConfig, task: str) -> Any:
    """A model whose weights are not initialized."""
    family = family_of(config)
    config = dict(config)
    if task not in family.tasks:
        raise UserError(f"{family.name} has no head for {task!r}, only {', '.join(sorted(family.tasks))}")
    head_spec = family.tasks[task].head
    if task == "scalar" and head_spec is not None:  # an encoder's, read where its classes are
        config |= score_labels(score_outputs(config))
        task = "sequence"
    value = family.read(config)
    spec = family.spec(value)
    head_spec = head_spec and head_spec(value)
    if isinstance(spec, EncoderDecoderSpec):
        return _encoder_decoder_model(spec, head_spec, config, task)
    spec = replace(spec, **family.tasks[task].trunk(value))
    trunk = spec.build()
    width = spec.output_width or spec.width
    if task == "scalar":
        return ScalarModel(trunk, config)
    if task == "language" and spec.causal:
        return LanguageModel(trunk, _language_head(spec), config)
    if task in ("language", "next_sentence"):
        next_sentence = None if head_spec is None else head_spec.build(spec.width)
        return MaskedLanguageModel(trunk, _language_head(spec), config, next_sentence)
    assert head_spec is not None
    if task == "sequence":
        assert head_spec.pooling is not None
        return SequenceClassifier(trunk, head_spec.build(width), config, head_spec.pooling)
    return TokenClassifier(trunk, head_spec.build(width), config, task)  # type: ignore[arg-type]


def _encoder_decoder_model(
    spec: EncoderDecoderSpec, classifier: ClassificationHeadSpec | None, config: HFConfig, task: str
) -> Any:
    """An encoder-decoder with its head; a classifier of tokens has the encoder alone."""
    encoder = spec.encoder.build()
    if task == "tokens" and classifier is not None:
        return TokenClassifier(encoder, classifier.build(spec.encoder.width), config, "tokens")
    decoder = spec.decoder.build()
    if classifier is None:
        return Seq2SeqModel(encoder, decoder, _language_head(spec.decoder), config, spec)
    return Seq2SeqClassifier(
        encoder,
        decoder,
        classifier.build(spec.decoder.width),
        config,
        spec,
        task=task,  # type: ignore[arg-type]
    )


def _language_head(spec: TransformerSpec) -> VocabularyHead:
    return spec.head.build(spec.output_width or spec.width, spec.vocabulary)

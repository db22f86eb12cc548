"""Pretraining objectives: the settings, batches and loss function of each. The run is in pretrain.py.

The corruption of the text is in data/pretraining/corruption.py, one objective after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval

from alignment.data.batches import Example, collate
from alignment.data.pretraining.corruption import Masking
from alignment.data.pretraining.prepare import (
    SentencePairBatch,
    collate_masked,
    collate_sentence_pairs,
    collate_seq2seq,
    infilling,
    mask_tokens_of,
    prefix_modeling,
    span_corruption,
)
from alignment.data.text.special_tokens import special_token_template
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.losses.language import distillation_loss, hidden_cosine_loss, label_loss, next_sentence_loss
from alignment.models.outputs import LanguageOutput, LogitsOutput
from alignment.ragged import Ragged, Seq2Seq
from alignment.settings import NonNegativeFloat, PositiveFloat, Rule, Settings
from alignment.training import Collate, LossFn, LossSum
from alignment.training.terms import ONE_SOURCE, Sources

Density = Annotated[float, Interval(gt=0, lt=1)]
MeanSpan = Annotated[float, Ge(1)]


@dataclass(frozen=True)
class Causal:
    """Predict every token from those before it; for decoders (GPT)."""

    kind: Literal["causal"] = "causal"


@dataclass(frozen=True)
class Masked:
    """Predict masked tokens from both sides, other ones in every epoch; for encoders (BERT, RoBERTa, SpanBERT)."""

    kind: Literal["masked"] = "masked"
    masking: Masking = field(default_factory=Masking)


@dataclass(frozen=True)
class SentencePairs:
    """Predict masked tokens of two sentences and whether the second follows the first (BERT); needs a next-sentence head."""

    kind: Literal["sentence_pairs"] = "sentence_pairs"
    masking: Masking = field(default_factory=Masking)


@dataclass(frozen=True)
class SpanCorruption(Settings):
    """Replace spans of the source by sentinels; the decoder predicts the spans (T5).

    Attributes:
        density: share of the tokens in spans.
        mean_span: mean tokens of a span.
    """

    kind: Literal["span_corruption"] = "span_corruption"
    density: Density = 0.15
    mean_span: MeanSpan = 3.0


@dataclass(frozen=True)
class PrefixLM:
    """Predict the rest of a text from its beginning, which the encoder reads (T5's prefix language modeling)."""

    kind: Literal["prefix"] = "prefix"


@dataclass(frozen=True)
class Infilling(Settings):
    """Predict the whole text from one with masked spans (BART).

    Attributes:
        density: share of the tokens in spans.
        mean_span: mean tokens of a span.
    """

    kind: Literal["infilling"] = "infilling"
    density: Density = 0.3
    mean_span: MeanSpan = 3.0


Objective = Causal | Masked | SentencePairs | SpanCorruption | PrefixLM | Infilling


@dataclass(frozen=True)
class DistillationConfig(Settings):
    """A teacher whose distributions the model learns in addition to, or instead of, the text's own tokens.

    loss = soft_coef * T^2 KL(teacher_T || student_T) + hard_coef * -log student(token) + cosine_coef * (1 - cos)

    Attributes:
        teacher: checkpoint of a larger model of the same kind and vocabulary.
        temperature: T, softens both distributions.
        soft_coef, hard_coef: weights of the losses on the teacher's distribution and on the text's tokens.
        cosine_coef: weight of the loss on the angle between the hidden states; both models must be equally wide.
        copy_layers: start from the teacher's embeddings, head and evenly spaced layers instead of random weights.

    Source: Hinton et al. 2015, arXiv:1503.02531; the three terms are Sanh et al. 2019, arXiv:1910.01108, section 2.
    """

    teacher: str
    temperature: PositiveFloat = 2.0
    soft_coef: NonNegativeFloat = 0.5
    hard_coef: NonNegativeFloat = 0.5
    cosine_coef: NonNegativeFloat = 0.0
    copy_layers: bool = False

    RULES = (Rule("soft_coef", lambda c: c.soft_coef + c.cosine_coef == 0, "or cosine_coef must be above 0"),)


LogitsModel = Callable[..., LogitsOutput]


def task_of(objective: Objective) -> str:
    """The task of a family's models that the objective trains."""
    return "next_sentence" if isinstance(objective, SentencePairs) else "language"


def collate_for_objective(
    objective: Objective, tokenizer: Tokenizer, examples: Sequence[Example], *, start_id: int | None, max_length: int
) -> Collate:
    """The function (seeded rows, micro_batch_tokens) -> micro-batches; each row is corrupted by its own generator.

    Args:
        examples: all of them: other sentences come from there, and the number of sentinels that are needed.
        start_id: token that starts the model's decoder; None for a model without one.
        max_length: most tokens of a sentence pair.
    """
    match objective:
        case Causal():
            return lambda rows, micro_batch_tokens: collate([row.row for row in rows], micro_batch_tokens)
        case Masked(masking=masking):
            return partial(collate_masked, masking=masking, mask_tokens=mask_tokens_of(tokenizer))
        case SentencePairs(masking=masking):
            return partial(
                collate_sentence_pairs, passages=examples, template=special_token_template(tokenizer), masking=masking,
                mask_tokens=mask_tokens_of(tokenizer), max_length=max_length,
            )  # fmt: skip
        case SpanCorruption(density=density, mean_span=mean_span):
            corrupt = span_corruption(tokenizer, examples, density=density, mean_span=mean_span)
        case PrefixLM():
            corrupt = prefix_modeling(tokenizer)
        case Infilling(density=density, mean_span=mean_span):
            corrupt = infilling(tokenizer, density=density, mean_span=mean_span)
    assert start_id is not None
    return partial(collate_seq2seq, corrupt=corrupt, start_id=start_id)


def sentence_pair_loss_fn(model: Callable[..., LanguageOutput], sources: Sources = ONE_SOURCE) -> LossFn:
    """Loss function of BERT: for each pair the mean of -log p over its masked tokens, plus its next-sentence loss.

    Source: Devlin et al. 2018, arXiv:1810.04805, appendix A.2.
    """

    def loss_fn(batch: SentencePairBatch) -> LossSum:
        output = model(batch=batch.ragged)
        logits = output.next_sentence_logits
        assert logits is not None  # the family built a next-sentence head
        tokens = -(output.log_probs * batch.token_shares)
        masked = tokens.sum()
        next_sentence = next_sentence_loss(logits, batch.labels)
        correct = (logits.argmax(-1) == batch.labels).float().sum()
        metrics = {"masked_loss": masked, "next_sentence_loss": next_sentence, "next_sentence_accuracy": correct}
        masked_each = tokens.new_zeros(len(batch.labels)).index_add(0, batch.ragged.target_rows, tokens.detach())
        return LossSum(masked + next_sentence, metrics, sources.means(batch, masked_loss=masked_each))

    return loss_fn


def distillation_loss_fn(
    student: LogitsModel, teacher: LogitsModel, config: DistillationConfig, sources: Sources = ONE_SOURCE
) -> LossFn:
    """Loss function of distillation: the terms of `DistillationConfig`, summed over the batch's targets, no other loss."""

    def loss_fn(batch: Ragged | Seq2Seq) -> LossSum:
        with torch.no_grad():
            teacher_output = teacher(batch=batch, return_logits=True)
        output = student(batch=batch, return_logits=True)
        soft_each = distillation_loss(output.logits, teacher_output.logits, temperature=config.temperature)
        soft = soft_each.sum()
        documents = batch.decoder if isinstance(batch, Seq2Seq) else batch
        targets = documents.tokens[documents.target_index] if documents.labels is None else documents.labels
        hard = label_loss(output.logits.float(), targets)
        total = config.soft_coef * soft + config.hard_coef * hard
        metrics = {"soft_loss": soft, "hard_loss": hard}
        if config.cosine_coef:
            assert output.hidden is not None and teacher_output.hidden is not None  # both are models of our own
            metrics["cosine_loss"] = hidden_cosine_loss(output.hidden, teacher_output.hidden).sum()
            total = total + config.cosine_coef * metrics["cosine_loss"]
        return LossSum(total, metrics, sources.means(batch, soft_loss=soft_each))

    return loss_fn

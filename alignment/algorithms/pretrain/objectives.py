"""What a pretraining run learns from its text: each objective's settings, batches and loss. The run is in pretrain.py.

What happens to the text stands in data/corruption.py, one objective after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.data.batches import collate
from alignment.data.pretraining.corruption import Masking
from alignment.data.pretraining.examples import (
    MaskTokens,
    collate_masked,
    collate_seq2seq,
    infilling,
    prefix_modeling,
    span_corruption,
)
from alignment.data.pretraining.next_sentence import SentencePairBatch, collate_sentence_pairs
from alignment.data.text.special_tokens import frame_of
from alignment.losses.distillation import distillation_loss, hidden_cosine_loss
from alignment.ragged import Ragged, Seq2Seq
from alignment.training import Collate, LossSum


@dataclass(frozen=True)
class Causal:
    """Every token from those before it; a decoder's objective."""

    kind: Literal["causal"] = "causal"


@dataclass(frozen=True)
class Masked:
    """Some tokens from both sides, other ones in every epoch; an encoder's objective (BERT, RoBERTa, SpanBERT)."""

    kind: Literal["masked"] = "masked"
    masking: Masking = field(default_factory=Masking)


@dataclass(frozen=True)
class SentencePairs:
    """Masked tokens of two sentences, and whether the second follows the first (BERT); needs a family with that head."""

    kind: Literal["sentence_pairs"] = "sentence_pairs"
    masking: Masking = field(default_factory=Masking)


@dataclass(frozen=True)
class SpanCorruption:
    """Spans cut out of the source, written by the decoder (T5).

    Attributes:
        density: share of the tokens cut out.
        mean_span: mean tokens of a span.
    """

    kind: Literal["span_corruption"] = "span_corruption"
    density: float = 0.15
    mean_span: float = 3.0

    def __post_init__(self) -> None:
        _check_spans(self.density, self.mean_span, usual=0.15)


@dataclass(frozen=True)
class Prefix:
    """The rest of a text from its beginning, which the encoder reads (T5's prefix language modeling)."""

    kind: Literal["prefix"] = "prefix"


@dataclass(frozen=True)
class Infilling:
    """The whole text from one with spans masked (BART); `density` and `mean_span` as for span corruption."""

    kind: Literal["infilling"] = "infilling"
    density: float = 0.3
    mean_span: float = 3.0

    def __post_init__(self) -> None:
        _check_spans(self.density, self.mean_span, usual=0.3)


def _check_spans(density: float, mean_span: float, usual: float) -> None:
    if not 0 < density < 1:
        raise ValueError(f"density must be between 0 and 1, got {density}; {usual} is usual")
    if mean_span < 1:
        raise ValueError(f"mean_span must be at least 1, got {mean_span}; 3 is usual")


Objective = Causal | Masked | SentencePairs | SpanCorruption | Prefix | Infilling


@dataclass(frozen=True)
class DistillationConfig:
    """A teacher whose distributions the model learns beside, or instead of, the text's own tokens.

    loss = soft_coef * T^2 KL(teacher_T || student_T) + hard_coef * -log student(token) + cosine_coef * (1 - cos)

    Attributes:
        teacher: checkpoint of a larger model of the same kind and vocabulary.
        temperature: T, softens both distributions.
        soft_coef, hard_coef: of the teacher's distribution and of the text's tokens.
        cosine_coef: of the angle between the states behind each prediction; both must be equally wide.
        copy_layers: start from the teacher's embeddings, head and evenly spaced layers instead of from nothing.

    Source: Hinton et al. 2015, arXiv:1503.02531; the three terms are Sanh et al. 2019, arXiv:1910.01108, section 2.
    """

    teacher: str
    temperature: float = 2.0
    soft_coef: float = 0.5
    hard_coef: float = 0.5
    cosine_coef: float = 0.0
    copy_layers: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}; 2 is usual")
        if min(self.soft_coef, self.hard_coef, self.cosine_coef) < 0 or self.soft_coef + self.cosine_coef == 0:
            raise ValueError("soft_coef, hard_coef and cosine_coef must not be negative, and the teacher must count")


def task_of(objective: Objective) -> str:
    """Which of a family's models the objective trains."""
    return "next_sentence" if isinstance(objective, SentencePairs) else "language"


def collate_for(
    objective: Objective, tokenizer: Any, examples: Sequence[Any], model: Any, max_length: int, micro_batch_tokens: int
) -> Collate:
    """Draws -> micro-batches, corrupted as each draw's own chance has it.

    Args:
        examples: all that will be drawn, for what must be known before the first batch.
        model: gives the token that starts a decoder.

    Raises:
        UserError: the tokenizer lacks a token that the objective needs.
    """
    match objective:
        case Causal():
            return lambda rows, micro_batch_tokens=micro_batch_tokens: collate(
                [row.row for row in rows], micro_batch_tokens
            )
        case Masked(masking=masking):
            mask_tokens = MaskTokens.of(tokenizer)
            return partial(
                collate_masked, masking=masking, mask_tokens=mask_tokens, micro_batch_tokens=micro_batch_tokens
            )
        case SentencePairs(masking=masking):
            return partial(
                collate_sentence_pairs,
                passages=examples,
                masking=masking,
                mask_tokens=MaskTokens.of(tokenizer),
                template=frame_of(tokenizer),
                max_length=max_length,
                micro_batch_tokens=micro_batch_tokens,
            )
        case SpanCorruption(density=density, mean_span=mean_span):
            corrupt = span_corruption(tokenizer, examples, density=density, mean_span=mean_span)
        case Prefix():
            corrupt = prefix_modeling(tokenizer)
        case Infilling(density=density, mean_span=mean_span):
            corrupt = infilling(tokenizer, density=density, mean_span=mean_span)
    start = model.spec.start_token
    return partial(collate_seq2seq, corrupt=corrupt, start_id=start, micro_batch_tokens=micro_batch_tokens)


def sentence_pair_loss(model: Any) -> Callable[[SentencePairBatch], LossSum]:
    """For each pair the mean of -log p over its masked tokens, plus -log p of whether B follows A.

    Source: Devlin et al. 2018, arXiv:1810.04805, appendix A.2.
    """

    def loss_fn(batch: SentencePairBatch) -> LossSum:
        output = model(batch=batch.ragged)
        masked = -(output.log_probs * batch.token_shares).sum()
        follows = F.cross_entropy(output.next_sentence_logits, batch.labels, reduction="sum")
        right = (output.next_sentence_logits.argmax(-1) == batch.labels).float().sum()
        metrics = {"masked_loss": masked, "next_sentence_loss": follows, "next_sentence_accuracy": right}
        return LossSum(masked + follows, metrics)

    return loss_fn


def distillation_loss_fn(student: Any, teacher: Any, config: DistillationConfig) -> Callable[[Any], LossSum]:
    """The three terms of distillation at every target; see `DistillationConfig`. Experts are not balanced here.

    Args:
        student: the engine's model.
        teacher: frozen, of the same kind; it reads the very batch that the student reads.
    """

    def loss_fn(batch: Ragged | Seq2Seq) -> LossSum:
        with torch.no_grad():
            theirs = teacher(batch=batch, return_logits=True)
        ours = student(batch=batch, return_logits=True)
        soft = distillation_loss(ours.logits, theirs.logits, temperature=config.temperature).sum()
        hard = F.cross_entropy(ours.logits.float(), labels_of(batch), reduction="sum")
        total = config.soft_coef * soft + config.hard_coef * hard
        metrics = {"soft_loss": soft, "hard_loss": hard}
        if config.cosine_coef:
            metrics["cosine_loss"] = hidden_cosine_loss(ours.hidden, theirs.hidden).sum()
            total = total + config.cosine_coef * metrics["cosine_loss"]
        return LossSum(total, metrics)

    return loss_fn


def labels_of(batch: Ragged | Seq2Seq) -> Tensor:
    """What belongs at the batch's targets, [M]."""
    written = batch.decoder if isinstance(batch, Seq2Seq) else batch
    return written.tokens[written.target_index] if written.labels is None else written.labels

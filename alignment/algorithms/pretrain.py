"""Pretraining of a fresh model or a checkpoint with any objective, with or without a teacher or adapter.

The settings of the objectives and of a run, the run, and the batches and loss function of each objective. The
corruption of the text is in data/pretraining/corruption.py, one objective after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Interval

from alignment.adapters.specs import AdapterSpec, refuse_new_tokens
from alignment.algorithms.policies import (
    Policy,
    check_new_tokens,
    load_pretraining_start,
    note_balance,
    save_policy,
    tokenizer_settings,
    with_new_tokens,
)
from alignment.algorithms.runs import check_rows, open_run, prepare_training, sources_of
from alignment.algorithms.sft import language_loss_fn
from alignment.data.batches import Example, collate
from alignment.data.config import DataConfig, Part
from alignment.data.pretraining.corruption import EpochStream, Masking, fixed_seed_rows
from alignment.data.pretraining.prepare import (
    Noise,
    SentencePairBatch,
    SpanBatch,
    check_texts,
    collate_in_one,
    collate_masked,
    collate_sentence_pairs,
    collate_seq2seq,
    collate_spans,
    denoising,
    make_pair,
    mask_tokens_of,
    ordered_pair,
    prefix_modeling,
    prepare_text,
    span_corruption,
)
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Text
from alignment.data.table import Rows, column_of, describe_cache
from alignment.data.text.special_tokens import bos_adder, special_token_template
from alignment.data.text.templates import read_chat_template
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary
from alignment.data.tokenizers.train import SIZED, TokenizerKind, train_tokenizer
from alignment.errors import UserError
from alignment.loading import Checkpoint, find_directory, load_tokenizer, same_vocabulary
from alignment.losses.language import distillation_loss, hidden_cosine_loss, known_logits, label_loss
from alignment.models.build import build_model
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.language_model import LanguageModel
from alignment.models.model import check_lengths
from alignment.models.new_weights import attach_span_boundary, init_from_teacher
from alignment.models.outputs import LanguageOutput, LogitsOutput
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.ragged import Ragged, Seq2Seq
from alignment.settings import NonNegativeFloat, PositiveFloat, Rule, Settings, refusal
from alignment.training import Collate, LossFn, LossSum, OptimConfig, Run, TrainingConfig, fit, held_out_metrics
from alignment.training.distributed import compare_rows
from alignment.training.terms import ONE_SOURCE, Sources

MOST_TOKENS = 10_000_000  # of a vocabulary to train; the largest in use have a few hundred thousand
MODELS = {  # kind of objective -> class of the models that it trains
    "causal": "LanguageModel",
    "masked": "MaskedLanguageModel",
    "sentence_pairs": "MaskedLanguageModel",
    "span_corruption": "Seq2SeqModel",
    "prefix": "Seq2SeqModel",
    "infilling": "Seq2SeqModel",
}
Density = Annotated[float, Interval(gt=0, lt=1)]
MeanSpan = Annotated[float, Ge(1)]


@dataclass(frozen=True)
class Causal:
    """Predict every token from those before it; for decoders (GPT)."""

    kind: Literal["causal"] = "causal"


@dataclass(frozen=True)
class Masked(Settings):
    """Predict masked tokens from both sides, other ones in every epoch; for encoders (BERT, RoBERTa, SpanBERT).

    Attributes:
        boundary_coef: weight of SpanBERT's span-boundary loss, which predicts the tokens of a span from the tokens
            beside it; SpanBERT has 1. Its head is trained with the model and is not part of `output/model`.
    """

    kind: Literal["masked"] = "masked"
    masking: Masking = field(default_factory=Masking)
    boundary_coef: NonNegativeFloat = 0.0

    RULES = (
        Rule(
            "boundary_coef",
            lambda c: c.boundary_coef and c.masking.units != "spans",
            "is the weight of a loss on spans; set masking.units=spans",
        ),
    )


@dataclass(frozen=True)
class SentencePairs:
    """Predict masked tokens of two pieces of text, and of the pair its label; for encoders with a next-sentence head.

    Attributes:
        task: next_sentence: the second piece follows the first, or is of another text (BERT). sentence_order: it
            follows the first, or the two have changed places (ALBERT).

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1; Lan et al. 2020, arXiv:1909.11942, section 3.1.
    """

    kind: Literal["sentence_pairs"] = "sentence_pairs"
    task: Literal["next_sentence", "sentence_order"] = "next_sentence"
    masking: Masking = field(default_factory=Masking)


@dataclass(frozen=True)
class SpanCorruption(Settings):
    """Replace spans of the source by sentinels; the decoder predicts the spans (T5).

    A model that is a decoder alone reads source and target as one document.

    Attributes:
        density: share of the tokens in spans.
        mean_span: mean tokens of a span.
        prefix_mask: of a decoder alone: source tokens see one another in both directions; False: what is before them
            only.
    """

    kind: Literal["span_corruption"] = "span_corruption"
    density: Density = 0.15
    mean_span: MeanSpan = 3.0
    prefix_mask: bool = True


@dataclass(frozen=True)
class PrefixLM:
    """Predict the rest of a text from its beginning, which an encoder reads, or the decoder alone (T5's prefix LM).

    Attributes:
        prefix_mask: of a decoder alone: the beginning's tokens see one another in both directions; False: what is
            before them only.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1.
    """

    kind: Literal["prefix"] = "prefix"
    prefix_mask: bool = True


@dataclass(frozen=True)
class Infilling(Settings):
    """Predict the whole text from one with masked spans, or after other noise (BART).

    Attributes:
        noises: what is done to the text, in this order: spans become one mask token each (infilling), tokens become the
            mask token (masking) or vanish (deletion), sentences change places (permutation), the text begins at a
            random token and ends with its beginning (rotation). The published BART has [permutation, infilling].
        density: share of the tokens in spans, masked or deleted.
        mean_span: mean tokens of a span.

    Source: Lewis et al. 2020, arXiv:1910.13461, section 2.2.
    """

    kind: Literal["infilling"] = "infilling"
    noises: tuple[Noise, ...] = ("infilling",)
    density: Density = 0.3
    mean_span: MeanSpan = 3.0

    RULES = (Rule("noises", lambda c: not c.noises, "must name at least one, such as infilling"),)


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


@dataclass(frozen=True)
class PretrainOptim(OptimConfig):
    """The optimizer and its schedule, with the learning rate of pretraining."""

    learning_rate: PositiveFloat = 1e-3


@dataclass(frozen=True)
class PretrainConfig(Settings):
    """Settings of one pretraining run.

    Attributes:
        data: texts, one document per row.
        output: the run's directory.
        objective: the tokens to predict; `kind` is causal, masked, sentence_pairs, span_corruption, prefix or
            infilling, and must fit the model: decoder, encoder, or encoder-decoder; for span_corruption and prefix
            either of the last and the first.
        model: a fresh model, as the keys of a Hugging Face config.json (`model_type`, `hidden_size` ...); its
            vocabulary and special tokens are taken from the tokenizer.
        policy: continue from this checkpoint instead.
        weights: type of the frozen weights in memory, under an adapter.
        adapter: trained instead of the weights of `policy`, which are frozen; saved as an adapter over them.
        tokenizer: directory of the tokenizer; with `policy` the default is the checkpoint's own.
        add_tokens: new tokens for the vocabulary of `policy`, a decoder; as in SFT.
        vocabulary: train a tokenizer of this size on the data instead.
        tokenizer_kind: kind of the new tokenizer; bytes and characters need no `vocabulary`.
        sentinels: number of tokens <extra_id_0> ... of a new unigram or byte tokenizer, for span corruption.
        chat_template: a built-in name, a file or Jinja text, saved with a new byte-level BPE tokenizer.
        distillation: learn from a teacher as well.
    """

    data: DataConfig
    output: str
    objective: Objective = field(default_factory=Causal)
    model: dict[str, Any] | None = None
    policy: str | None = None
    tokenizer: str | None = None
    add_tokens: tuple[str, ...] = ()
    vocabulary: Annotated[int, Interval(ge=1, le=MOST_TOKENS)] | None = None
    tokenizer_kind: TokenizerKind = "bpe"
    sentinels: Annotated[int, Interval(ge=0, le=MOST_TOKENS)] | None = None
    chat_template: str | None = None
    distillation: DistillationConfig | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    adapter: AdapterSpec | None = None
    optim: PretrainOptim = field(default_factory=PretrainOptim)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    RULES = (
        Rule(
            "policy",
            lambda c: (c.model is None) == (c.policy is None),
            "(a checkpoint) or `model` (a fresh one) must be given, one of the two",
        ),
        Rule(
            "model",
            lambda c: c.model is not None and "model_type" not in c.model,
            "needs model_type, the family, for example llama, bert or t5",
        ),
        Rule(
            "tokenizer",
            lambda c: c.policy is None and (c.tokenizer is None) != c.trains_tokenizer,
            "(a directory) or `vocabulary` (train one of that size) must be given, one of the two",
        ),
        Rule(
            "vocabulary",
            lambda c: c.policy is not None and c.trains_tokenizer,
            "and tokenizer_kind train a new tokenizer, which cannot fit the checkpoint in `policy`",
        ),
        Rule(
            "sentinels",
            lambda c: c.sentinels is not None and c.tokenizer_kind not in ("unigram", "bytes"),
            "are tokens of a new tokenizer of kind unigram or bytes",
        ),
        Rule(
            "chat_template",
            lambda c: c.chat_template is not None and not (c.trains_tokenizer and c.tokenizer_kind == "bpe"),
            "goes with a new tokenizer of kind bpe; another one keeps its own",
        ),
        Rule(
            "add_tokens",
            lambda c: c.add_tokens and c.policy is None,
            "goes with `policy`; a fresh model's tokens are those of its tokenizer",
        ),
        Rule("add_tokens", lambda c: refusal(refuse_new_tokens, c.adapter, c.add_tokens).removeprefix("add_tokens: ")),
        Rule(
            "weights",
            lambda c: refusal(check_weights, c.weights, frozen=c.adapter is not None).removeprefix("weights."),
        ),
        Rule(
            "adapter",
            lambda c: c.adapter is not None and c.policy is None,
            "freezes trained weights, and a fresh model has none; give `policy`, a checkpoint",
        ),
        Rule(
            "distillation",
            lambda c: c.adapter is not None and c.distillation is not None and c.distillation.copy_layers,
            "replaces weights where copy_layers is set, and an adapter leaves them as they are; set it off",
        ),
        Rule(
            "distillation",
            lambda c: c.distillation is not None and c.objective.kind == "sentence_pairs",
            "goes with causal, masked and encoder-decoder objectives, not sentence_pairs",
        ),
        Rule(
            "objective.boundary_coef",
            lambda c: c.boundary_coef and (c.adapter or c.distillation),
            "trains a head of its own, which neither an adapter nor distillation does; set it to 0",
        ),
    )

    @property
    def boundary_coef(self) -> float:
        """Weight of the span-boundary loss; 0 where the objective has none."""
        return self.objective.boundary_coef if isinstance(self.objective, Masked) else 0.0

    @property
    def trains_tokenizer(self) -> bool:
        """True where the run trains its tokenizer."""
        return self.vocabulary is not None or self.tokenizer_kind not in SIZED


def run(config: PretrainConfig) -> Path:
    """Train a language model on running text and return its directory, `output/model`.

    Documents do not see each other. A causal one is BOS, text, end token.
    """
    teacher_source = config.distillation.teacher if config.distillation else None
    with open_run(config, "pretrain", parents=[config.policy, config.tokenizer, teacher_source]) as run:
        if run.finished:
            return run.output / "model"
        if config.add_tokens:
            check_new_tokens(Checkpoint(config.policy or ""))
        tokenizer = find_tokenizer(config)
        train = read_texts(config, tokenizer, run, "train")
        held_out = read_texts(config, tokenizer, run, "evaluation") if config.data.evaluates else []
        policy, teacher = find_models(config, tokenizer)
        check_rows(policy.model, train + held_out, config.data.max_length)
        if config.boundary_coef:
            attach_span_boundary(policy.model)
            run.note("span-boundary head: trained with the model, left out of output/model")
        engine, stream = prepare_training(policy.model.train(), config, train, run)
        note_balance(run, policy.model, added=config.distillation is None)
        sources = sources_of(config.data)
        of_kind = language_loss_fn
        if isinstance(config.objective, SentencePairs):
            of_kind = partial(sentence_pair_loss_fn, task=config.objective.task)
        elif config.boundary_coef:
            of_kind = partial(span_loss_fn, boundary_coef=config.boundary_coef)
        loss_fn = held_out_loss_fn = of_kind(engine.model, sources)
        if config.distillation is not None:
            teacher = teacher.to(engine.process_group.device)
            loss_fn = distillation_loss_fn(engine.model, teacher, config.distillation, sources)
        alone = isinstance(policy.model, LanguageModel)
        start_id = None if alone or MODELS[config.objective.kind] != "Seq2SeqModel" else policy.model.spec.start_token
        collate = partial(
            collate_for_objective, config.objective, tokenizer, start_id=start_id, max_length=config.data.max_length
        )
        if alone and not isinstance(config.objective, Causal):
            check_documents(policy, collate(train), train + held_out)
        evaluate = None
        if held_out:
            rows = fixed_seed_rows(held_out)
            tokens = config.training.tokens_per_forward
            batches = collate(held_out)(rows, micro_batch_tokens=tokens)
            evaluate = partial(held_out_metrics, engine, batches, held_out_loss_fn)
        save = partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size)
        fit(
            engine,
            EpochStream(stream),
            collate(train),
            loss_fn,
            training=config.training,
            run=run,
            evaluate=evaluate,
            save=save,
        )
        return run.output / "model"


def check_documents(policy: Policy, collate: Collate, examples: Sequence[Example]) -> None:
    """Refuse texts whose sources and targets as one document do not fit the model's positions; the longest is made."""
    longest = examples[int(column_of(examples, "longest").argmax())]
    [batch] = collate(fixed_seed_rows([longest]), micro_batch_tokens=1)
    ways = "lower data.max_length, or take a model with a longer context"
    check_lengths(policy.model, [(longest.row_id, max(batch.lengths))], ways)


def read_texts(config: PretrainConfig, tokenizer: Tokenizer, run: Run, part: Part) -> Rows:
    """Examples of one part of the data for the run's objective; rows that were dropped or cut are noted in the run."""
    examples, counts = prepare_text(config.data, config.objective.kind, tokenizer, part)
    for line in (*counts.lines(), *describe_cache(examples)):
        run.note(f"{part} text: {line}")
    if isinstance(config.objective, SentencePairs) and config.objective.task == "next_sentence":
        check_texts(examples, part)
    compare_rows(f"data.{part}", examples)
    return examples


def find_tokenizer(config: PretrainConfig) -> Any:
    """The tokenizer that the config names, or one trained on the run's text."""
    if not config.trains_tokenizer:
        return load_tokenizer(config.tokenizer or config.policy or "", add_tokens=config.add_tokens)
    rows, _ = read_rows(
        config.data.sources("train"), "text", max_rows=config.data.max_rows, on_bad_row=config.data.on_bad_row
    )
    options: dict[str, Any] = {} if config.sentinels is None else {"sentinels": config.sentinels}
    if config.tokenizer_kind == "bpe" and config.objective.kind == "masked":
        options["special_tokens"] = ("<s>", "</s>", "<pad>", "<mask>")
    if config.chat_template is not None:
        options["chat_template"] = read_chat_template(config.chat_template)
    texts = (row.text for row in rows if isinstance(row, Text))
    return train_tokenizer(config.tokenizer_kind, texts, config.vocabulary, **options)


def find_models(config: PretrainConfig, tokenizer: Tokenizer) -> tuple[Policy, Any]:
    """The model to train, and the teacher or None."""
    task = task_of(config.objective)
    distillation = config.distillation
    start_tokenizer = load_tokenizer(config.tokenizer or config.policy or "") if config.add_tokens else tokenizer
    if config.policy is None:
        settings = tokenizer_settings(tokenizer)
        if family_of(config.model or {}).architecture == "encoder-decoder":
            settings["decoder_start_token_id"] = tokenizer.pad_token_id  # T5's custom
        policy = Policy(build_model({**settings, **(config.model or {})}, task), tokenizer)
    elif distillation is not None and distillation.copy_layers:  # written to, and so read whole
        policy = Policy(load_pretrained(find_directory(config.policy), task), start_tokenizer, source=config.policy)
    else:
        policy = load_pretraining_start(
            Checkpoint(config.policy), config.adapter, start_tokenizer, config.output, task=task, weights=config.weights
        )
    if config.add_tokens:
        policy = with_new_tokens(policy, tokenizer, config.add_tokens)
    check_vocabulary(tokenizer, policy.model.spec.vocabulary)
    check_kind(config.objective, policy.model)
    if distillation is None:
        return policy, None
    teacher = load_pretrained(find_directory(distillation.teacher), task).requires_grad_(False)
    check_kind(config.objective, teacher)
    padded_alike = teacher.spec.vocabulary == policy.model.spec.vocabulary
    if not padded_alike and (
        distillation.copy_layers or not same_vocabulary(tokenizer, load_tokenizer(distillation.teacher))
    ):
        raise UserError(
            f"distillation.teacher: {distillation.teacher} has {teacher.spec.vocabulary} tokens, the model "
            f"{policy.model.spec.vocabulary}; a student needs its teacher's tokenizer"
        )
    specs = [
        getattr(model.spec, "decoder", model.spec) for model in (policy.model, teacher) if model.source == "native"
    ]
    if distillation.cosine_coef and (len(specs) < 2 or len({spec.output_width or spec.width for spec in specs}) > 1):
        raise UserError(
            "distillation.cosine_coef compares hidden states: it takes two models of our own families, equally wide; "
            "set 0"
        )
    if distillation.copy_layers:
        init_from_teacher(policy.model, teacher)
    return policy, teacher


def check_kind(objective: Objective, model: Any) -> None:
    """Refuse a model that the objective cannot train, such as an encoder for causal language modeling."""
    class_name = type(model).__name__
    one_document = isinstance(objective, SpanCorruption | PrefixLM) and class_name == "LanguageModel"
    if model.source == "native" and class_name != MODELS[objective.kind] and not one_document:
        other = next(kind for kind, trained in MODELS.items() if trained == class_name)
        raise UserError(
            f"objective.kind {objective.kind!r} does not fit model_type {model.config['model_type']!r}; "
            f"objective.kind: {other} would"
        )


# Batches and losses of the objectives

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
        case Masked(masking=masking, boundary_coef=coef):
            if coef and not all(special_token_template(tokenizer).single):
                raise UserError(
                    "objective.boundary_coef reads the tokens beside a span, and this tokenizer puts none before or "
                    "after a text; take a wordpiece tokenizer, or set it to 0"
                )
            of_rows = collate_spans if coef else collate_masked
            return partial(of_rows, masking=masking, mask_tokens=mask_tokens_of(tokenizer))
        case SentencePairs(task=task, masking=masking):
            make = ordered_pair if task == "sentence_order" else partial(make_pair, passages=examples)
            make = partial(make, template=special_token_template(tokenizer), max_length=max_length)
            return partial(collate_sentence_pairs, make=make, masking=masking, mask_tokens=mask_tokens_of(tokenizer))
        case SpanCorruption(density=density, mean_span=mean_span):
            corrupt = span_corruption(tokenizer, examples, density=density, mean_span=mean_span)
        case PrefixLM():
            corrupt = prefix_modeling(tokenizer)
        case Infilling(noises=noises, density=density, mean_span=mean_span):
            corrupt = denoising(tokenizer, noises=noises, density=density, mean_span=mean_span)
    if start_id is None:
        assert not isinstance(objective, Infilling)  # the kinds that a decoder alone can have
        with_bos = bos_adder(tokenizer)
        return partial(collate_in_one, corrupt=corrupt, with_bos=with_bos, prefix_mask=objective.prefix_mask)
    return partial(collate_seq2seq, corrupt=corrupt, start_id=start_id)


def span_loss_fn(
    model: Callable[..., LanguageOutput], sources: Sources = ONE_SOURCE, *, boundary_coef: float
) -> LossFn:
    """Loss function of SpanBERT: of each masked token -log p from its own state, and from the states beside its span.

    Source: Joshi et al. 2020, arXiv:1907.10529, section 3.2 (L_MLM + L_SBO, `boundary_coef` 1).
    """

    def loss_fn(batch: SpanBatch) -> LossSum:
        output = model(batch=batch.ragged, boundaries=batch.boundaries)
        assert output.boundary_log_probs is not None  # the head was attached
        masked = -output.log_probs.sum()
        boundary = -output.boundary_log_probs.sum()
        metrics = {"masked_loss": masked, "boundary_loss": boundary}
        means = sources.means(batch, masked_loss=-output.log_probs)
        return LossSum(masked + boundary_coef * boundary, metrics, means)

    return loss_fn


def sentence_pair_loss_fn(
    model: Callable[..., LanguageOutput], sources: Sources = ONE_SOURCE, *, task: str = "next_sentence"
) -> LossFn:
    """Loss function of BERT: for each pair the mean of -log p over its masked tokens, plus the loss of its label.

    Metrics of the label are named by the `task`.

    Source: Devlin et al. 2018, arXiv:1810.04805, appendix A.2.
    """

    def loss_fn(batch: SentencePairBatch) -> LossSum:
        output = model(batch=batch.ragged)
        logits = output.next_sentence_logits
        assert logits is not None  # the family built a next-sentence head
        tokens = -(output.log_probs * batch.token_shares)
        masked = tokens.sum()
        label = label_loss(logits, batch.labels)
        correct = (logits.argmax(-1) == batch.labels).float().sum()
        metrics = {"masked_loss": masked, f"{task}_loss": label, f"{task}_accuracy": correct}
        masked_each = tokens.new_zeros(len(batch.labels)).index_add(0, batch.ragged.target_rows, tokens.detach())
        return LossSum(masked + label, metrics, sources.means(batch, masked_loss=masked_each))

    return loss_fn


def distillation_loss_fn(
    student: LogitsModel, teacher: LogitsModel, config: DistillationConfig, sources: Sources = ONE_SOURCE
) -> LossFn:
    """Distillation loss function: the terms of `DistillationConfig`, summed over the batch's targets, no other loss."""

    def loss_fn(batch: Ragged | Seq2Seq) -> LossSum:
        with torch.no_grad():
            teacher_output = teacher(batch=batch, return_logits=True)
        output = student(batch=batch, return_logits=True)
        shared = min(output.logits.shape[-1], teacher_output.logits.shape[-1])  # what is beyond pads one of the two
        both = (known_logits(model_output.logits, shared) for model_output in (output, teacher_output))
        soft_each = distillation_loss(*both, temperature=config.temperature)
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

"""Pretraining from nothing or onwards, by any objective of objectives.py: causal, masked, spans; perhaps with a teacher."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from alignment.algorithms.policies import Policy, language_loss_fn, save_policy
from alignment.algorithms.pretrain.objectives import (
    Causal,
    DistillationConfig,
    Masked,
    Objective,
    SentencePairs,
    collate_for,
    distillation_loss_fn,
    sentence_pair_loss,
    task_of,
)
from alignment.algorithms.runs import check_rows, open_run, stream_of
from alignment.data.pretraining.corruption import EpochStream, fixed_seed_rows
from alignment.data.pretraining.prepare import prepare_text
from alignment.data.rows.read import DataConfig, Part, read_rows
from alignment.data.rows.records import Text
from alignment.data.tokenizers.load import check_vocabulary
from alignment.data.tokenizers.train import TokenizerKind, train_tokenizer
from alignment.errors import UserError
from alignment.loading import find_directory, load_tokenizer
from alignment.models.build import build_model
from alignment.models.distill_init import init_from_teacher
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.training import Engine, OptimConfig, Run, TrainingConfig, fit, held_out_metrics
from alignment.training.ranks import compare_rows

MOST_TOKENS = 10_000_000  # of a vocabulary to train; the largest in use have some hundred thousand
SIZED = ("bpe", "wordpiece", "unigram")  # tokenizers whose vocabulary has the size one asks for


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of one pretraining run.

    Attributes:
        data: running text, one document a row.
        output: the run's directory.
        objective: what is predicted from what; `kind` is causal, masked, sentence_pairs, span_corruption, prefix or
            infilling, and must fit the model: decoder, encoder, or encoder-decoder.
        model: a fresh model, as the keys of a Hugging Face config.json (`model_type`, `hidden_size` ...); its
            vocabulary and special tokens are taken from the tokenizer.
        policy: go on from this checkpoint instead.
        tokenizer: directory of the tokenizer; with `policy` its own is the default.
        vocabulary: train a tokenizer of this size on the data instead.
        tokenizer_kind: of the newly trained one; bytes and characters need no `vocabulary`.
        sentinels: tokens <extra_id_0> ... that a newly trained unigram or byte tokenizer has for span corruption.
        chat_template: Jinja text or file that a newly trained byte-level BPE tokenizer carries along.
        distillation: learn from a teacher too.
    """

    data: DataConfig
    output: str
    objective: Objective = field(default_factory=Causal)
    model: dict[str, Any] | None = None
    policy: str | None = None
    tokenizer: str | None = None
    vocabulary: int | None = None
    tokenizer_kind: TokenizerKind = "bpe"
    sentinels: int | None = None
    chat_template: str | None = None
    distillation: DistillationConfig | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        if self.vocabulary is not None and not 1 <= self.vocabulary <= MOST_TOKENS:
            raise ValueError(f"vocabulary must lie between 1 and {MOST_TOKENS:,} tokens, got {self.vocabulary}")
        if self.sentinels is not None and not 0 <= self.sentinels <= MOST_TOKENS:
            raise ValueError(f"sentinels must lie between 0 and {MOST_TOKENS:,}, got {self.sentinels}; 100 is usual")
        if (self.model is None) == (self.policy is None):
            raise ValueError("give either `model` (start from nothing) or `policy` (go on from a checkpoint)")
        trained = self.vocabulary is not None or self.tokenizer_kind not in SIZED
        if self.policy is None and (self.tokenizer is None) != trained:
            raise ValueError("give either `tokenizer` (a directory) or `vocabulary` (train one of that size)")
        if self.policy is not None and trained:
            raise ValueError("`vocabulary` trains a new tokenizer, which cannot fit the checkpoint in `policy`")
        if self.distillation is not None and isinstance(self.objective, SentencePairs):
            raise ValueError("distillation goes with causal, masked and encoder-decoder objectives, not sentence_pairs")


def run(config: PretrainConfig) -> Path:
    """Train a language model on running text and return its directory, `output/model`.

    Documents do not see each other. A causal one is BOS, text, end token.

    Raises:
        UserError: bad data, tokenizer or model settings, before any training.
    """
    teacher_source = config.distillation.teacher if config.distillation else None
    parents = [name for name in (config.policy, config.tokenizer, teacher_source) if name]
    with open_run(config, "pretrain", parents=parents) as run_directory:
        tokenizer = find_tokenizer(config)
        train = read_texts(config, tokenizer, run_directory, "train")
        held_out = read_texts(config, tokenizer, run_directory, "evaluation") if config.data.evaluation else []
        policy, teacher = find_models(config, tokenizer)
        check_rows(policy.model, train + held_out, config.data.max_length)
        stream, steps = stream_of(train, config.training), config.training.steps(len(train))
        engine = Engine(policy.model.train(), config.optim, config.training, total_steps=steps)
        collate = partial(
            collate_for,
            config.objective,
            tokenizer,
            model=policy.model,
            max_length=config.data.max_length,
            micro_batch_tokens=config.training.micro_batch_tokens,
        )
        if isinstance(config.objective, SentencePairs):
            loss_fn = sentence_pair_loss(engine.model)
        elif config.distillation is not None and teacher is not None:
            loss_fn = distillation_loss_fn(engine.model, teacher.to(engine.process_group.device), config.distillation)
        else:
            loss_fn = language_loss_fn(engine.model)
        evaluate = None
        if held_out:
            held_out_loss = loss_fn if config.distillation is None else language_loss_fn(engine.model)
            batches = collate(examples=held_out)(
                fixed_seed_rows(held_out), micro_batch_tokens=config.training.micro_batch_tokens
            )
            evaluate = partial(held_out_metrics, engine, batches, held_out_loss)
        draws, pack = EpochStream(stream), collate(examples=train)
        save = partial(save_policy, engine, policy, config.output)
        fit(engine, draws, pack, loss_fn, training=config.training, run=run_directory, evaluate=evaluate, save=save)
        return Path(config.output) / "model"


def read_texts(config: PretrainConfig, tokenizer: Any, run: Run, part: Part) -> list[Any]:
    """Examples of one part of the data for the run's objective; what was dropped or cut is noted in the run."""
    examples, counts = prepare_text(config.data, config.objective.kind, tokenizer, part)
    for line in counts.lines():
        run.note(f"{part} text: {line}")
    compare_rows(f"data.{part}", examples)
    return examples


def find_tokenizer(config: PretrainConfig) -> Any:
    """The named tokenizer, or one trained on the run's own text."""
    if config.vocabulary is None and config.tokenizer_kind in SIZED:
        return load_tokenizer(config.tokenizer or config.policy or "")
    rows, _ = read_rows(
        config.data.train,
        "text",
        split=config.data.split,
        columns=config.data.columns,
        max_rows=config.data.max_rows,
        on_bad_row=config.data.on_bad_row,
    )
    texts = (row.text for row in rows if isinstance(row, Text))
    return train_tokenizer(config.tokenizer_kind, texts, config.vocabulary, **tokenizer_options(config))


def tokenizer_options(config: PretrainConfig) -> dict[str, Any]:
    """What the kind of tokenizer is told beside its size."""
    options: dict[str, Any] = {}
    if config.sentinels is not None:
        options["sentinels"] = config.sentinels
    if config.tokenizer_kind == "bpe" and isinstance(config.objective, Masked):
        options["special_tokens"] = ("<s>", "</s>", "<pad>", "<mask>")
    template = config.chat_template
    if template is not None:
        inline = "\n" in template or not Path(template).is_file()
        options["chat_template"] = template if inline else Path(template).read_text(encoding="utf-8")
    return options


def find_models(config: PretrainConfig, tokenizer: Any) -> tuple[Policy, Any]:
    """The model to train, and the teacher or None.

    Raises:
        UserError: the model's kind does not fit the objective, the vocabulary not the model, or the teacher neither.
    """
    task, teacher = task_of(config.objective), None
    if config.policy is None:
        policy = fresh_policy(config, tokenizer, task)
    else:
        policy = Policy(load_pretrained(find_directory(config.policy), task), tokenizer, source=config.policy)
    check_vocabulary(tokenizer, policy.model.spec.vocabulary)
    check_kind(config.objective, policy.model)
    if config.distillation is not None:
        teacher = load_pretrained(find_directory(config.distillation.teacher), task).requires_grad_(False)
        check_kind(config.objective, teacher)
        if teacher.spec.vocabulary != policy.model.spec.vocabulary:
            raise UserError(
                f"distillation.teacher: {config.distillation.teacher} knows {teacher.spec.vocabulary} tokens, the model "
                f"{policy.model.spec.vocabulary}; a student needs its teacher's tokenizer"
            )
        if config.distillation.cosine_coef:
            check_states(policy.model, teacher)
        if config.distillation.copy_layers:
            init_from_teacher(policy.model, teacher)
    return policy, teacher


def check_states(student: Any, teacher: Any) -> None:
    """Refuse what the cosine term cannot compare."""
    if "transformers" in (student.source, teacher.source):
        raise UserError(
            "distillation.cosine_coef needs hidden states, which transformers' own classes do not give; set 0"
        )
    ours, theirs = (getattr(model.spec, "decoder", model.spec) for model in (student, teacher))
    widths = [spec.output_width or spec.width for spec in (ours, theirs)]
    if widths[0] != widths[1]:
        raise UserError(
            f"distillation.cosine_coef compares hidden states, and the student's are {widths[0]} wide, the teacher's "
            f"{widths[1]}; set it to 0, or make them equally wide"
        )


KINDS = {
    "causal": "LanguageModel",
    "masked": "MaskedLanguageModel",
    "sentence_pairs": "MaskedLanguageModel",
    "span_corruption": "Seq2SeqModel",
    "prefix": "Seq2SeqModel",
    "infilling": "Seq2SeqModel",
}
ADVICE = {"LanguageModel": "causal", "MaskedLanguageModel": "masked", "Seq2SeqModel": "span_corruption"}


def check_kind(objective: Objective, model: Any) -> None:
    """Refuse an encoder for a decoder's objective, and so on."""
    found, wanted = type(model).__name__, KINDS[objective.kind]
    if model.source == "native" and found != wanted:
        raise UserError(
            f"objective.kind {objective.kind!r} does not fit model_type {model.config['model_type']!r}; "
            f"objective.kind: {ADVICE[found]} would"
        )


def fresh_policy(config: PretrainConfig, tokenizer: Any, task: str = "language") -> Policy:
    """A model with random weights, its vocabulary that of the tokenizer."""
    if config.model is None or "model_type" not in config.model:
        raise UserError("model.model_type is missing: name the family, for example llama, bert or t5")
    settings = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if KINDS[config.objective.kind] == "Seq2SeqModel":
        settings["decoder_start_token_id"] = tokenizer.pad_token_id  # T5's custom
    return Policy(build_model({**settings, **config.model}, task), tokenizer)

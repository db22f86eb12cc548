"""Pretraining of a fresh model or a checkpoint with any objective of objectives.py, with or without a teacher or adapter."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from alignment.adapters.specs import AdapterSpec, refuse_new_tokens
from alignment.algorithms.policies import (
    Policy,
    check_new_tokens,
    load_pretraining_start,
    save_policy,
    tokenizer_settings,
    with_new_tokens,
)
from alignment.algorithms.pretrain.objectives import (
    Causal,
    DistillationConfig,
    Objective,
    collate_for_objective,
    distillation_loss_fn,
    sentence_pair_loss_fn,
    task_of,
)
from alignment.algorithms.runs import check_rows, open_run, prepare_training, sources_of
from alignment.algorithms.sft import language_loss_fn
from alignment.data.config import DataConfig, Part
from alignment.data.pretraining.corruption import EpochStream, fixed_seed_rows
from alignment.data.pretraining.prepare import prepare_text
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Text
from alignment.data.table import Rows, describe_cache
from alignment.data.text.templates import read_chat_template
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary
from alignment.data.tokenizers.train import SIZED, TokenizerKind, train_tokenizer
from alignment.errors import UserError
from alignment.loading import find_directory, load_tokenizer
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.new_weights import init_from_teacher
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.settings import Rule, Settings, refusal
from alignment.training import OptimConfig, Run, TrainingConfig, fit, held_out_metrics
from alignment.training.distributed import compare_rows

MOST_TOKENS = 10_000_000  # of a vocabulary to train; the largest in use have a few hundred thousand
MODELS = {  # kind of objective -> class of the models that it trains
    "causal": "LanguageModel",
    "masked": "MaskedLanguageModel",
    "sentence_pairs": "MaskedLanguageModel",
    "span_corruption": "Seq2SeqModel",
    "prefix": "Seq2SeqModel",
    "infilling": "Seq2SeqModel",
}


@dataclass(frozen=True)
class PretrainConfig(Settings):
    """Settings of one pretraining run.

    Attributes:
        data: texts, one document per row.
        output: the run's directory.
        objective: the tokens to predict; `kind` is causal, masked, sentence_pairs, span_corruption, prefix or
            infilling, and must fit the model: decoder, encoder, or encoder-decoder.
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
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))
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
    )

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
            check_new_tokens(config.policy or "")
        tokenizer = find_tokenizer(config)
        train = read_texts(config, tokenizer, run, "train")
        held_out = read_texts(config, tokenizer, run, "evaluation") if config.data.evaluates else []
        policy, teacher = find_models(config, tokenizer)
        check_rows(policy.model, train + held_out, config.data.max_length)
        engine, stream = prepare_training(policy.model.train(), config, train, run)
        sources = sources_of(config.data)
        of_kind = sentence_pair_loss_fn if config.objective.kind == "sentence_pairs" else language_loss_fn
        loss_fn = held_out_loss_fn = of_kind(engine.model, sources)
        if config.distillation is not None:
            teacher = teacher.to(engine.process_group.device)
            loss_fn = distillation_loss_fn(engine.model, teacher, config.distillation, sources)
        start_id = policy.model.spec.start_token if MODELS[config.objective.kind] == "Seq2SeqModel" else None
        collate = partial(
            collate_for_objective, config.objective, tokenizer, start_id=start_id, max_length=config.data.max_length
        )
        evaluate = None
        if held_out:
            rows, tokens = fixed_seed_rows(held_out), config.training.tokens_per_forward
            batches = collate(held_out)(rows, micro_batch_tokens=tokens)
            evaluate = partial(held_out_metrics, engine, batches, held_out_loss_fn)
        save = partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size)
        fit(
            engine, EpochStream(stream), collate(train), loss_fn,
            training=config.training, run=run, evaluate=evaluate, save=save,
        )  # fmt: skip
        return run.output / "model"


def read_texts(config: PretrainConfig, tokenizer: Tokenizer, run: Run, part: Part) -> Rows:
    """Examples of one part of the data for the run's objective; rows that were dropped or cut are noted in the run."""
    examples, counts = prepare_text(config.data, config.objective.kind, tokenizer, part)
    for line in (*counts.lines(), *describe_cache(examples)):
        run.note(f"{part} text: {line}")
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
    task, distillation = task_of(config.objective), config.distillation
    own = load_tokenizer(config.tokenizer or config.policy or "") if config.add_tokens else tokenizer
    if config.policy is None:
        settings = tokenizer_settings(tokenizer)
        if MODELS[config.objective.kind] == "Seq2SeqModel":
            settings["decoder_start_token_id"] = tokenizer.pad_token_id  # T5's custom
        policy = Policy(build_model({**settings, **(config.model or {})}, task), tokenizer)
    elif distillation is not None and distillation.copy_layers:  # written to, and so read whole
        policy = Policy(load_pretrained(find_directory(config.policy), task), own, source=config.policy)
    else:
        policy = load_pretraining_start(
            config.policy, config.adapter, own, config.output, task=task, weights=config.weights
        )
    if config.add_tokens:
        policy = with_new_tokens(policy, tokenizer, config.add_tokens)
    check_vocabulary(tokenizer, policy.model.spec.vocabulary)
    check_kind(config.objective, policy.model)
    if distillation is None:
        return policy, None
    teacher = load_pretrained(find_directory(distillation.teacher), task).requires_grad_(False)
    check_kind(config.objective, teacher)
    if teacher.spec.vocabulary != policy.model.spec.vocabulary:
        raise UserError(
            f"distillation.teacher: {distillation.teacher} has {teacher.spec.vocabulary} tokens, the model "
            f"{policy.model.spec.vocabulary}; a student needs its teacher's tokenizer"
        )
    specs = [
        getattr(model.spec, "decoder", model.spec) for model in (policy.model, teacher) if model.source == "native"
    ]
    if distillation.cosine_coef and (len(specs) < 2 or len({spec.output_width or spec.width for spec in specs}) > 1):
        raise UserError(
            "distillation.cosine_coef compares hidden states: it takes two models of our own families, equally wide; set 0"
        )
    if distillation.copy_layers:
        init_from_teacher(policy.model, teacher)
    return policy, teacher


def check_kind(objective: Objective, model: Any) -> None:
    """Refuse a model that the objective cannot train, such as an encoder for causal language modeling."""
    found = type(model).__name__
    if model.source == "native" and found != MODELS[objective.kind]:
        other = next(kind for kind, trained in MODELS.items() if trained == found)
        raise UserError(
            f"objective.kind {objective.kind!r} does not fit model_type {model.config['model_type']!r}; "
            f"objective.kind: {other} would"
        )

"""Fine-tuning for downstream tasks: classes of texts, pairs and words, numbers, question answering, multiple choice."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from alignment.adapters.files import is_adapter
from alignment.adapters.specs import MergeableSpec
from alignment.algorithms.finetune.model import (
    freeze,
    label_config,
    save_classifier,
    set_training_mode,
    start_classifier,
    unwrap,
)
from alignment.algorithms.finetune.scoring import finetune_loss_fn, predict_examples, task_metrics
from alignment.algorithms.policies import tokenizer_settings
from alignment.algorithms.runs import check_rows, open_run, prepare_training
from alignment.data.config import DataConfig, Part
from alignment.data.tasks import (
    FORMATS,
    FinetuneTask,
    Format,
    LabeledExamples,
    TaskFormat,
    add_gpt1_tokens,
    collate_tasks,
    prepare_labeled,
)
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary
from alignment.errors import UserError, raise_all
from alignment.loading import Checkpoint, find_directory, load_tokenizer, set_padding
from alignment.models.families import family_of, is_external_type
from alignment.models.safetensors_files import read_config
from alignment.models.transformer import TransformerSpec
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Rule, Settings, refusal
from alignment.training import Engine, OptimConfig, Run, TrainingConfig, fit
from alignment.training.distributed import compare_rows


@dataclass(frozen=True)
class FinetuneOptim(OptimConfig):
    """The optimizer and its schedule, with the learning rate of downstream tasks."""

    learning_rate: PositiveFloat = 3e-5


@dataclass(frozen=True)
class FinetuneConfig(Settings):
    """Settings of one fine-tuning run.

    Attributes:
        task: classification, pair_classification, regression (a number for a text or pair), token_classification,
            question_answering or multiple_choice; for their columns see `read_labeled` in data/tasks.py.
        data: labeled rows; held-out ones as `evaluation`.
        output: the run's directory.
        policy: checkpoint to start from, encoder, decoder or encoder-decoder; its head is replaced by a new one.
        model: a fresh model instead, as keys of a Hugging Face config.json.
        tokenizer: directory of the tokenizer; with `policy` the default is the checkpoint's own.
        format: "tokenizer": texts and pairs with the tokenizer's own special tokens. "gpt1": GPT-1's start, delimiter
            and extract tokens, added at the vocabulary's end; "gpt1_similarity" reads a pair in both orders. None: gpt1
            for a decoder's pairs, numbers and choices, else tokenizer.
        frozen_trunk: train the head alone (BERT's pooler is part of the head); the trunk has no dropout then.
        language_coef: weight of GPT-1's auxiliary language-model loss, lambda; decoders only; GPT-1 has 0.5.
        weights: type of the frozen weights in memory, under an adapter.
        adapter: train LoRA, DoRA or (IA)^3 on the frozen trunk, and the head; the result is saved merged, in float32
            (into the values of the quantized matrices where `weights.quantize` is set). The embeddings of added tokens
            are not trained then, unless `adapter.token_rows` names them.
        stride: question_answering: tokens from the start of a window over the context to the start of the next.
        max_question: question_answering: tokens that a longer question is truncated to.
        max_answer: question_answering: most tokens of an answer.
        no_answer: question_answering: questions may have no answer.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 4; Radford et al. 2018, section 3.
    """

    task: FinetuneTask
    data: DataConfig
    output: str
    policy: str | None = None
    model: dict[str, Any] | None = None
    tokenizer: str | None = None
    format: Format | None = None
    frozen_trunk: bool = False
    language_coef: NonNegativeFloat = 0.0
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    adapter: MergeableSpec | None = None
    stride: PositiveInt = 128
    max_question: PositiveInt = 64
    max_answer: PositiveInt = 30
    no_answer: bool = False
    optim: FinetuneOptim = field(default_factory=FinetuneOptim)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    RULES = (
        Rule(
            "policy",
            lambda c: (c.model is None) == (c.policy is None),
            "(a checkpoint) or `model` (a fresh one) must be given, one of the two",
        ),
        Rule(
            "model",
            lambda c: c.model is not None and (c.tokenizer is None or "model_type" not in c.model),
            "needs `tokenizer`, a directory, and model.model_type, such as bert",
        ),
        Rule(
            "format",
            lambda c: c.format is not None and c.format not in FORMATS.get(c.task, ("tokenizer",)),
            "{self.format} does not go with task {self.task}",
        ),
        Rule(
            "language_coef",
            lambda c: c.language_coef and (c.task in ("token_classification", "question_answering") or c.frozen_trunk),
            "goes with text and pair classification, regression and multiple choice, and with a trunk that trains",
        ),
        Rule(
            "frozen_trunk",
            lambda c: c.frozen_trunk and c.adapter is not None,
            "leaves nothing for `adapter` to change; leave one of them out",
        ),
        Rule(
            "weights",
            lambda c: refusal(check_weights, c.weights, frozen=c.adapter is not None).removeprefix("weights."),
        ),
        Rule(
            "data",
            lambda c: ", ".join(c.data.unread("mixing", "chat_template", "as_messages")),
            "is read whole, every row once per epoch and alike; leave out {found}",
        ),
    )


def run(config: FinetuneConfig) -> Path:
    """Fine-tune a model and return its directory, `output/model`.

    Each update minimizes the mean of -log p(label) over the labels of the global batch: rows, labeled words, or
    windows; of numbers the mean squared error. Plain transformers opens the result with the class of its head; for
    multiple choice with AutoModelForSequenceClassification, one score for each choice.
    """
    with open_run(config, "finetune", parents=[config.policy, config.tokenizer]) as run:
        if run.finished:
            return run.output / "model"
        source = find_source(config)
        form = choose_format(config, source if isinstance(source, dict) else read_config(source))
        run.note(f"format: {form.format}")
        tokenizer = load_tokenizer(config.tokenizer or config.policy or "")
        if form.format != "tokenizer":
            tokenizer = add_gpt1_tokens(tokenizer)
        train = read_part(config, form, tokenizer, run, "train")
        held_out = (
            read_part(config, form, tokenizer, run, "evaluation", names=train.names) if config.data.evaluates else None
        )
        model = start_classifier(
            tokenizer_settings(tokenizer) | source if isinstance(source, dict) else source,
            form.task,
            label_config(form.task, train.names),
            len(tokenizer),
            config.language_coef > 0,
            adapter=config.adapter,
            weights=config.weights,
        )
        check_vocabulary(tokenizer, unwrap(model).spec.vocabulary)
        examples = train.examples + (held_out.examples if held_out else [])
        check_rows(unwrap(model), examples, config.data.max_length)
        model = freeze(model, config.frozen_trunk, config.adapter)
        engine, stream = prepare_training(model, config, train.examples, run)
        set_training_mode(model, config.frozen_trunk)
        loss_fn = finetune_loss_fn(engine.model, form.task, config.language_coef)
        evaluate = partial(evaluate_task, config, form, engine, held_out) if held_out else None
        finish = partial(save, config, form, engine, tokenizer)
        fit(engine, stream, collate_tasks, loss_fn, training=config.training, run=run, evaluate=evaluate, save=finish)
        return run.output / "model"


def find_source(config: FinetuneConfig) -> Path | dict[str, Any]:
    """The directory of the checkpoint that the model starts from, or the config of a fresh one."""
    if config.policy is None:
        return dict(config.model or {})
    directory = find_directory(config.policy)
    if is_adapter(directory):
        raise UserError(f"{config.policy}: an adapter; `alignment export` merges it into a model to start from")
    if is_external_type(stored := read_config(directory)):
        its = f"{config.policy}: model_type {stored['model_type']!r} runs as transformers' class, of which finetune"
        if Checkpoint(config.policy).architecture != "encoder":
            raise UserError(f"{its} takes encoders only; take an encoder, or a model of our own families")
        if config.adapter is not None:
            raise UserError(f"{its} trains the weights themselves; leave `adapter` out, or set frozen_trunk instead")
    return directory


def choose_format(config: FinetuneConfig, model: Mapping[str, object]) -> TaskFormat:
    """The form of the run's rows: the format asked for, else GPT-1's for a decoder's pairs, numbers and choices.

    `model` is the content of its config.json, which says whether the model is a decoder.
    """
    name = model.get("model_type")
    decoder = False
    if not is_external_type(dict(model)):  # else an encoder
        spec = family_of(dict(model)).spec_from_config(dict(model))
        decoder = isinstance(spec, TransformerSpec) and spec.causal
    if config.format not in (None, "tokenizer") and not decoder:
        raise UserError(f"format={config.format} is a decoder's and {name} is none; leave it out")
    if config.language_coef and not decoder:
        raise UserError(f"language_coef={config.language_coef:g} needs a decoder and {name} is none; set it to 0")
    pairs = config.task in ("pair_classification", "regression", "multiple_choice")
    return TaskFormat(
        config.task,
        config.format or ("gpt1" if decoder and pairs else "tokenizer"),
        config.data.max_length,
        config.stride,
        config.max_question,
        config.max_answer,
        config.no_answer,
    )


def read_part(
    config: FinetuneConfig,
    form: TaskFormat,
    tokenizer: Tokenizer,
    run: Run,
    part: Part,
    *,
    names: dict[int, str] | None = None,
) -> LabeledExamples:
    """The examples of one part of the data, whose labels keep to `names`; dropped or cut rows are noted in the run."""
    prepared = prepare_labeled(config.data, form, tokenizer, part, names=names)
    if form.task == "question_answering" and not form.no_answer:
        raise_all(
            f"{row.row_id}: a question without an answer; set no_answer=true, or leave the row out"
            for row in prepared.rows
            if not row.labels
        )
    for line in prepared.counts.lines():
        run.note(f"{part} {form.task}: {line}")
    compare_rows(f"data.{part}", prepared.examples)
    return prepared


def evaluate_task(
    config: FinetuneConfig, form: TaskFormat, engine: Engine, held_out: LabeledExamples
) -> dict[str, float]:
    """The held-out loss and metrics, keys prefixed `held_out_`; every rank reads all rows."""
    engine.model.eval()
    with engine.backend.autocast():
        logits, loss = predict_examples(engine.model, held_out.examples, form.task, config.training.tokens_per_forward)
    engine.model.train()
    set_training_mode(engine.backend.unwrapped, config.frozen_trunk)
    metrics = {"loss": loss, **task_metrics(form, held_out, logits)}
    if not math.isfinite(loss):  # the highest of logits that are no numbers is the first class
        metrics = dict.fromkeys(metrics, loss)
    return {f"held_out_{name}": value for name, value in metrics.items()}


def save(config: FinetuneConfig, form: TaskFormat, engine: Engine, tokenizer: Tokenizer) -> Path:
    """Write `output/model` and return it; config.json keeps what `predict` needs to read rows."""
    classifier = unwrap(engine.backend.unwrapped)
    if classifier.source == "native":  # another encoder may count its positions from the id of its padding
        set_padding(classifier, tokenizer, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    classifier.config["task_specific_params"] = {"finetune": asdict(form)}
    return save_classifier(engine, tokenizer, config.output, max_shard_size=config.training.max_shard_size)

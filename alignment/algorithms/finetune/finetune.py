"""Fine-tuning for downstream tasks: classification of texts, pairs and words, question answering, multiple choice."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from alignment.adapters.files import is_adapter
from alignment.adapters.specs import MergeableSpec
from alignment.algorithms.finetune.inputs import ENCODE, Format, choose_format, collate_for_task
from alignment.algorithms.finetune.model import (
    classifier_state,
    freeze,
    label_config,
    read_names,
    set_training_mode,
    start_classifier,
    unwrap,
)
from alignment.algorithms.finetune.predict import predict_examples
from alignment.algorithms.finetune.scoring import finetune_loss_fn, label_metrics, question_metrics, word_metrics
from alignment.algorithms.policies import save_output, tokenizer_settings
from alignment.algorithms.runs import check_rows, open_run, prepare_training
from alignment.data.config import DataConfig, Part
from alignment.data.tasks.gpt1_inputs import add_gpt1_tokens
from alignment.data.tasks.prepare import LabeledExamples, prepare_labeled
from alignment.data.tasks.rows import FinetuneTask
from alignment.data.tokenizers.load import check_vocabulary
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.loading import architecture_of, find_directory, load_tokenizer
from alignment.models.families import is_external_type
from alignment.models.huggingface.checkpoint import save_model
from alignment.models.safetensors_files import read_config
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.training import Engine, OptimConfig, Run, TrainingConfig, fit
from alignment.training.distributed import compare_rows


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of one fine-tuning run.

    Attributes:
        task: classification, pair_classification, token_classification, question_answering or multiple_choice; for their
            columns see `read_labeled` in data/tasks/rows.py.
        data: labeled rows; held-out ones as `evaluation`.
        output: the run's directory.
        policy: checkpoint to start from, encoder, decoder or encoder-decoder; its head is replaced by a new one.
        model: a fresh model instead, as keys of a Hugging Face config.json.
        tokenizer: directory of the tokenizer; with `policy` the default is the checkpoint's own.
        format: "tokenizer": texts and pairs with the tokenizer's own special tokens. "gpt1": GPT-1's start, delimiter
            and extract tokens, added at the vocabulary's end; "gpt1_similarity" reads a pair in both orders. None: gpt1
            for a decoder's pairs and choices, else tokenizer.
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
    language_coef: float = 0.0
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    adapter: MergeableSpec | None = None
    stride: int = 128
    max_question: int = 64
    max_answer: int = 30
    no_answer: bool = False
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=3e-5))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        if (self.model is None) == (self.policy is None):
            raise ValueError("give either `model` (start from nothing) or `policy` (go on from a checkpoint)")
        if self.model is not None and (self.tokenizer is None or "model_type" not in self.model):
            raise ValueError("`model` needs `tokenizer`, a directory, and model.model_type, such as bert")
        if self.format is not None and (self.task, self.format) not in ENCODE:
            raise ValueError(f"format={self.format} does not go with task={self.task}")
        if self.language_coef < 0:
            raise ValueError(f"language_coef must be 0 (off) or above, got {self.language_coef}; 0.5 is usual")
        if self.language_coef and (self.task in ("token_classification", "question_answering") or self.frozen_trunk):
            raise ValueError(
                "language_coef goes with text and pair classification and multiple choice, and with a trunk that trains"
            )
        if self.frozen_trunk and self.adapter is not None:
            raise ValueError("frozen_trunk leaves nothing for `adapter` to change; leave one of them out")
        check_weights(self.weights, frozen=self.adapter is not None)
        if unread := self.data.unread("mixing", "loss_weight", "chat_template", "as_messages"):
            raise ValueError(f"data: finetune sees every row once per epoch and alike, without {', '.join(unread)}")
        for name in ("stride", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(config: FinetuneConfig) -> Path:
    """Fine-tune a model and return its directory, `output/model`.

    Each update minimizes the mean of -log p(label) over the labels of the global batch: rows, labeled words, or
    windows. Plain transformers opens the result with the class of its head; for multiple choice with
    AutoModelForSequenceClassification, one score for each choice.

    Raises:
        UserError: bad rows, labels or settings, before a model is loaded; a bad checkpoint.
    """
    with open_run(config, "finetune", parents=[config.policy, config.tokenizer]) as run:
        if run.finished:
            return run.output / "model"
        source = find_source(config)
        model_config = source if isinstance(source, dict) else read_config(source)
        input_format = choose_format(config.format, config.task, model_config, config.language_coef)
        run.note(f"format: {input_format}")
        tokenizer = load_tokenizer(config.tokenizer or config.policy or "")
        tokenizer = tokenizer if input_format == "tokenizer" else add_gpt1_tokens(tokenizer)
        train = read_part(config, input_format, tokenizer, run, "train")
        held_out = None
        if config.data.evaluates:
            held_out = read_part(config, input_format, tokenizer, run, "evaluation", names=train.names)
        if isinstance(source, dict):
            source = tokenizer_settings(tokenizer) | source
        labels = label_config(config.task, train.names)
        model = start_classifier(
            source, config.task, labels, len(tokenizer), config.language_coef > 0,
            adapter=config.adapter, weights=config.weights,
        )  # fmt: skip
        check_vocabulary(tokenizer, unwrap(model).spec.vocabulary)
        examples = train.examples + (held_out.examples if held_out else [])
        check_rows(unwrap(model), examples, config.data.max_length)
        model = freeze(model, config.frozen_trunk, config.adapter)
        engine, stream = prepare_training(model, config, train.examples, run)
        set_training_mode(model, config.frozen_trunk)
        fit(
            engine,
            stream,
            collate_for_task(config.task, input_format),
            finetune_loss_fn(engine.model, config.task, config.language_coef),
            training=config.training,
            run=run,
            evaluate=evaluation(config, input_format, engine, held_out) if held_out else None,
            save=partial(save, config, input_format, engine, model, tokenizer),
        )
        return run.output / "model"


def find_source(config: FinetuneConfig) -> Path | dict[str, Any]:
    """What the model starts from: a checkpoint's directory, or the config of a fresh one.

    Raises:
        UserError: no such checkpoint, an adapter's directory; a decoder that runs as transformers' class, or an adapter
            for an encoder that does.
    """
    if config.policy is None:
        return dict(config.model or {})
    directory = find_directory(config.policy)
    if is_adapter(directory):
        raise UserError(f"{config.policy}: an adapter; `alignment export` merges it into a model to start from")
    if is_external_type(stored := read_config(directory)):
        its = f"{config.policy}: model_type {stored['model_type']!r} runs as transformers' class, of which finetune"
        if architecture_of(config.policy) != "encoder":
            raise UserError(f"{its} takes encoders only; take an encoder, or a model of our own families")
        if config.adapter is not None:
            raise UserError(f"{its} trains the weights themselves; leave `adapter` out, or set frozen_trunk instead")
    return directory


def read_part(
    config: FinetuneConfig,
    input_format: Format,
    tokenizer: Tokenizer,
    run: Run,
    part: Part,
    *,
    names: dict[int, str] | None = None,
) -> LabeledExamples:
    """The examples of one part of the data; rows that were dropped or cut are noted in the run.

    Args:
        names: id2label that the rows must keep to; None: made from the rows.

    Raises:
        UserError: as `prepare_labeled`; questions without an answer where `no_answer` is off.
    """
    asks = config.task == "question_answering"
    options = {"stride": config.stride, "max_question": config.max_question} if asks else {}
    encode = ENCODE[config.task, input_format]
    prepared = prepare_labeled(config.data, config.task, tokenizer, encode, part, names=names, **options)
    if asks and not config.no_answer:
        raise_all(
            f"{row.row_id}: a question without an answer; set no_answer=true, or leave the row out"
            for row in prepared.rows
            if not row.answers
        )
    for line in prepared.counts.lines():
        run.note(f"{part} {config.task}: {line}")
    compare_rows(f"data.{part}", prepared.examples)
    return prepared


def evaluation(
    config: FinetuneConfig, input_format: Format, engine: Engine, held_out: LabeledExamples
) -> Callable[[], dict[str, float]]:
    """A function that returns the held-out loss and metrics, keys prefixed `held_out_`; every rank reads all rows."""
    collate, examples = collate_for_task(config.task, input_format), held_out.examples

    def evaluate() -> dict[str, float]:
        engine.model.eval()
        with engine.backend.autocast():
            logits, loss = predict_examples(
                engine.model, examples, collate, config.task, config.training.tokens_per_forward
            )
        engine.model.train()
        set_training_mode(engine.backend.unwrapped, config.frozen_trunk)
        if config.task == "question_answering":
            metrics = question_metrics(
                examples, logits, held_out.rows, max_answer=config.max_answer, no_answer=config.no_answer
            )
        elif config.task == "token_classification":
            metrics = word_metrics(examples, logits, held_out.names)
        else:
            metrics = label_metrics(examples, logits, config.task, held_out.names)
        return {f"held_out_{name}": value for name, value in {"loss": loss, **metrics}.items()}

    return evaluate


def save(config: FinetuneConfig, input_format: Format, engine: Engine, model: nn.Module, tokenizer: Tokenizer) -> Path:
    """Write `output/model` in Hugging Face layout and return it; config.json keeps what `predict` needs to read rows."""

    def write(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        classifier = unwrap(model)
        # Hugging Face's decoders look for the last token that is no padding; an end token must not count as such.
        pad = tokenizer.pad_token_id
        if classifier.source == "native":  # another encoder may count its positions from the id of its padding
            classifier.config["pad_token_id"] = None if pad == tokenizer.eos_token_id else pad
        kept = ("task", "stride", "max_question", "max_answer", "no_answer")
        settings = {name: getattr(config, name) for name in kept}
        settings |= {"format": input_format, "max_length": config.data.max_length}
        classifier.config["task_specific_params"] = {"finetune": settings}
        state, size = classifier_state(model, dict(tensors)), config.training.max_shard_size
        save_model(classifier, folder, tensors=state.items(), max_shard_size=size)

    names = read_names(model, engine.backend.unwrapped.state_dict())
    return save_output(engine, config.output, tokenizer, names, write)

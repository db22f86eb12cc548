"""Fine-tuning for downstream tasks: classes of texts and pairs, of words, answers in a context, the best of some choices.

Formats and models are in model.py, losses and metrics in scoring.py, use of the result in
predict.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from alignment.adapters import is_adapter
from alignment.adapters.specs import LoRASpec
from alignment.algorithms.finetune.model import (
    ENCODE,
    Format,
    bare,
    choose_format,
    collate_for,
    hold,
    label_settings,
    reader_state,
    start_classifier,
    training_mode,
)
from alignment.algorithms.finetune.scoring import label_loss, label_metrics, question_metrics, read_all
from alignment.algorithms.runs import check_rows, open_run, stream_of
from alignment.data.rows.read import DataConfig, Part
from alignment.data.tasks.gpt1_inputs import add_gpt1_tokens
from alignment.data.tasks.prepare import prepare_labeled
from alignment.data.tasks.rows import FinetuneTask, read_labeled
from alignment.data.tokenizers.load import check_vocabulary, save_tokenizer
from alignment.errors import UserError, raise_all
from alignment.files import atomic_directory
from alignment.loading import find_directory, load_tokenizer
from alignment.models.huggingface.checkpoint import save_model
from alignment.models.safetensors_files import read_config
from alignment.training import Engine, OptimConfig, Run, TrainingConfig, fit
from alignment.training.ranks import compare_rows


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of one run.

    Attributes:
        task: classification, pair_classification, token_classification, question_answering or multiple_choice; for their
            columns see `read_labeled` in data/tasks/rows.py.
        data: labeled rows; held-out ones as `evaluation`.
        output: the run's directory.
        policy: checkpoint to start from, encoder, decoder or both; its head is left aside and a new one drawn.
        model: a fresh model instead, as the keys of a Hugging Face config.json.
        tokenizer: directory of its tokenizer; with `policy` the checkpoint's own is the default.
        format: "tokenizer": texts and pairs between the tokenizer's own special tokens. "gpt1": GPT-1's start, delimiter
            and extract tokens, added at the vocabulary's end; "gpt1_similarity" reads a pair in both orders. None: gpt1
            for a decoder's pairs and choices, else tokenizer.
        frozen_trunk: train the head alone (BERT's pooler is of the head), with no dropout below it.
        language_coef: GPT-1's auxiliary language-model term, lambda; decoders only, 0.5 is theirs.
        adapter: train a LoRA beside the frozen trunk, and the head; the result is saved merged. New marks stay as drawn.
        stride: question_answering: tokens from the start of a window over the context to the start of the next.
        max_question: question_answering: tokens left of a longer question.
        max_answer: question_answering: tokens that an answer may have.
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
    adapter: LoRASpec | None = None
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
            raise ValueError("language_coef goes with sequences, pairs and choices, and with a trunk that trains")
        if self.frozen_trunk and self.adapter is not None:
            raise ValueError("frozen_trunk leaves nothing for `adapter` to change; leave one of them out")
        for name in ("stride", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(config: FinetuneConfig) -> Path:
    """Fine-tune and return the directory of the result, `output/model`.

    Each update minimizes the mean of -log p(label) over the labels of the global batch: rows, labeled words, or
    windows. Plain transformers opens the result with the class of its head; a choice's with
    AutoModelForSequenceClassification, one score for each.

    Raises:
        UserError: bad rows, labels or settings, before a model is loaded; a bad checkpoint.
    """
    with open_run(config, "finetune", parents=[config.policy, config.tokenizer]) as run_directory:
        source = find_source(config)
        settings = source if isinstance(source, dict) else read_config(source)
        form = choose_format(config.format, config.task, settings, config.language_coef)
        run_directory.note(f"format: {form}")
        tokenizer = load_tokenizer(config.tokenizer or config.policy or "")
        tokenizer = tokenizer if form == "tokenizer" else add_gpt1_tokens(tokenizer)
        train, names = read_examples(config, form, tokenizer, run_directory, "train")
        held_out, _ = read_examples(config, form, tokenizer, run_directory, "evaluation", names)
        if isinstance(source, dict):
            source = fresh_settings(tokenizer) | source
        labels = label_settings(config.task, names)
        model = start_classifier(source, config.task, labels, len(tokenizer), config.language_coef > 0)
        check_vocabulary(tokenizer, bare(model).spec.vocabulary)
        check_rows(bare(model), train + held_out, config.data.max_length)
        model = hold(model, config.frozen_trunk, config.adapter)
        stream, steps = stream_of(train, config.training), config.training.steps(len(train))
        engine = Engine(model, config.optim, config.training, total_steps=steps)
        training_mode(model, config.frozen_trunk)
        loss_fn = label_loss(engine.model, config.task, config.language_coef)
        evaluate = evaluation(config, form, engine, held_out, names) if held_out else None
        write = partial(save, config, form, engine, model, tokenizer)
        fit(
            engine, stream, collate_for(config.task, form), loss_fn, training=config.training, run=run_directory,
            evaluate=evaluate, save=write,
        )  # fmt: skip
        return Path(config.output) / "model"


def find_source(config: FinetuneConfig) -> Path | dict[str, Any]:
    """What the model starts from: a checkpoint's directory, or the config of a fresh one.

    Raises:
        UserError: no such checkpoint, or an adapter's directory.
    """
    if config.policy is None:
        return dict(config.model or {})
    directory = find_directory(config.policy)
    if is_adapter(directory):
        raise UserError(f"{config.policy}: an adapter; `alignment export` merges it into a model to start from")
    return directory


def fresh_settings(tokenizer: Any) -> dict[str, Any]:
    """What a fresh model's config has from its tokenizer."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {"vocab_size": len(tokenizer), **special}


def read_examples(
    config: FinetuneConfig, form: Format, tokenizer: Any, run_directory: Run, part: Part,
    names: dict[int, str] | None = None,
) -> tuple[list[Any], dict[int, str]]:  # fmt: skip
    """Examples of one part and the labels by id; what was dropped or cut is noted. No held-out data: no examples.

    Raises:
        UserError: as `prepare_labeled`; questions without an answer where `no_answer` is off.
    """
    if part == "evaluation" and config.data.evaluation is None:
        return [], names or {}
    if config.task == "question_answering" and not config.no_answer:
        raise_all(
            f"{row.row_id}: a question without an answer; set no_answer=true, or leave the row out"
            for row in questions_of(config, part)
            if not row.answers
        )
    options = (
        {"stride": config.stride, "max_question": config.max_question} if config.task == "question_answering" else {}
    )
    examples, counts, found = prepare_labeled(
        config.data, config.task, tokenizer, part, names=names, encode=ENCODE[config.task, form], **options
    )
    for line in counts.lines():
        run_directory.note(f"{part} {config.task}: {line}")
    compare_rows(f"data.{part}", examples)
    return examples, found


def questions_of(config: FinetuneConfig, part: Part) -> list[Any]:
    """The questions behind span examples, by number."""
    data = config.data
    limits = {"columns": data.columns, "max_rows": data.max_rows, "on_bad_row": data.on_bad_row}
    return read_labeled(data.sources(part), "question_answering", split=data.split_of(part), **limits)[0]


def evaluation(
    config: FinetuneConfig, form: Format, engine: Engine, held_out: list[Any], names: dict[int, str]
) -> Callable[[], dict[str, float]]:
    """Metrics of the held-out rows, keys prefixed `held_out_`; every rank reads all of them."""
    collate, task = collate_for(config.task, form), config.task
    questions = questions_of(config, "evaluation") if task == "question_answering" else []

    def evaluate() -> dict[str, float]:
        engine.model.eval()
        with engine.backend.autocast():
            rows, loss = read_all(engine.model, held_out, collate, task, config.training.micro_batch_tokens)
        engine.model.train()
        training_mode(engine.backend.unwrapped, config.frozen_trunk)
        if task == "question_answering":
            metrics = question_metrics(held_out, rows, questions, config.max_answer, config.no_answer)
        else:
            metrics = label_metrics(held_out, rows, task, names)
        return {f"held_out_{name}": value for name, value in {"loss": loss, **metrics}.items()}

    return evaluate


def save(config: FinetuneConfig, form: Format, engine: Engine, model: Any, tokenizer: Any) -> Path:
    """Write `output/model` in Hugging Face layout and return it; how rows are read is in its config, for `predict`."""
    directory = Path(config.output) / "model"
    state = engine.backend.full_state()
    if engine.process_group.is_main:
        reader = bare(model)
        # Hugging Face's classifiers look for the last token that is no padding; an end token must not count as such.
        pad = tokenizer.pad_token_id
        reader.config["pad_token_id"] = None if pad == tokenizer.eos_token_id else pad
        kept = ("task", "stride", "max_question", "max_answer", "no_answer")
        own = {name: getattr(config, name) for name in kept} | {"format": form, "max_length": config.data.max_length}
        reader.config["task_specific_params"] = {"finetune": own}
        with atomic_directory(directory) as folder:
            save_model(reader, folder, state=reader_state(model, state))
            save_tokenizer(tokenizer, folder)
    engine.process_group.barrier()
    return directory

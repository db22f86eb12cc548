"""Pretraining from nothing or onwards: next-token loss on every token of running text. Masked objectives come later."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.algorithms.assemble import Policy, fit_language_model, load_policy, open_run, read_split, save_policy
from alignment.data.records import Text
from alignment.data.sources import DataConfig, read_rows
from alignment.data.tokenizers import check_vocabulary, train_bpe
from alignment.errors import UserError
from alignment.loading import load_tokenizer
from alignment.models.build import build_language_model
from alignment.training import OptimConfig, TrainingConfig


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of one pretraining run.

    Attributes:
        data: running text, one document a row.
        output: the run's directory.
        model: a fresh model, as the keys of a Hugging Face config.json (`model_type`, `hidden_size` ...); its
            vocabulary and special tokens are taken from the tokenizer.
        policy: go on from this checkpoint instead.
        tokenizer: directory of the tokenizer; with `policy` its own is the default.
        vocabulary: train a byte-level BPE of this size on the data instead.
        chat_template: Jinja text or file that a newly trained tokenizer carries along.
    """

    data: DataConfig
    output: str
    model: dict[str, Any] | None = None
    policy: str | None = None
    tokenizer: str | None = None
    vocabulary: int | None = None
    chat_template: str | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        if (self.model is None) == (self.policy is None):
            raise ValueError("give either `model` (start from nothing) or `policy` (go on from a checkpoint)")
        if self.policy is None and (self.tokenizer is None) == (self.vocabulary is None):
            raise ValueError("give either `tokenizer` (a directory) or `vocabulary` (train one of that size)")
        if self.policy is not None and self.vocabulary is not None:
            raise ValueError("`vocabulary` trains a new tokenizer, which cannot fit the checkpoint in `policy`")


def run(config: PretrainConfig) -> Path:
    """Train a language model on running text and return its directory, `output/model`.

    Each document is BOS, text, end token; documents do not see each other.

    Raises:
        UserError: bad data, tokenizer or model settings, before any training.
    """
    parents = [name for name in (config.policy, config.tokenizer) if name]
    with open_run(config, "pretrain", parents=parents) as run_directory:
        tokenizer = find_tokenizer(config)
        train, held_out = read_split(config.data, "text", tokenizer, run_directory)
        policy = (
            fresh_policy(config, tokenizer)
            if config.policy is None
            else load_policy(config.policy, None, config.output)
        )
        check_vocabulary(tokenizer, policy.model.spec.vocabulary)
        engine = fit_language_model(policy, train, held_out, config.optim, config.training, run_directory)
        return save_policy(engine, policy, tokenizer, config.output)


def find_tokenizer(config: PretrainConfig) -> Any:
    """The named tokenizer, or one trained on the run's own text."""
    if config.vocabulary is None:
        return load_tokenizer(config.tokenizer or config.policy or "")
    rows, _ = read_rows(
        config.data.train,
        "text",
        split=config.data.split,
        columns=config.data.columns,
        max_rows=config.data.max_rows,
        on_bad_row=config.data.on_bad_row,
    )
    template = config.chat_template
    if template is not None and "\n" not in template and Path(template).is_file():
        template = Path(template).read_text(encoding="utf-8")
    return train_bpe((row.text for row in rows if isinstance(row, Text)), config.vocabulary, chat_template=template)


def fresh_policy(config: PretrainConfig, tokenizer: Any) -> Policy:
    """A model with random weights, its vocabulary that of the tokenizer."""
    if config.model is None or "model_type" not in config.model:
        raise UserError("model.model_type is missing: name the family, for example llama or gpt2")
    settings = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Policy(build_language_model({**settings, **config.model}))

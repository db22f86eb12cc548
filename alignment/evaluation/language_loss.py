"""Loss, perplexity and bits per byte of a language model on held-out text."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from alignment.data.batches import collate
from alignment.data.config import DataConfig
from alignment.data.tokenize import tokenize_texts
from alignment.errors import UserError
from alignment.evaluation.inputs import read_records
from alignment.files import write_json
from alignment.loading import best_device, load_model, load_tokenizer
from alignment.models.protocols import GenerativeModel
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged


@dataclass(frozen=True)
class LanguageLoss:
    """Held-out next-token loss.

    Attributes:
        loss: mean of -log p over all target tokens, nats per token.
        tokens: target tokens.
        perplexity: exp(loss).
        bits_per_byte: the whole loss in bits over the bytes of the text; comparable between tokenizers. None where the
            number of bytes was not given.
    """

    loss: float
    tokens: int
    perplexity: float
    bits_per_byte: float | None = None


@torch.no_grad()
def language_loss(model: GenerativeModel, batches: Iterable[Ragged], *, text_bytes: int | None = None) -> LanguageLoss:
    """Loss of a language model over ragged batches, averaged over target tokens.

    Args:
        model: called as `model(batch=ragged)`; its `.log_probs` [M] are those of the targets, nats. It is in
            evaluation mode meanwhile.
        batches: moved to the model's device one by one.
        text_bytes: UTF-8 bytes of the text behind all targets.

    Raises:
        UserError: no target token in any batch.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    try:
        for batch in batches:
            log_probs = model(batch=batch.to(device)).log_probs
            total -= log_probs.double().sum().cpu()
            tokens += log_probs.numel()
    finally:
        model.train(was_training)
    if tokens == 0:
        raise UserError("the held-out text has no token to predict; a document needs at least two tokens")
    loss = total / tokens
    bits = None if text_bytes is None else float(total) / (math.log(2) * text_bytes)
    return LanguageLoss(float(loss), tokens, float(loss.exp()), bits)


@dataclass(frozen=True)
class LanguageEvalConfig:
    """Settings of a language model's loss on running text.

    Attributes:
        model: directory or Hub name.
        data: the text.
        output: directory of the results.
        weights: type that the model is held and computes in; auto: the checkpoint's.
    """

    model: str
    data: DataConfig
    output: str
    weights: WeightsConfig = field(default_factory=WeightsConfig)


def run(config: LanguageEvalConfig) -> Path:
    """Next-token loss in nats per token, perplexity and bits per byte, written to `results.json`."""
    rows = read_records(config.data, "text")
    examples, _ = tokenize_texts(rows, load_tokenizer(config.model), config.data.max_length)
    size = sum(len(row.text.encode()) for row in rows)
    model = load_model(config.model, config.weights.dtype, best_device(), quantize=config.weights.quantize)
    loss = language_loss(model, collate(examples, 16_384), text_bytes=size)
    write_json(Path(config.output) / "results.json", asdict(loss))
    return Path(config.output) / "results.json"

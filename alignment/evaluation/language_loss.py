"""Held-out loss, perplexity and bits per byte of a language model, and log-probabilities of the responses of pairs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from alignment.data.batches import Example, collate
from alignment.data.config import DataConfig
from alignment.data.rows.records import Text
from alignment.data.tokenize import tokenize_texts
from alignment.errors import UserError
from alignment.files import write_figures
from alignment.judging.inputs import print_tally, read_records
from alignment.loading import Checkpoint, load_on_best_device, load_tokenizer
from alignment.models.model import Model, evaluation_mode, start_token_of
from alignment.models.outputs import check_numbers
from alignment.models.weights_config import WeightsConfig
from alignment.ragged import Ragged, cut_at_targets, group_by_length, on_float64_device
from alignment.settings import Settings

TOKENS_PER_FORWARD = 16_384


@dataclass(frozen=True)
class LanguageLoss:
    """Held-out next-token loss in nats per target token, its exponential, and the whole loss in bits per byte of text.

    Bits per byte are comparable between tokenizers; None where the number of bytes was not given. A token that nothing
    predicts, the first of a text without BOS, has neither bits nor bytes.
    """

    loss: float
    tokens: int
    perplexity: float
    bits_per_byte: float | None = None


@torch.no_grad()
def language_loss(model: Model, batches: Iterable[Ragged], *, text_bytes: int | None = None) -> LanguageLoss:
    """Loss of a language model over ragged batches, averaged over target tokens.

    `text_bytes` is the size of their UTF-8 text.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    with evaluation_mode(model):
        for batch in batches:
            log_probs = model(batch=batch.to(device)).log_probs
            total -= on_float64_device(log_probs).double().sum().cpu()
            tokens += log_probs.numel()
    check_numbers(total[None], "the held-out text".format, "its log-probability")
    if tokens == 0:
        raise UserError("the held-out text has no token to predict; a document needs at least two tokens")
    loss = total / tokens
    bits = None if text_bytes is None else float(total) / (math.log(2) * text_bytes)
    return LanguageLoss(float(loss), tokens, float(loss.exp()), bits)


@dataclass(frozen=True)
class LanguageEvalConfig(Settings):
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
    loss = loss_on_rows(config.model, rows, config.data.max_length, config.weights)
    return write_figures(Path(config.output) / "results.json", asdict(loss))


def loss_on_rows(source: str, rows: Sequence[Text], max_length: int, weights: WeightsConfig) -> LanguageLoss:
    """`language_loss` of a directory or Hub name, loaded for this call only; UserError where it is no decoder.

    Texts that were cut are counted on standard error.
    """
    if (kind := Checkpoint(source).architecture) != "decoder":
        raise UserError(f"{source}: this model is an {kind}, and the next-token loss of texts is that of a decoder")
    tokenizer = load_tokenizer(source)
    examples, tally = tokenize_texts(rows, tokenizer, max_length)
    print_tally(source, tally)
    # a BOS, which is no text, or else a text's first token, which nothing predicts
    firsts = {example.row_id: example.ids[:1] for example in reversed(examples)}.values()
    unpredicted = sum(len(text.encode()) for text in tokenizer.batch_decode(list(firsts), skip_special_tokens=True))
    size = sum(len(row.text.encode()) for row in rows) - unpredicted
    model = load_on_best_device(source, weights)
    return language_loss(model, collate(examples, TOKENS_PER_FORWARD), text_bytes=size)


@torch.no_grad()
def masked_log_probs(model: Model, documents: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> Tensor:
    """Summed log-probability of each document's masked tokens, nats, [n] float64 on the CPU.

    The model must be in eval mode.
    """
    totals = torch.zeros(len(documents), dtype=torch.float64)
    device = next(model.parameters()).device
    start = start_token_of(model)
    for group in group_by_length([len(ids) for ids in documents], TOKENS_PER_FORWARD):
        batch = Ragged.build([documents[i] for i in group], [masks[i] for i in group])
        read = batch if start is None else cut_at_targets(batch, start)
        log_probs = model(batch=read.to(device)).log_probs.cpu().double()
        totals.index_add_(0, torch.tensor(group)[batch.target_rows], log_probs)
    return totals


def pair_log_probs(model: Model, pairs: Sequence[Example]) -> Tensor:
    """`masked_log_probs` of chosen and rejected responses, [n, 2]."""
    if not pairs:
        raise UserError("comparisons: no pair is left to measure")
    sides = [([p.documents[side] for p in pairs], [p.masks[side] for p in pairs]) for side in (0, 1)]
    log_probs = torch.stack([masked_log_probs(model, documents, masks) for documents, masks in sides], 1)
    check_numbers(log_probs, lambda i: pairs[i].row_id, "the log-probability of a response")
    return log_probs


def compare_pairs(policy: Tensor, reference: Tensor) -> dict[str, float]:
    """Means over held-out comparisons, nats; they compare policies whatever losses they were trained with.

    A change is the policy's log-probability of the whole response minus the reference's; below 0 the chosen responses
    were displaced. `margin` is the change of the chosen minus that of the rejected response, `accuracy` the share of
    pairs with a margin above 0, half of those with 0.

    Args:
        policy, reference: log-probabilities of the same pairs, [n, 2] each, as from `pair_log_probs`.
    """
    change = policy - reference
    margin = change[:, 0] - change[:, 1]
    columns = {
        "chosen_log_prob": policy[:, 0],
        "rejected_log_prob": policy[:, 1],
        "chosen_log_prob_change": change[:, 0],
        "rejected_log_prob_change": change[:, 1],
        "margin": margin,
        "accuracy": (margin > 0).double() + (margin == 0).double() / 2,
    }
    return {name: float(column.mean()) for name, column in columns.items()}

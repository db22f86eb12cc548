"""`alignment inspect saliency`: each text token's share in a model's answer, by gradients and by leaving parts out.

The answer is one number: the log-probability of a continuation, of the next token or of a class, or a reward model's
score. A page and a JSON file beside it are written.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from alignment.adapters.files import is_scalar_adapter
from alignment.analysis.attention import hooked
from alignment.analysis.attribution import gradient_times_input, integrated_gradients
from alignment.analysis.inspection import shown, write_texts
from alignment.data.rows.records import Messages
from alignment.data.text.chat import prompt_ids, response_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.evaluation.behavior import class_names
from alignment.loading import Checkpoint, best_device, load_model, load_tokenizer
from alignment.models.external.models import ExternalModel
from alignment.models.families.family import num_labels
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.model import Model, check_lengths
from alignment.models.outputs import check_numbers
from alignment.models.safetensors_files import read_config
from alignment.ragged import Ragged
from alignment.reports.html import numbers_of
from alignment.reward_model import RewardModel, load_reward_model, member_count
from alignment.reward_model.model import Encoded, batch_scores

Unit = Literal["word", "sentence", "turn"]
UNITS = {  # a sentence ends by . ! ? and the like before a blank, or by 。 ！ ？ and quotation marks behind them
    "word": re.compile(r"\S+\s*"),
    "sentence": re.compile(
        r"\S.*?(?:[.!?\u061f\u0964]+(?=\s|$)|[\u3002\uff01\uff1f\uff61]+[\u300d\u300f\u201d\uff09]*|$)\s*",
        re.DOTALL,
    ),
}
ZERO = "zero"


@dataclass(frozen=True)
class Explained:
    """The number that a model gives a document.

    Attributes:
        name: of the number, for people.
        encode: the document that the model reads for a prompt.
        value: the number of each document of a batch, [B], with a gradient.
        target: tokens at the end of every document, whose log-probability the number is.
    """

    name: str
    model: nn.Module
    tokenizer: Tokenizer
    encode: Callable[[str | Messages], Encoded]
    value: Callable[[Ragged], Tensor]
    target: int = 0

    def batch(self, documents: Sequence[Encoded]) -> Ragged:
        """The documents as the model reads them."""
        masks = [[place >= len(one.ids) - self.target for place in range(len(one.ids))] for one in documents]
        batch = Ragged.build([one.ids for one in documents], masks, segments=[one.segments for one in documents])
        return batch.to(next(self.model.parameters()).device)

    def value_at(self, document: Encoded, vectors: Tensor) -> Tensor:
        """The numbers [S] of S copies of a document whose T tokens have the vectors [S, T, E], whatever their ids."""
        give = partial(_with_vectors, vectors)
        with hooked(table.register_forward_hook(give) for table in token_tables(self.model)):
            return self.value(self.batch([document] * len(vectors)))

    @torch.no_grad()
    def values(self, prompts: Sequence[str | Messages]) -> list[float]:
        """The number of each prompt."""
        return [self.value(self.batch([self.encode(prompt)])).item() for prompt in prompts]


def load_explained(source: str) -> Callable[[str | Messages, str | None], Explained]:
    """A function of a prompt and a target or None: the explained number of the model of a directory or Hub name.

    The model's head decides which number that is. The target is a continuation (None: the most probable token), a
    reward model's response (None: the prompt is the whole text) or a class (None: the most probable one).
    """
    checkpoint = Checkpoint(source)
    device = best_device()
    kind = checkpoint.architecture
    is_single = member_count(checkpoint.directory) == 1
    config = read_config(checkpoint.directory) if is_single and not checkpoint.is_adapter else {}
    is_classifier = str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification")
    has_score = is_classifier and num_labels(config) == 1
    is_score = is_scalar_adapter(checkpoint.directory) if checkpoint.is_adapter else has_score or not is_single
    if kind == "encoder-decoder" or not (is_score or is_classifier or kind == "decoder"):
        raise UserError(f"{source}: saliency reads decoders, classifiers and reward models, and this is an {kind}")
    if is_score:
        return partial(explained_score, load_reward_model(source, device=device))
    tokenizer = load_tokenizer(checkpoint)
    if is_classifier:
        return partial(explained_class, load_pretrained(checkpoint.directory, "sequence", device=device), tokenizer)
    return partial(explained_continuation, load_model(checkpoint, device=device), tokenizer)


@torch.no_grad()
def explained_continuation(model: Model, tokenizer: Tokenizer, prompt: str | Messages, target: str | None) -> Explained:
    """The log-probability of a continuation of the prompt, or of the most probable next token, nats."""
    if target is None:
        ids = torch.tensor([prompt_ids(tokenizer, prompt)], device=next(model.parameters()).device)
        response = [int(model(ids).logits[0, -1].argmax())]
    else:
        response = response_ids(tokenizer, target, prompt, ended=False)
    if not response:
        raise UserError(f"--target {target!r} has no token; give a continuation, or leave it out")
    return Explained(
        f"log-probability of {tokenizer.decode(response)!r}, nats",
        model,
        tokenizer,
        encode=lambda prompt: _one_segment([*prompt_ids(tokenizer, prompt), *response]),
        value=lambda batch: model(batch=batch).log_probs.view(len(batch.lengths), -1).sum(1),
        target=len(response),
    )


def explained_score(reward_model: RewardModel, prompt: str | Messages, response: str | None) -> Explained:
    """A reward model's score of the prompt with a response, or of the prompt as the whole text."""
    if response is None and not isinstance(prompt, str):
        raise UserError("a reward model scores messages with a response: give --target")
    calibration = reward_model.calibration
    network = reward_model.model
    return Explained(
        "score",
        network,
        reward_model.tokenizer,
        encode=lambda prompt: reward_model.encode([str(prompt) if response is None else (prompt, response)])[0],
        value=lambda batch: reward_model.combined(calibration.apply(batch_scores(network, batch))),
    )


@torch.no_grad()
def explained_class(model: Model, tokenizer: Tokenizer, text: str | Messages, label: str | None) -> Explained:
    """The log-probability of a class of the text, or of its most probable one, nats."""
    names = class_names(model.config)
    if not isinstance(text, str) or label not in (None, *names):
        raise UserError(
            f"a classifier reads texts, no messages, and --target is one of {', '.join(names)}, or left out"
        )

    def encode(text: str | Messages) -> Encoded:
        return _one_segment(tokenizer(str(text), truncation=False, verbose=False)["input_ids"])

    if label is None:
        batch = Ragged.build([encode(text).ids]).to(next(model.parameters()).device)
        label = names[int(batch_scores(model, batch).argmax())]
    index = names.index(label)
    return Explained(
        f"log-probability of class {label}, nats",
        model,
        tokenizer,
        encode,
        lambda batch: batch_scores(model, batch).log_softmax(-1)[:, index],
    )


def _one_segment(ids: list[int]) -> Encoded:
    return Encoded(ids, [0] * len(ids))


# Attributions


def token_tables(model: nn.Module) -> list[nn.Module]:
    """The token tables of a model, or of the members of an ensemble; each once."""
    parts = [part for part in model.modules() if isinstance(part, Model)]
    return list(
        dict.fromkeys(
            part.inner.get_input_embeddings() if isinstance(part, ExternalModel) else part.get_submodule("trunk.embed")
            for part in parts
        )
    )


def _with_vectors(vectors: Tensor, table: nn.Module, ids: object, output: Tensor) -> Tensor:
    """The output of a token table with other vectors, [S, T, E], in place of the documents' own."""
    rows = output.view(len(vectors), -1, output.shape[-1])  # tokens of a soft prompt may stand in front
    before = rows[:, : rows.shape[1] - vectors.shape[1]]
    return torch.cat([before, vectors.to(output.dtype)], 1).view_as(output)


def explain_answer(
    explained: Explained, prompt: str | Messages, *, baseline: str = ZERO, unit: Unit = "word"
) -> dict[str, object]:
    """Attributions of a model's answer to a prompt's tokens, and the change by each part left out, as JSON has them.

    Special tokens and the target keep their embeddings and get no attribution, so that the others' sum is the
    difference between the answer to the prompt and to the prompt's tokens at the baseline.

    Args:
        baseline: "zero": vectors of zeros; else a token of the vocabulary, whose vector stands for every token.
        unit: of the parts left out; see `without_each`.
    """
    document = explained.encode(prompt)
    tokenizer = explained.tokenizer
    table = token_tables(explained.model)[0]
    vocabulary = tokenizer.get_vocab()
    length = len(document.ids)
    if baseline != ZERO and baseline not in vocabulary:
        raise UserError(
            f"--baseline {baseline!r}: give {ZERO}, or a token of the vocabulary, such as the padding token"
        )
    check_lengths(explained.model, [("the text", length)], "shorten it")
    ids = explained.batch([document]).tokens
    free = [
        i < length - explained.target and token not in tokenizer.all_special_ids for i, token in enumerate(document.ids)
    ]
    with torch.no_grad():
        inputs = table(ids).float()
        away = torch.zeros_like(inputs) if baseline == ZERO else table(ids.new_tensor(vocabulary[baseline])).float()
        start = torch.where(torch.tensor(free, device=ids.device)[:, None], away, inputs)

    def of_free(values: Tensor) -> list[float | None]:
        return [one if is_free else None for one, is_free in zip(values.tolist(), free, strict=True)]

    value_at = partial(explained.value_at, document)
    attribution = integrated_gradients(value_at, inputs, start)
    parts = without_each(prompt, unit)
    left = explained.values([other for _, other in parts if len(parts) > 1])
    numbers = torch.tensor([[attribution.value, attribution.baseline_value, *attribution.values, *left]])
    check_numbers(numbers, lambda _: repr(prompt), f"the {explained.name}, or its share,")
    return {
        "prompt": prompt,
        "explained": explained.name,
        "value": attribution.value,
        "tokens": shown(tokenizer, document.ids),
        "target_tokens": explained.target,
        "gradient_x_input": of_free(gradient_times_input(value_at, inputs)),
        "integrated_gradients": {
            **attribution._asdict(),
            "values": of_free(attribution.values),
            "baseline": baseline,
            "change": attribution.value - attribution.baseline_value,
        },
        "ablation": {
            "unit": unit,
            "parts": [part for part, _ in parts],
            "values": left,
            "changes": [attribution.value - other for other in left],
        },
    }


def without_each(prompt: str | Messages, unit: Unit) -> list[tuple[str, str | Messages]]:
    """Each word or sentence of a text (of messages, of the last one) or each message, and the prompt without it.

    A message stays in place with an empty content, as templates want the roles in order.
    """
    if unit == "turn":
        if isinstance(prompt, str):
            raise UserError("--drop turn is for messages, and this prompt is a text; take word or sentence")
        empty = [[*prompt[:i], message | {"content": ""}, *prompt[i + 1 :]] for i, message in enumerate(prompt)]
        return [(f"{one['role']}: {one['content']}", other) for one, other in zip(prompt, empty, strict=True)]
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    parts = []
    for part in UNITS[unit].finditer(text):
        other = text[: part.start()] + text[part.end() :] if part.end() < len(text) else text[: part.start()].rstrip()
        whole = other if isinstance(prompt, str) else [*prompt[:-1], prompt[-1] | {"content": other}]
        parts.append((part[0].strip(), whole))
    return parts


def write_saliency(
    model: str,
    prompts: Sequence[str | Messages],
    output: str | Path,
    *,
    targets: Sequence[str] = (),
    baseline: str = ZERO,
    unit: Unit = "word",
) -> Path:
    """Write a page with the attributions of each prompt, and the numbers beside it as JSON; return the page's path.

    Args:
        model: directory or Hub name of a decoder, a classifier or a reward model, or of an adapter of either.
        prompts: texts, or messages, which go through the chat template.
        targets: a continuation, response or class for each prompt, or one for all; none: see `load_explained`.
        baseline, unit: as of `explain_answer`.
    """
    if len(targets) not in (0, 1, len(prompts)) or not prompts:
        raise UserError(f"{len(prompts)} prompts and {len(targets)} --target; give one for all, one for each, or none")
    numbers_of(Path(output))
    explained_of = load_explained(model)
    prompt_targets = targets if len(targets) == len(prompts) else [*targets, None][:1] * len(prompts)
    explanations = [
        explain_answer(explained_of(prompt, target), prompt, baseline=baseline, unit=unit)
        for prompt, target in zip(prompts, prompt_targets, strict=True)
    ]
    return write_texts(output, "saliency.html.jinja", model, explanations)

"""`alignment inspect saliency`: the share of each token of a text in a model's answer, by gradients and by leaving parts out.

The answer is one number: the log-probability of a continuation, of the next token or of a class, or a reward model's score.
A page and a JSON file beside it are written.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from alignment.adapters.files import is_scalar_adapter
from alignment.analysis.attribution import gradient_times_input, integrated_gradients
from alignment.analysis.inspection import TEMPLATES, shown
from alignment.data.rows.records import Messages
from alignment.data.text.chat import prompt_ids, response_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.evaluation.report.html import render_page
from alignment.files import write_json
from alignment.loading import Checkpoint, architecture_of, best_device, load_model, load_tokenizer
from alignment.models.external.models import ExternalModel
from alignment.models.heads import score_outputs
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.model import check_lengths
from alignment.models.native_model import NativeModel
from alignment.models.safetensors_files import read_config
from alignment.ragged import Ragged, group_by_length
from alignment.reward_model import RewardModel, load_reward_model
from alignment.reward_model.model import Encoded, document_scores

Unit = Literal["word", "sentence", "turn"]
UNITS = {"word": re.compile(r"\S+\s*"), "sentence": re.compile(r"\S.*?(?:[.!?]+(?=\s|$)|$)\s*", re.DOTALL)}
ZERO = "zero"
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Answer:
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
        segments = torch.tensor([segment for one in documents for segment in one.segments])
        batch = replace(Ragged.build([one.ids for one in documents], masks), segments=segments)
        return batch.to(next(self.model.parameters()).device)

    @torch.no_grad()
    def values(self, prompts: Sequence[str | Messages]) -> list[float]:
        """The number of each prompt."""
        documents, found = [self.encode(prompt) for prompt in prompts], [0.0] * len(prompts)
        for group in group_by_length([len(one.ids) for one in documents], BATCH_TOKENS):
            for i, number in zip(group, self.value(self.batch([documents[i] for i in group])).tolist(), strict=True):
                found[i] = number
        return found


AnswerOf = Callable[[str | Messages, str | None], Answer]  # (prompt, target) -> what is explained


def load_answers(source: str) -> AnswerOf:
    """The model of a directory or Hub name, by its head: what it answers a prompt, given a target or None.

    The target is a continuation (None: the most probable token), a reward model's response (None: the prompt is the whole
    text) or a class (None: the most probable one).
    """
    checkpoint = Checkpoint(source)
    config = read_config(checkpoint.base)
    classifies = str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification")
    scores = classifies and (score_outputs(config) > 1 or len(config.get("id2label") or (0, 1)) == 1)
    if is_scalar_adapter(checkpoint.directory) if checkpoint.is_adapter else scores:
        reward_model = load_reward_model(source, device=best_device())
        return lambda prompt, target: score_answer(reward_model, target)
    tokenizer = load_tokenizer(source)
    if classifies and not checkpoint.is_adapter:
        classifier = load_pretrained(checkpoint.directory, "sequence", device=best_device())
        return lambda prompt, target: class_answer(classifier, tokenizer, prompt, target)
    if (kind := architecture_of(checkpoint)) != "decoder":
        raise UserError(f"{source}: saliency reads decoders, classifiers and reward models, and this is an {kind}")
    model = load_model(checkpoint, device=best_device())
    return lambda prompt, target: continuation_answer(model, tokenizer, prompt, target)


def continuation_answer(model: nn.Module, tokenizer: Tokenizer, prompt: str | Messages, target: str | None) -> Answer:
    """The log-probability of a continuation of the prompt, or of the most probable next token, nats."""
    if target is None:
        ids = torch.tensor([prompt_ids(tokenizer, prompt)], device=next(model.parameters()).device)
        with torch.no_grad():
            response = [int(model(ids).logits[0, -1].argmax())]
    else:
        response = response_ids(tokenizer, target, prompt, ended=False)

    def encode(prompt: str | Messages) -> Encoded:
        ids = [*prompt_ids(tokenizer, prompt), *response]
        return Encoded(ids, [0] * len(ids))

    def value(batch: Ragged) -> Tensor:
        return model(batch=batch).log_probs.view(len(batch.lengths), -1).sum(1)

    name = f"log-probability of {tokenizer.decode(response)!r}, nats"
    return Answer(name, model, tokenizer, encode, value, len(response))


def score_answer(reward_model: RewardModel, response: str | None) -> Answer:
    """A reward model's score of the prompt with a response, or of the prompt as the whole text."""
    model = reward_model.model
    last_alone = getattr(model, "task", "") == "scalar"

    def encode(prompt: str | Messages) -> Encoded:
        if response is None and not isinstance(prompt, str):
            raise UserError("a reward model scores messages with a response: give --target")
        return reward_model.encode([str(prompt) if response is None else (prompt, response)])[0]

    def value(batch: Ragged) -> Tensor:
        output = model(batch=batch, **({"tokens": batch.last} if last_alone else {}))
        return reward_model.combined(reward_model.calibration.apply(document_scores(output)))

    return Answer("score", model, reward_model.tokenizer, encode, value)


def class_answer(model: nn.Module, tokenizer: Tokenizer, text: str | Messages, label: str | None) -> Answer:
    """The log-probability of a class of the text, or of its most probable one, nats."""
    config = cast(NativeModel | ExternalModel, model).config
    names = config.get("id2label") or {number: f"LABEL_{number}" for number in range(config.get("num_labels") or 2)}
    ids_of = {str(name): int(number) for number, name in names.items()}
    if label is not None and label not in ids_of:
        raise UserError(f"--target {label!r}: the classes are {', '.join(ids_of)}")

    def encode(text: str | Messages) -> Encoded:
        if not isinstance(text, str):
            raise UserError("a classifier reads texts, and this is a list of messages; write it as one text")
        read = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        return Encoded(read, [0] * len(read))

    def log_probs(batch: Ragged) -> Tensor:
        return model(batch=batch).logits.log_softmax(-1)

    answer = Answer("", model, tokenizer, encode, log_probs)
    with torch.no_grad():
        number = int(log_probs(answer.batch([encode(text)])).argmax()) if label is None else ids_of[label]
    name = next(name for name, other in ids_of.items() if other == number)
    return replace(
        answer, name=f"log-probability of class {name}, nats", value=lambda batch: log_probs(batch)[:, number]
    )


# Attributions


def embedding_layers(model: nn.Module) -> list[nn.Module]:
    """The token tables of a model, or of the members of an ensemble; each once."""
    found: dict[nn.Module, None] = {}
    for part in model.modules():
        if isinstance(part, ExternalModel):
            found[part.inner.get_input_embeddings()] = None
        elif isinstance(part, NativeModel):
            found[part.get_submodule("trunk.embed")] = None
    return list(found)


@contextmanager
def replaced_embeddings(layers: Sequence[nn.Module], vectors: Tensor) -> Iterator[None]:
    """Within the block the tables give these vectors of S documents of T tokens, [S, T, E], whatever ids are read."""

    def give(layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
        rows = output.view(len(vectors), -1, output.shape[-1])  # tokens of a soft prompt may stand in front
        before = rows[:, : rows.shape[1] - vectors.shape[1]]
        return torch.cat([before, vectors.to(output.dtype)], 1).view_as(output)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(give))
        yield


def explain(answer: Answer, prompt: str | Messages, *, baseline: str = ZERO, unit: Unit = "word") -> dict[str, object]:
    """Attributions of a model's answer to the tokens of a prompt, and the change by each part left out, as JSON has them.

    Special tokens and the target keep their embeddings and get no attribution, so that the others' sum is the difference
    between the answer to the prompt and to the prompt's tokens at the baseline.

    Args:
        baseline: "zero": vectors of zeros; else a token of the vocabulary, whose vector stands for every token.
        unit: of the parts left out; see `without_each`.
    """
    document, layers, tokenizer = answer.encode(prompt), embedding_layers(answer.model), answer.tokenizer
    check_lengths(answer.model, [("the text", len(document.ids))], "shorten it")
    batch = answer.batch([document])
    places = range(len(document.ids) - answer.target)
    free = [place for place in places if document.ids[place] not in tokenizer.all_special_ids]
    with torch.no_grad():
        inputs = layers[0](batch.tokens).float()
        start = inputs.clone()
        start[free] = (
            0.0 if baseline == ZERO else layers[0](batch.tokens.new_tensor(_token(tokenizer, baseline))).float()
        )

    def value(vectors: Tensor) -> Tensor:
        with replaced_embeddings(layers, vectors):
            return answer.value(answer.batch([document] * len(vectors)))

    found, plain = integrated_gradients(value, inputs, start), gradient_times_input(value, inputs).tolist()
    parts = without_each(prompt, unit)
    left = answer.values([prompt, *(other for _, other in parts)] if len(parts) > 1 else [prompt])
    return {
        "prompt": prompt, "answer": answer.name, "value": left[0],
        "tokens": shown(tokenizer, document.ids), "target_tokens": answer.target,
        "gradient_x_input": [plain[i] if i in free else None for i in range(len(document.ids))],
        "integrated_gradients": {
            "values": [found.values[i].item() if i in free else None for i in range(len(document.ids))],
            "baseline": baseline, "baseline_value": found.baseline_value,
            "change": found.value - found.baseline_value, "residual": found.residual,
            "complete": found.is_complete(), "gradients": found.gradients,
        },
        "ablation": {
            "unit": unit,
            "parts": [part for part, _ in parts], "values": left[1:], "changes": [left[0] - other for other in left[1:]],
        },
    }  # fmt: skip


def _token(tokenizer: Tokenizer, token: str) -> int:
    if token not in tokenizer.get_vocab():
        raise UserError(f"--baseline {token!r}: give {ZERO}, or a token of the vocabulary, such as the padding token")
    return tokenizer.get_vocab()[token]


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
        targets: a continuation, response or class for each prompt, or one for all; none: see `load_answers`.
        baseline, unit: as of `explain`.
    """
    if len(targets) not in (0, 1, len(prompts)) or not prompts:
        raise UserError(f"{len(prompts)} prompts and {len(targets)} --target; give one for all, one for each, or none")
    answer_of, each = (
        load_answers(model),
        list(targets) * (len(prompts) if len(targets) == 1 else 1) or [None] * len(prompts),
    )
    found = [
        explain(answer_of(prompt, target), prompt, baseline=baseline, unit=unit)
        for prompt, target in zip(prompts, each, strict=True)
    ]
    for number, one in enumerate(found, 1):
        if not cast(dict[str, object], one["integrated_gradients"])["complete"]:
            print(f"prompt {number}: integrated gradients are not within 1 % of the difference", file=sys.stderr)
    write_json(Path(output).with_suffix(".json"), {"model": str(model), "texts": found})
    return render_page(Path(output), TEMPLATES / "saliency.html.jinja", title=str(model), texts=found)

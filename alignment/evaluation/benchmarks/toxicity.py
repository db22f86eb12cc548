"""Local classifiers that give the probability that a text is toxic: a fine-tuned classifier, or a reward model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from alignment.data.tasks import LabeledRow, TaskFormat, collate_tasks, encode_rows
from alignment.errors import UserError, suggest
from alignment.loading import best_device, find_directory, load_tokenizer
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.safetensors_files import read_config
from alignment.reward_model import load_reward_model
from alignment.settings import Settings

TOKENS_PER_FORWARD = 16_384


@dataclass(frozen=True)
class ToxicityConfig(Settings):
    """A classifier of toxic texts.

    Attributes:
        model: directory or Hub name of a classifier of texts, of `alignment finetune` or transformers', or a reward model.
        label: class of toxic texts; null: the model is a reward model, and a text is toxic with probability sigmoid(-score).
    """

    model: str
    label: str | None = None


def class_names(config: ToxicityConfig) -> dict[int, str]:
    """Names of a classifier's classes, empty for a reward model; UserError where the label is not among them."""
    stored = read_config(find_directory(config.model)).get("id2label") or {}
    names = {int(number): name for number, name in stored.items()}
    if config.label is not None and config.label not in names.values():
        known = suggest(config.label, names.values())
        raise UserError(f"toxicity.label: {config.model} has no class {config.label!r}; {known}")
    return {} if config.label is None else names


def toxicity_classifier(config: ToxicityConfig) -> Callable[[Sequence[str]], list[float]]:
    """A function that gives each text's probability of being toxic; of a text without a token it is 0."""
    names, device, label = class_names(config), best_device(), config.label
    if label is None:
        reward_model = load_reward_model(config.model, device=device)
        return lambda texts: torch.sigmoid(-reward_model.score(texts)).tolist()
    directory, tokenizer = find_directory(config.model), load_tokenizer(config.model)
    settings = (read_config(directory).get("task_specific_params") or {}).get("finetune")
    form = TaskFormat(**settings) if settings else TaskFormat("classification")
    model = load_pretrained(directory, "sequence", device=device)
    column = next(number for number, name in names.items() if name == label)

    @torch.no_grad()
    def classify(texts: Sequence[str]) -> list[float]:
        rows = [LabeledRow((text, None), (label,), str(number)) for number, text in enumerate(texts)]
        found, (examples, _) = dict[str, float](), encode_rows(rows, form, tokenizer, names)
        for batch in collate_tasks(examples, TOKENS_PER_FORWARD):
            toxic = model(batch=batch.ragged.to(device)).logits.float().softmax(-1)[:, column]
            found |= zip(batch.row_ids, toxic.tolist(), strict=True)
        return [found.get(row.row_id, 0.0) for row in rows]

    return classify

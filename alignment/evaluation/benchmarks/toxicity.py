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


def check_label(config: ToxicityConfig) -> int | None:
    """Number of the toxic class, by config.json alone; None of a reward model."""
    if config.label is None:
        find_directory(config.model)
        return None
    names = read_config(find_directory(config.model)).get("id2label") or {}
    if config.label not in names.values():
        raise UserError(
            f"toxicity.label: {config.model} has no class {config.label!r}; {suggest(config.label, names.values())}"
        )
    return next(int(number) for number, name in names.items() if name == config.label)


def toxicity_classifier(config: ToxicityConfig) -> Callable[[Sequence[str]], list[float]]:
    """A function that gives each text's probability of being toxic; a text without a token is not toxic."""
    label, device = check_label(config), best_device()
    if label is None:
        reward_model = load_reward_model(config.model, device=device)
        return lambda texts: torch.sigmoid(-reward_model.score(texts)).tolist()
    directory, tokenizer = find_directory(config.model), load_tokenizer(config.model)
    settings = (read_config(directory).get("task_specific_params") or {}).get("finetune")
    form = TaskFormat(**settings) if settings else TaskFormat("classification")
    names = {int(number): name for number, name in read_config(directory)["id2label"].items()}
    model = load_pretrained(directory, "sequence", device=device)

    @torch.no_grad()
    def classify(texts: Sequence[str]) -> list[float]:
        rows = [LabeledRow((text, None), (config.label,), str(number)) for number, text in enumerate(texts)]
        found = [0.0] * len(texts)
        examples, _ = encode_rows(rows, form, tokenizer, names)
        for batch in collate_tasks(examples, TOKENS_PER_FORWARD):
            toxic = model(batch=batch.ragged.to(device)).logits.float().softmax(-1)[:, label].tolist()
            for name, probability in zip(batch.row_ids, toxic, strict=True):
                found[int(name)] = probability
        return found

    return classify

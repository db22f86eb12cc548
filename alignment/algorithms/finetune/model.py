"""What Fine-tuning for downstream tasks starts from and leaves behind: formats of rows, the model with its new head.

Losses, metrics and answers are in scoring.py, the run in finetune.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alignment.adapters.lora import attach_lora, lora_layers
from alignment.adapters.specs import LoRASpec
from alignment.data.tasks.classification import collate_classes, collate_token_labels, encode_texts, encode_words
from alignment.data.tasks.gpt1_inputs import (
    collate_multi_sequence,
    encode_gpt1_choices,
    encode_gpt1_similarity,
    encode_gpt1_texts,
)
from alignment.data.tasks.multiple_choice import collate_choices, encode_choices
from alignment.data.tasks.question_answering import collate_spans, encode_questions
from alignment.data.tasks.rows import FinetuneTask
from alignment.errors import UserError
from alignment.losses import chunked_token_log_probs
from alignment.models.build import build_model
from alignment.models.classifiers import pooled
from alignment.models.families import family_of
from alignment.models.heads import VocabularyHead
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.language_model import active_prefix
from alignment.models.layers.padded_layout import take
from alignment.models.outputs import DoubleHeadsOutput
from alignment.models.spec import InitSpec, TransformerSpec
from alignment.ragged import Ragged
from alignment.training import Collate

Format = Literal["tokenizer", "gpt1", "gpt1_similarity"]
HEADS = {  # the task of our model classes that each fine-tuning task trains
    "classification": "sequence",
    "pair_classification": "sequence",
    "token_classification": "tokens",
    "question_answering": "span",
    "multiple_choice": "sequence",
}
ENCODE: dict[tuple[str, str], Callable[..., Any]] = {
    ("classification", "tokenizer"): encode_texts,
    ("classification", "gpt1"): encode_gpt1_texts,
    ("pair_classification", "tokenizer"): encode_texts,
    ("pair_classification", "gpt1"): encode_gpt1_texts,
    ("pair_classification", "gpt1_similarity"): encode_gpt1_similarity,
    ("token_classification", "tokenizer"): encode_words,
    ("question_answering", "tokenizer"): encode_questions,
    ("multiple_choice", "tokenizer"): encode_choices,
    ("multiple_choice", "gpt1"): encode_gpt1_choices,
}


def collate_for(task: FinetuneTask, form: Format) -> Collate:
    """How examples of a task become batches."""
    if form != "tokenizer":
        return collate_multi_sequence
    plain = {
        "token_classification": collate_token_labels,
        "question_answering": collate_spans,
        "multiple_choice": collate_choices,
    }
    return plain.get(task, collate_classes)


def choose_format(form: Format | None, task: FinetuneTask, model: dict[str, Any], language_coef: float) -> Format:
    """The format of a run: what is asked for; else GPT-1's for pairs and choices before a decoder.

    A decoder's tokenizer knows no mark between two texts.

    Args:
        model: the config of the model, for its family.

    Raises:
        UserError: a decoder's format or loss for a model that is none.
    """
    family = family_of(model)
    spec = family.spec_from_config(dict(model))
    decoder = isinstance(spec, TransformerSpec) and spec.causal
    if form not in (None, "tokenizer") and not decoder:
        raise UserError(f"format={form} is a decoder's and {family.name} is none; leave it out")
    if language_coef and not decoder:
        raise UserError(f"language_coef={language_coef:g} needs a decoder and {family.name} is none; set it to 0")
    if form is not None:
        return form
    return "gpt1" if decoder and task in ("pair_classification", "multiple_choice") else "tokenizer"


def label_settings(task: FinetuneTask, names: dict[int, str]) -> dict[str, Any]:
    """What config.json says of the labels."""
    if task == "multiple_choice":
        names = {0: "score"}
    if task == "question_answering":
        names = {0: "LABEL_0", 1: "LABEL_1"}
    by_id, by_name = {str(number): name for number, name in names.items()}, {n: i for i, n in names.items()}
    return {"num_labels": len(names), "id2label": by_id, "label2id": by_name}


class DoubleHeadsModel(nn.Module):
    """A decoder's reader with the language head on the same trunk: one forward gives scores and log-probabilities.

    Attributes:
        reader: sequence classifier; what is saved.
        language_head: tied to the reader's embedding where the family ties it.
    """

    def __init__(self, reader: Any, language_head: VocabularyHead):
        super().__init__()
        self.reader, self.language_head = reader, language_head
        if reader.trunk.spec.tied_head:
            self.language_head.weight = reader.trunk.embed.weight
        self.checkpoint_activations = reader.checkpoint_activations

    def forward(self, *, batch: Ragged) -> DoubleHeadsOutput:
        """Class logits and log-probabilities in one forward."""
        hidden = self.reader.trunk(batch, prefix=active_prefix(self.reader))
        logits = self.reader.head(pooled(hidden, batch, self.reader.pooling))
        before, tokens = take(hidden, batch.target_index - 1), batch.tokens[batch.target_index]
        log_probs, _ = chunked_token_log_probs(self.language_head, before, tokens)
        return DoubleHeadsOutput(logits, log_probs)


def start_classifier(source: Any, task: FinetuneTask, labels: dict[str, Any], rows: int, language: bool) -> Any:
    """The model to train, with a new head.

    Args:
        source: directory of a checkpoint, or the config of a fresh model.
        labels: from `label_settings`.
        rows: tokens that the tokenizer has; a smaller embedding of a decoder gets as many new ones.
        language: keep the checkpoint's language head beside the new one.
    """
    head = HEADS[task]
    if isinstance(source, dict):
        reader = build_model({**source, **labels}, head)
        beside = build_model(source, "language").head if language else None
    else:
        reader = load_pretrained(source, head, new_head=True, config=labels)
        beside = load_pretrained(source, "language").head if language else None
    if isinstance(reader.spec, TransformerSpec) and reader.spec.causal and rows > reader.spec.vocabulary:
        beside = add_tokens(reader, beside, rows)
    return reader if beside is None else DoubleHeadsModel(reader, beside)


@torch.no_grad()
def add_tokens(reader: Any, language_head: Any, rows: int) -> Any:
    """Widen a decoder's vocabulary in place to `rows` tokens, drawn as fresh ones are; returns the language head."""
    trunk, old = reader.trunk, reader.spec.vocabulary
    init = trunk.spec.init
    std = init.std if isinstance(init, InitSpec) else 1.0

    def widened(table: Tensor) -> nn.Parameter:
        new = torch.randn(rows - old, *table.shape[1:], dtype=table.dtype) * (std if table.dim() > 1 else 0.0)
        return nn.Parameter(torch.cat([table, new]))

    trunk.embed.weight, trunk.embed.num_embeddings = widened(trunk.embed.weight), rows
    trunk.spec = replace(trunk.spec, vocabulary=rows)
    reader.config["vocab_size"] = rows
    if language_head is not None:
        for name, table in list(language_head.named_parameters(recurse=False)):
            setattr(language_head, name, widened(table))
        language_head.out_features = rows
    return language_head


def bare(model: Any) -> Any:
    """The reader itself, without a language head beside it."""
    return model.reader if isinstance(model, DoubleHeadsModel) else model


def trunks(model: Any) -> list[nn.Module]:
    """All of a reader but its head."""
    return [part for name, part in bare(model).named_children() if name != "head"]


def hold(model: Any, frozen_trunk: bool, adapter: LoRASpec | None) -> Any:
    """Choose what trains: everything, the head alone, or the head and an update beside the trunk's layers."""
    if adapter is not None:
        attach_lora(model, adapter)
        bare(model).head.requires_grad_(True)
    if frozen_trunk:
        for trunk in trunks(model):
            trunk.requires_grad_(False)
    return model


def training_mode(model: Any, frozen_trunk: bool) -> None:
    """Dropout on; off in a frozen trunk, whose states are to stay what they were."""
    model.train()
    if frozen_trunk:
        for trunk in trunks(model):
            trunk.eval()


def reader_state(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole state of the model as trained -> that of the plain reader, LoRA's updates in its weights."""
    state = {name.removeprefix("reader."): x for name, x in state.items() if not name.startswith("language_head.")}
    merged = {name.replace(".base_layer.", "."): x for name, x in state.items() if ".lora_" not in name}
    for name, layer in lora_layers(bare(model)).items():
        down, up = (state[f"{name}.lora_{side}.default.weight"] for side in "AB")
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + layer.scaling["default"] * up @ down
    return merged


def encode_with(
    task: FinetuneTask, form: Format, rows: Sequence[Any], tokenizer: Any, max_length: int, names: dict[int, str],
    **options: Any,
) -> list[Any]:  # fmt: skip
    """Examples of rows that were not read from a file."""
    encode = partial(ENCODE[task, form], rows, tokenizer, max_length)
    return (
        encode(**options) if task == "question_answering" else encode() if task == "multiple_choice" else encode(names)
    )[0]

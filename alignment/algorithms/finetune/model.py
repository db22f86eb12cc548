"""The model that is fine-tuned: a classification head on a checkpoint's backbone; its trained and its saved weights.

Rows become its inputs in data/tasks.py; losses and metrics are in scoring.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from alignment.adapters.attach import attach, merged_state
from alignment.adapters.specs import MergeableSpec
from alignment.algorithms.policies import save_output, start_device
from alignment.data.tasks import FinetuneTask
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.losses.language import chunked_token_log_probs
from alignment.models.build import build_model
from alignment.models.classifiers import SequenceClassifier, TokenClassifier, pooled
from alignment.models.external.models import ExternalClassifier
from alignment.models.frozen_weights import store_frozen, train_in_float32
from alignment.models.heads import VocabularyHead
from alignment.models.huggingface.checkpoint import load_pretrained, save_model
from alignment.models.huggingface.weight_map import read_parameters
from alignment.models.init_weights import InitSpec
from alignment.models.layers.padded_layout import select_rows
from alignment.models.outputs import DoubleHeadsOutput
from alignment.models.quantization import dequantized, is_quantized
from alignment.models.transformer import TransformerSpec
from alignment.models.weights_config import DEFAULT_WEIGHTS, WeightsConfig
from alignment.ragged import Ragged
from alignment.training import Engine

HEADS = {  # the task of our model classes that each fine-tuning task trains
    "classification": "sequence",
    "pair_classification": "sequence",
    "regression": "sequence",
    "token_classification": "tokens",
    "question_answering": "span",
    "multiple_choice": "sequence",
}


def label_config(task: FinetuneTask, names: dict[int, str]) -> dict[str, Any]:
    """The keys of config.json that describe the labels; numbers, questions and choices have fixed names."""
    fixed = {
        "multiple_choice": {0: "score"},
        "question_answering": {0: "LABEL_0", 1: "LABEL_1"},
        "regression": {0: "LABEL_0"},
    }
    names = fixed.get(task, names)
    by_id = {str(index): name for index, name in names.items()}
    by_name = {n: i for i, n in names.items()}
    problem = {
        "problem_type": "regression" if task == "regression" else None
    }  # None: transformers sees it by the labels
    return {"num_labels": len(names), "id2label": by_id, "label2id": by_name, **problem}


class DoubleHeadsModel(nn.Module):
    """A sequence classifier, which is saved, and a language head on the same decoder, tied where the family ties it."""

    def __init__(self, classifier: SequenceClassifier, language_head: VocabularyHead):
        super().__init__()
        self.classifier = classifier
        self.language_head = language_head
        if classifier.trunk.spec.tied_head:
            self.language_head.weight = classifier.trunk.embed.weight
        self.checkpoint_activations = classifier.checkpoint_activations

    def forward(self, *, batch: Ragged) -> DoubleHeadsOutput:
        """Class logits and log-probabilities in one forward."""
        read = self.classifier.read(self.classifier.trunk, batch, prefix=self.classifier.active_prefix())
        logits = self.classifier.head(pooled(read.states, read.batch, self.classifier.pooling))
        before = select_rows(read.states, read.batch.before)
        tokens = batch.tokens[batch.target_index]
        return DoubleHeadsOutput(logits, chunked_token_log_probs(self.language_head, before, tokens).log_probs)


def start_classifier(
    source: Path | dict[str, Any],
    task: FinetuneTask,
    labels: dict[str, Any],
    vocabulary: int,
    language: bool,
    *,
    adapter: MergeableSpec | None = None,
    weights: WeightsConfig = DEFAULT_WEIGHTS,
) -> nn.Module:
    """The model to train, with a new classification head.

    Weights are float32; under an adapter all but the classification head are frozen and held as `weights` says.

    Args:
        source: directory of a checkpoint, or the config of a fresh model.
        vocabulary: tokens of the tokenizer; a decoder with a smaller embedding is resized.
        language: keep the checkpoint's language head, for the auxiliary language-model loss.
    """
    head = HEADS[task]
    device = start_device(adapter, weights)
    dtype = torch.float32 if adapter is None else None  # None: the checkpoint's
    if isinstance(source, dict):
        classifier = build_model({**source, **labels}, head)
        language_head = build_model(source, "language").head if language else None
    else:
        classifier = load_pretrained(source, head, dtype, device, new_head=True, config=labels)
        language_head = load_pretrained(source, "language", dtype, device).head if language else None
    parts = [part for part in (classifier, language_head) if part is not None]
    spec = classifier.spec
    if isinstance(spec, TransformerSpec) and spec.causal and vocabulary > spec.vocabulary:
        for part in parts:  # new rows are added to the values
            read_parameters(part)
        resize_vocabulary(classifier, language_head, vocabulary)
    if adapter is not None:
        for part in parts:
            store_frozen(part, weights)
    return classifier if language_head is None else DoubleHeadsModel(classifier, language_head)


@torch.no_grad()
def resize_vocabulary(
    classifier: SequenceClassifier | TokenClassifier, language_head: VocabularyHead | None, vocabulary: int
) -> None:
    """Widen a decoder's embedding and language head in place to `vocabulary` tokens, initialized as in a new model."""
    trunk = classifier.trunk
    old = classifier.trunk.spec.vocabulary
    init = trunk.spec.init
    std = init.std if isinstance(init, InitSpec) else 1.0

    def widened(table: Tensor) -> nn.Parameter:
        new = torch.randn(vocabulary - old, *table.shape[1:]) * (std if table.dim() > 1 else 0.0)
        return nn.Parameter(torch.cat([table, new]))

    trunk.embed.weight = widened(trunk.embed.weight)
    trunk.embed.num_embeddings = vocabulary
    classifier.spec = trunk.spec = replace(trunk.spec, vocabulary=vocabulary)
    classifier.config["vocab_size"] = vocabulary
    if language_head is not None:
        for name, table in list(language_head.named_parameters(recurse=False)):
            setattr(language_head, name, widened(table))
        language_head.out_features = vocabulary


def unwrap(model: nn.Module) -> Any:
    """The classifier itself, without a language head."""
    return model.classifier if isinstance(model, DoubleHeadsModel) else model


def backbone_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of a classifier but its head."""
    classifier = unwrap(model)
    trunk = classifier.inner.base_model if isinstance(classifier, ExternalClassifier) else classifier
    return [module for name, module in trunk.named_children() if name not in ("head", "pooler")]


def freeze(model: nn.Module, frozen_trunk: bool, adapter: MergeableSpec | None) -> nn.Module:
    """Freeze the trunk or attach an adapter, as the config asks; the head trains in any case."""
    if adapter is not None:
        model.requires_grad_(False)
        attach(unwrap(model), adapter)
        unwrap(model).head.requires_grad_(True)
        train_in_float32(model)
    if frozen_trunk:
        for module in backbone_modules(model):
            module.requires_grad_(False)
    return model


def set_training_mode(model: nn.Module, frozen_trunk: bool) -> None:
    """Training mode; a frozen trunk stays in eval mode, so that dropout does not change its hidden states."""
    model.train()
    if frozen_trunk:
        for module in backbone_modules(model):
            module.eval()


def read_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names of the state dict that `classifier_state` reads: no language head, no quantized matrix."""
    quantized = tuple(f"{name}." for name in _quantized_layers(model))
    matrices = {name for name in names if name.startswith(quantized) and not name.endswith(".bias")}
    return [name for name in names if not (name in matrices or name.startswith("language_head."))]


def _quantized_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: cast(nn.Linear, module) for name, module in model.named_modules() if is_quantized(module)}


def classifier_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the plain classifier in float32, any adapter merged into its weights.

    Quantized matrices, which are whole on every rank, get the values that they compute with.
    """
    state = {name: state[name] for name in read_names(model, state)}
    state |= {f"{name}.weight": dequantized(layer).cpu() for name, layer in _quantized_layers(model).items()}
    state = {name.removeprefix("classifier."): x.float() for name, x in state.items()}
    return merged_state(unwrap(model), state)


def save_classifier(
    engine: Engine,
    tokenizer: Tokenizer,
    output: str | Path,
    *,
    max_shard_size: str,
    extra_files: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write `output/model` in Hugging Face layout, any adapter merged into the weights, in float32, and return it."""
    model = engine.backend.unwrapped

    def write(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        state = classifier_state(model, dict(tensors))
        save_model(unwrap(model), folder, tensors=state.items(), max_shard_size=max_shard_size)
        extra_files(folder)

    return save_output(engine, output, tokenizer, read_names(model, model.state_dict()), write)

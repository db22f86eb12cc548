"""`alignment inspect probe`: linear layers fitted on the frozen states of every layer, against a control task.

The model is read, never trained. A page with the accuracy of each layer and a JSON file beside it are written.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from alignment.analysis.inspection import load_any
from alignment.analysis.lens import layer_states
from alignment.data.config import DataConfig
from alignment.data.tasks import LabeledExamples, TaskFormat, prepare_labeled
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary
from alignment.errors import UserError
from alignment.files import hash_of, write_figures
from alignment.judging.inputs import print_tally, refuse_mixture
from alignment.loading import Checkpoint, best_device, load_tokenizer
from alignment.losses.language import IGNORED
from alignment.models.classifiers import pooled
from alignment.models.heads import Pooling
from alignment.models.model import Model, check_lengths
from alignment.models.outputs import check_numbers
from alignment.ragged import Ragged, fill_groups
from alignment.reports.html import Chart, Section, numbers_of, render_page, with_interval
from alignment.statistics.winrate import accuracy_gain, win_rate

BATCH_TOKENS = 4096  # of one forward, whose states of all layers are held at once
LayerFigures = Mapping[str, Mapping[str, float]]


class ProbeRows(NamedTuple):
    """Rows that probes are fitted or judged on: one for each text, or for each labeled word."""

    states: Sequence[np.ndarray]  # of each layer, [N, D]
    classes: np.ndarray  # the label of each row, [N]
    types: Sequence[str]  # what the control task labels by: the word, or the last word of the text, [N]
    texts: Sequence[int]  # number of the text of each row, [N]


def prepare_parts(
    data: DataConfig, tokenizer: Tokenizer, *, words: bool = False, quiet: bool = False
) -> tuple[LabeledExamples, LabeledExamples]:
    """Rows of the fit and rows to judge, as token ids; unless `quiet`, print counts and refuse rows in both."""
    refuse_mixture(data)
    form = TaskFormat("token_classification" if words else "classification", max_length=data.max_length)
    fit = prepare_labeled(data, form, tokenizer)
    judged = prepare_labeled(data, form, tokenizer, "evaluation", names=fit.names)
    if not quiet:
        print_tally("data.train", fit.counts)
        print_tally("data.evaluation", judged.counts)
        if twice := judged.counts.trained_on:
            raise UserError(
                f"{len(twice)} held-out texts, the first {twice[0]}, are among the rows of the fit; take them out"
            )
    return fit, judged


def read_probe_rows(model: Model, part: LabeledExamples, pooling: Pooling | None) -> ProbeRows:
    """The states of each row in each layer, in order of the rows.

    Args:
        pooling: the state of a text: of its first or last token, or their mean; None: of each labeled word's first
            token.

    Raises:
        UserError: a text is longer than the model can read.
    """
    examples = part.examples
    device = next(model.parameters()).device
    lengths = [len(one.documents[0]) for one in examples]
    check_lengths(model, [(one.row_id, n) for one, n in zip(examples, lengths, strict=True)], "lower data.max_length")
    group_states = []
    for group in fill_groups(range(len(examples)), lengths, BATCH_TOKENS):
        texts = [examples[i].encoded[0] for i in group]
        batch = Ragged.build([text.ids for text in texts], segments=[text.segments for text in texts]).to(device)
        labels = torch.tensor([label for i in group for label in examples[i].labels], device=device)
        states = [
            layer[labels != IGNORED] if pooling is None else pooled(layer, batch, pooling)
            for layer in layer_states(model, batch)
        ]
        group_states.append([layer.float().cpu().numpy() for layer in states])
    inputs = {row.row_id: row.inputs[0] for row in part.rows}
    types = [_types_of(inputs[one.row_id], one.word_tokens) for one in examples]
    numbers = [index for index, words in enumerate(types) for _ in words]
    layers = [np.concatenate(layer) for layer in zip(*group_states, strict=True)]
    for layer in layers:
        check_numbers(torch.from_numpy(layer), lambda i: examples[numbers[i]].row_id, "the state of a layer")
    return ProbeRows(
        layers,
        np.array([label for one in examples for label in one.labels if label != IGNORED]),
        [word for words in types for word in words],
        numbers,
    )


def _types_of(source: str | Sequence[str], word_tokens: Sequence[int | None]) -> list[str]:
    if isinstance(source, str):
        return [(re.findall(r"\w+", source) or [source])[-1].lower()]
    return [word for word, token in zip(source, word_tokens, strict=True) if token is not None]


def control_classes(types: Sequence[str], shares: np.ndarray) -> np.ndarray:
    """A class for each word, drawn once for all its occurrences by a hash, so that it is the same in every run, [N].

    Args:
        shares: of each class among the rows of the fit, which the classes are drawn by, [C].

    Source: Hewitt and Liang 2019, arXiv:1909.03368, section 2.
    """
    draws = [int(hash_of(word)[:12], 16) / 2**48 for word in types]
    return np.minimum(np.searchsorted(shares.cumsum(), draws, side="right"), len(shares) - 1)


def probe_outcomes(
    states: Sequence[np.ndarray], classes: Sequence[np.ndarray], *, count: int, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    """1.0 for each row that a probe classifies rightly, else 0.0: of the fit and held out, in pairs like the arguments.

    The probe is the ridge classifier: least squares from states Z [N, D], standardized as those of the fit, to the
    indicators Y [N, count] of the classes; the class is that with the highest output.

    weight = argmin ||Z weight - (Y - mean Y)||^2 / N + ridge ||weight||^2 = (Z'Z / N + ridge I)^-1 Z'(Y - mean Y) / N

    Source: probes: Alain and Bengio 2016, arXiv:1610.01644; ridge regression: Hoerl and Kennard 1970, Technometrics 12,
    55-67.
    """
    mean = states[0].mean(0, np.float64)
    deviation = states[0].std(0, np.float64)
    z, held_out = ((part - mean) / np.where(deviation > 0, deviation, 1.0) for part in states)
    indicators = np.eye(count)[classes[0]]
    bias = indicators.mean(0)
    covariance = z.T @ z / len(z) + ridge * np.eye(z.shape[1])
    weight = np.linalg.solve(covariance, z.T @ (indicators - bias) / len(z))
    fitted, right = (
        (part @ weight + bias).argmax(1) == known for part, known in zip((z, held_out), classes, strict=True)
    )
    return fitted.astype(float), right.astype(float)


def probe_layers(
    fit: ProbeRows, judged: ProbeRows, *, count: int, ridge: float = 0.01
) -> tuple[list[LayerFigures], dict[str, float]]:
    """Held-out accuracy of a probe on each layer, of one on its control task, and their difference, the selectivity.

    Args:
        count: classes.
        ridge: as in `probe_outcomes`.

    Returns:
        Of each layer `accuracy` and `control`, `WinRate`s with Wilson's interval, for words with the text as a cluster,
        `selectivity` as of `accuracy_gain`, and `fit`, the rate on the rows of the fit; and held-out shares to compare
        with: `majority`, rows with the most frequent class of the fit; `control_majority`, the same of the control
            task;
        `control_seen`, rows whose word is in the fit, for the class of others cannot be known.

    Source: Hewitt and Liang 2019, arXiv:1909.03368, sections 2 and 3.
    """
    shares = np.bincount(fit.classes, minlength=count) / len(fit.classes)
    classes = fit.classes, judged.classes
    control = control_classes(fit.types, shares), control_classes(judged.types, shares)
    layers = []
    for states in zip(fit.states, judged.states, strict=True):
        fitted, right = probe_outcomes(states, classes, count=count, ridge=ridge)
        _, control_right = probe_outcomes(states, control, count=count, ridge=ridge)
        layers.append(
            {
                "accuracy": asdict(win_rate(right.tolist(), clusters=judged.texts)),
                "control": asdict(win_rate(control_right.tolist(), clusters=judged.texts)),
                "selectivity": accuracy_gain(right.tolist(), control_right.tolist(), clusters=judged.texts),
                "fit": {"rate": float(fitted.mean())},
            }
        )
    majority, control_majority = (
        float((held_out == np.bincount(fitted).argmax()).mean()) for fitted, held_out in (classes, control)
    )
    seen = float(np.isin(judged.types, fit.types).mean())
    return layers, {"control_seen": seen, "majority": majority, "control_majority": control_majority}


def write_probe(
    model: str,
    data: DataConfig,
    output: str | Path,
    *,
    words: bool = False,
    pooling: Pooling | None = None,
    ridge: float = 0.01,
) -> Path:
    """Probe every layer of a model, write a page with the curves, and beside it the results as JSON; return its path.

    Args:
        model: directory or Hub name of a decoder, encoder or encoder-decoder (its encoder), or of an adapter.
        data: rows with `text` and `label`, or with `words` and `labels`: those of `train` fit the probes, those of
            `evaluation` (or `evaluation_share`) are judged.
        words: words have labels, not texts.
        pooling: the state of a text; None: its last token in a decoder, the mean over its tokens elsewhere.
        ridge: weight of the squared norm of the layer beside the mean squared error, on standardized states.
    """
    numbers = numbers_of(Path(output))
    tokenizer = load_tokenizer(model)
    usual = "last" if Checkpoint(model).architecture == "decoder" else "mean"
    parts = prepare_parts(data, tokenizer, words=words)
    loaded = load_any(model).to(best_device())
    check_vocabulary(tokenizer, loaded.spec.vocabulary)
    read = None if words else pooling or usual
    fit, judged = (read_probe_rows(loaded, part, read) for part in parts)
    names = list(parts[0].names.values())
    layers, baselines = probe_layers(fit, judged, count=len(names), ridge=ridge)
    write_figures(
        numbers,
        {
            "model": str(model),
            "words": words,
            "pooling": read,
            "ridge": ridge,
            "labels": names,
            "rows": len(fit.classes),
            "held_out_rows": len(judged.classes),
            **baselines,
            "layers": layers,
        },
    )
    summary = (
        f"A linear layer on the frozen states of each layer, fitted on {len(fit.classes):,} "
        f"{'labeled words' if words else f'texts ({read} state)'} of {len(names)} classes and judged on "
        f"{len(judged.classes):,} others. Layer 0 is the input of the first block."
    )
    return render_page(
        Path(output),
        kind="linear probes",
        title=str(model),
        summary=summary,
        sections=[_section(layers, baselines)],
    )


def _section(layers: Sequence[LayerFigures], baselines: Mapping[str, float]) -> Section:
    from alignment.reports.charts import Curve, curve_chart  # matplotlib, which no other look inside needs

    rates = {
        "probe": [one["accuracy"]["rate"] for one in layers],
        "control task": [one["control"]["rate"] for one in layers],
        "most frequent class": [baselines["majority"]] * len(layers),
    }
    curves = tuple(
        Curve(name, range(len(layers)), tuple(layer_rates), color)
        for color, (name, layer_rates) in enumerate(rates.items())
    )
    table = [
        {
            "layer": str(index),
            "accuracy": one["accuracy"],
            "control": one["control"],
            "selectivity": with_interval(
                one["selectivity"]["difference"], [one["selectivity"]["low"], one["selectivity"]["high"]]
            ),
            "accuracy on the fit": one["fit"]["rate"],
        }
        for index, one in enumerate(layers)
    ]
    return Section(
        "layers",
        "Layers",
        "The control task gives every word (of a text, its last word) a class of its own, drawn once by a hash with "
        "the shares of the true classes. A probe that learns it as well as the true one shows that words can be kept "
        f"apart, and no more. {baselines['control_seen']:.1%} of the held-out rows have a word of the fit; the most "
        f"frequent class of the control task makes {baselines['control_majority']:.1%}. Selectivity is the accuracy "
        "less that on the control task. Intervals are of 95 %; words of one text count as a cluster.",
        [Chart("Accuracy", "share of held-out rows", curve_chart("Share of held-out rows", curves, "layer"))],
        [table],
    )

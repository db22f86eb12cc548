"""`alignment inspect probe`: linear layers fitted on the frozen states of every layer, against a control task.

The model is read, never trained. A page with the accuracy of each layer and a JSON file beside it are written.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from torch import nn

from alignment.analysis.inspection import load_any
from alignment.analysis.states import document_states
from alignment.data.config import DataConfig
from alignment.data.tasks import LabeledExamples, TaskExample, TaskFormat, prepare_labeled
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary
from alignment.errors import UserError
from alignment.evaluation.inputs import print_tally, refuse_mixture
from alignment.evaluation.report.html import Chart, Section, render_page, with_interval
from alignment.evaluation.winrate import WinRate, win_rate
from alignment.files import write_json
from alignment.loading import architecture_of, best_device, load_tokenizer
from alignment.losses.language import IGNORED
from alignment.models.model import check_lengths

ProbeTask = Literal["classification", "token_classification"]
Pooling = Literal["first", "last", "mean"]
WORD = re.compile(r"\w+")


class Probe(NamedTuple):
    """A linear layer over standardized states."""

    mean: np.ndarray  # of the states that it was fitted on, [D]
    scale: np.ndarray  # their deviation, [D]
    weight: np.ndarray  # [D, C]
    bias: np.ndarray  # share of each class among the rows of the fit, [C]

    def classify(self, states: np.ndarray) -> np.ndarray:
        """The class with the highest output for each row; states [N, D] -> [N]."""
        return ((states - self.mean) / self.scale @ self.weight + self.bias).argmax(1)


def fit_probe(states: np.ndarray, classes: np.ndarray, *, count: int, ridge: float) -> Probe:
    """The ridge classifier: least squares from standardized states Z [N, D] to the indicators Y [N, count] of the classes.

    weight = argmin ||Z weight - (Y - mean Y)||^2 / N + ridge ||weight||^2 = (Z'Z / N + ridge I)^-1 Z'(Y - mean Y) / N

    Source: probes: Alain and Bengio 2016, arXiv:1610.01644; ridge regression: Hoerl and Kennard 1970, Technometrics 12, 55-67.
    """
    states = states.astype(np.float64)
    mean, deviation = states.mean(0), states.std(0)
    scale = np.where(deviation > 0, deviation, 1.0)
    z, indicators = (states - mean) / scale, np.eye(count)[classes]
    bias = indicators.mean(0)
    covariance = z.T @ z / len(z) + ridge * np.eye(z.shape[1])
    return Probe(mean, scale, np.linalg.solve(covariance, z.T @ (indicators - bias) / len(z)), bias)


class ProbeRows(NamedTuple):
    """Rows that probes are fitted or judged on: one for each text, or for each labeled word."""

    states: Sequence[np.ndarray]  # of each layer, [N, D]
    classes: np.ndarray  # the label of each row, [N]
    types: Sequence[str]  # what the control task labels by: the word, or the last word of the text, [N]
    texts: Sequence[int]  # number of the text of each row, [N]


def prepare_parts(
    data: DataConfig, tokenizer: Tokenizer, task: ProbeTask = "classification", *, quiet: bool = False
) -> tuple[LabeledExamples, LabeledExamples]:
    """Rows of the fit and rows to judge as token ids; unless `quiet`, counts are printed and rows in both are refused."""
    refuse_mixture(data)
    form = TaskFormat(task, max_length=data.max_length)
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


def read_probe_rows(model: nn.Module, part: LabeledExamples, pooling: Pooling | None) -> ProbeRows:
    """The states of each row in each layer, in order of the rows.

    Args:
        pooling: the state of a text: of its first or last token, or their mean; None: of each labeled word's first token.

    Raises:
        UserError: a text is longer than the model can read.
    """
    examples = part.examples
    check_lengths(model, [(one.row_id, len(one.documents[0])) for one in examples], "lower data.max_length")
    found: list[list[np.ndarray]] = [[]] * len(examples)
    for number, layers in document_states(model, [one.encoded[0] for one in examples]):
        found[number] = [_read_at(states, examples[number], pooling) for states in layers]
    inputs = {row.row_id: row.inputs[0] for row in part.rows}
    types = [_types_of(one, inputs[one.row_id]) for one in examples]
    classes = [label for one in examples for label in one.labels if label != IGNORED]
    texts = [number for number, words in enumerate(types) for _ in words]
    states = [np.concatenate(layer) for layer in zip(*found, strict=True)]
    return ProbeRows(states, np.array(classes), [word for words in types for word in words], texts)


def _read_at(states: np.ndarray, example: TaskExample, pooling: Pooling | None) -> np.ndarray:
    """The states that a probe reads, [1, D] of a text or one for each labeled word; states: [T, D]."""
    if pooling is None:
        return states[np.array(example.labels) != IGNORED]
    return states.mean(0, keepdims=True) if pooling == "mean" else states[:1] if pooling == "first" else states[-1:]


def _types_of(example: TaskExample, source: str | Sequence[str]) -> list[str]:
    if isinstance(source, str):
        return [(WORD.findall(source) or [source])[-1].lower()]
    return [word for word, token in zip(source, example.word_tokens, strict=True) if token is not None]


def control_classes(types: Sequence[str], shares: np.ndarray) -> np.ndarray:
    """A class for each word, drawn once for all its occurrences by a hash, so that it is the same in every run, [N].

    Args:
        shares: of each class among the rows of the fit, which the classes are drawn by, [C].

    Source: Hewitt and Liang 2019, arXiv:1909.03368, section 2.
    """
    draws = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:6], "big") / 2**48 for word in types]
    return np.minimum(np.searchsorted(shares.cumsum(), draws, side="right"), len(shares) - 1)


def probe_outcomes(
    states: tuple[np.ndarray, np.ndarray], classes: tuple[np.ndarray, np.ndarray], *, count: int, ridge: float
) -> tuple[list[float], list[float]]:
    """1.0 for each row that a probe classifies rightly, else 0.0: of the fit, and held out; arguments likewise in pairs."""
    probe = fit_probe(states[0], classes[0], count=count, ridge=ridge)
    right = [(probe.classify(each) == known).astype(float) for each, known in zip(states, classes, strict=True)]
    return right[0].tolist(), right[1].tolist()


class LayerProbe(NamedTuple):
    """Probes on one layer; rates with 95 % intervals: Wilson's, for words with the text as a cluster."""

    layer: int
    accuracy: WinRate  # share of held-out rows classified rightly
    control: WinRate  # the same of a probe on the control task
    selectivity: dict[str, float]  # their difference and its interval for pairs: rate, low, high
    fit_accuracy: float  # on the rows of the fit


def probe_layers(
    fit: ProbeRows, judged: ProbeRows, *, count: int, ridge: float = 0.01
) -> tuple[list[LayerProbe], dict[str, float]]:
    """The held-out accuracy of a probe on each layer, of one on its control task, and their difference, the selectivity.

    Args:
        count: classes.
        ridge: as in `fit_probe`.

    Returns:
        The layers, and held-out shares to compare with: `majority`, rows with the most frequent class of the fit;
        `control_majority`, the same of the control task; `control_seen`, rows whose word is in the fit, for the class of
        others cannot be known.

    Source: Hewitt and Liang 2019, arXiv:1909.03368, sections 2 and 3.
    """
    shares = np.bincount(fit.classes, minlength=count) / len(fit.classes)
    classes = fit.classes, judged.classes
    control = control_classes(fit.types, shares), control_classes(judged.types, shares)
    layers = []
    for number, states in enumerate(zip(fit.states, judged.states, strict=True)):
        fitted, right = probe_outcomes(states, classes, count=count, ridge=ridge)
        _, control_right = probe_outcomes(states, control, count=count, ridge=ridge)
        leads = [(1 + ours - theirs) / 2 for ours, theirs in zip(right, control_right, strict=True)]
        rates = [win_rate(each, clusters=judged.texts) for each in (right, control_right, leads)]
        gain = {key: 2 * getattr(rates[2], key) - 1 for key in ("rate", "low", "high")}
        layers.append(LayerProbe(number, rates[0], rates[1], gain, float(np.mean(fitted))))
    baselines = {"control_seen": float(np.isin(judged.types, fit.types).mean())}
    for name, (fitted, held_out) in {"majority": classes, "control_majority": control}.items():
        baselines[name] = float((held_out == np.bincount(fitted).argmax()).mean())
    return layers, baselines


def write_probe(
    model: str,
    data: DataConfig,
    output: str | Path,
    *,
    task: ProbeTask = "classification",
    pooling: Pooling | None = None,
    ridge: float = 0.01,
) -> Path:
    """Probe every layer of a model, write a page with the curves and the results beside it as JSON; return the page's path.

    Args:
        model: directory or Hub name of a decoder, encoder or encoder-decoder (its encoder), or of an adapter.
        data: rows with `text` and `label`, or with `words` and `labels`: those of `train` fit the probes, those of
            `evaluation` (or `evaluation_share`) are judged.
        task: "token_classification" where words have labels.
        pooling: the state of a text; None: its last token in a decoder, the mean over its tokens elsewhere.
        ridge: weight of the squared norm of the layer beside the mean squared error, on standardized states.
    """
    tokenizer, decodes = load_tokenizer(model), architecture_of(model) == "decoder"
    parts = prepare_parts(data, tokenizer, task)
    read = (pooling or ("last" if decodes else "mean")) if task == "classification" else None
    loaded = load_any(model).to(best_device())
    check_vocabulary(tokenizer, loaded.spec.vocabulary)
    fit, judged = (read_probe_rows(loaded, part, read) for part in parts)
    names = list(parts[0].names.values())
    layers, baselines = probe_layers(fit, judged, count=len(names), ridge=ridge)
    results = {
        "model": str(model), "task": task, "pooling": read, "ridge": ridge, "labels": names,
        "rows": len(fit.classes), "held_out_rows": len(judged.classes), **baselines,
        "layers": [one._asdict() | {"accuracy": asdict(one.accuracy), "control": asdict(one.control)} for one in layers],
    }  # fmt: skip
    write_json(Path(output).with_suffix(".json"), results)
    kind = "labeled words" if read is None else f"texts ({read} state)"
    summary = (
        f"A linear layer on the frozen states of each layer, fitted on {len(fit.classes):,} {kind} of {len(names)} classes "
        f"and judged on {len(judged.classes):,} others. Layer 0 is the input of the first block."
    )
    sections = _sections(layers, baselines)
    return render_page(Path(output), kind="linear probes", title=str(model), summary=summary, sections=sections)


def _sections(layers: Sequence[LayerProbe], baselines: dict[str, float]) -> list[Section]:
    from alignment.evaluation.report.charts import Curve, curve_chart  # matplotlib, which no other look inside needs

    numbers = tuple(range(len(layers)))
    rates = {
        "probe": [one.accuracy.rate for one in layers],
        "control task": [one.control.rate for one in layers],
        "most frequent class": [baselines["majority"]] * len(layers),
    }
    curves = tuple(Curve(name, numbers, tuple(found), color) for color, (name, found) in enumerate(rates.items()))
    selectivity = (Curve("selectivity", numbers, tuple(one.selectivity["rate"] for one in layers), 3),)
    charts = [
        Chart(title, note, curve_chart(f"{title}, {note}", lines, "layer"))
        for title, note, lines in (
            ("Accuracy", "share of held-out rows", curves),
            ("Selectivity", "accuracy less that on the control task", selectivity),
        )
    ]
    table = [
        {
            "layer": str(one.layer),
            "accuracy": asdict(one.accuracy),
            "control": asdict(one.control),
            "selectivity": with_interval(one.selectivity["rate"], [one.selectivity[key] for key in ("low", "high")]),
            "accuracy on the fit": one.fit_accuracy,
        }
        for one in layers
    ]
    control = (
        "The control task gives every word (of a text, its last word) a class of its own, drawn once by a hash with the "
        "shares of the true classes. A probe that learns it as well as the true one shows that words can be told apart, "
        f"and no more. {baselines['control_seen']:.1%} of the held-out rows have a word of the fit; the most frequent class "
        f"of the control task makes {baselines['control_majority']:.1%}. Intervals are of 95 %; words of one text count as a cluster."
    )
    return [Section("layers", "Layers", control, charts, [table])]

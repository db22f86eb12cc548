"""Charts of a training run's metrics: which share a chart, their order, titles and notes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from alignment.evaluation.report.charts import Curve, curve_chart, is_finite_number
from alignment.evaluation.report.html import Chart

Log = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
HELD_OUT = "held_out_"


class Panel(NamedTuple):
    """One chart of a stage: its title, a few words of explanation, and metric -> label; no metrics: the title's own."""

    title: str
    note: str = ""
    metrics: Mapping[str, str] = {}


# Metric -> its panel; a panel of several metrics stands at the first one's.
MAIN = {
    "loss": Panel("Loss", "nats"),
    "accuracy": Panel("Accuracy", "share of pairs ranked as labeled; ties count half"),
    "score": Panel("Score", "mean reward-model score per response"),
    "kl": Panel("KL to the reference", "nats per response"),
    "chosen_reward": Panel(
        "Implicit rewards", "beta times log-ratio", {"chosen_reward": "chosen", "rejected_reward": "rejected"}
    ),
    "chosen_log_prob": Panel(
        "Log-probabilities", "nats per response", {"chosen_log_prob": "chosen", "rejected_log_prob": "rejected"}
    ),
    "margin": Panel("Margin", "chosen minus rejected"),
    "language_loss": Panel("Language-model loss", "held-out text, nats per token"),
    "pretrain_loss": Panel("Pretraining loss", "nats per token, in the mix"),
    "policy_loss": Panel("Policy loss"),
    "value_loss": Panel("Value loss"),
    "entropy": Panel("Entropy", "nats per token"),
    "response_tokens": Panel("Response length", "tokens"),
    "ended_share": Panel("Responses that ended", "share that stopped by themselves"),
}
FURTHER = {
    "learning_rate": Panel("Learning rate"),
    "grad_norm": Panel("Gradient norm", "before clipping"),
    "approx_kl": Panel("KL of one update", "nats per token"),
    "clip_fraction": Panel("Clipped share", "tokens whose gradient is clipped"),
    "first_ratio_error": Panel("First ratio error", "largest |ratio − 1| before any update"),
    "kl_coef": Panel("KL coefficient"),
    "explained_variance": Panel("Explained variance", "1: a perfect critic"),
    "distinct_share": Panel("Distinct responses", "share of the rollout"),
    "ties": Panel("Ties", "share of pairs"),
    "tokens_per_second": Panel("Tokens per second"),
}


def stage_charts(stage: str, log: Log, shown: int = 3) -> tuple[list[Chart], list[Chart]]:
    """A stage's charts that are shown, at least `shown` of them where there are so many, and those that are folded."""
    main = _charts(stage, log, MAIN)
    further = _charts(stage, log, source_panels(log) | FURTHER | _other_panels(log))
    moved = max(shown - len(main), 0)
    return main + further[:moved], further[moved:]


def source_panels(log: Log) -> dict[str, Panel]:
    """One chart for each metric that is logged by source, such as loss/NAME, with a curve for each source."""
    panels: dict[str, Panel] = {}
    for key in dict.fromkeys(key.removeprefix(HELD_OUT) for line in log for key in line if "/" in key):
        metric, _, name = key.partition("/")
        named = panels.get(f"{metric}/", Panel("")).metrics
        title = f"{metric.replace('_', ' ').capitalize()} by source"
        panels[f"{metric}/"] = Panel(title, metrics={**named, key: name})
    return panels


def _other_panels(log: Log) -> dict[str, Panel]:
    """A panel for each metric that no known panel shows."""
    shown = {"step", "tokens", *MAIN, *FURTHER, *(key for panel in MAIN.values() for key in panel.metrics)}
    keys = dict.fromkeys(key.removeprefix(HELD_OUT) for line in log for key in line if "/" not in key)
    return {key: Panel(key.replace("_", " ").capitalize()) for key in keys if key not in shown}


def _charts(stage: str, log: Log, panels: Mapping[str, Panel]) -> list[Chart]:
    """Charts of the panels for which a stage has measurements."""
    charts = []
    for key, (title, note, metrics) in panels.items():
        curves = []
        for number, (name, label) in enumerate(_curves(metrics or {key: ""})):
            points = [(line.get("step"), line.get(name)) for line in log]
            if known := [point for point in points if all(map(is_finite_number, point))]:
                steps, values = zip(*known, strict=True)
                curves.append(Curve(label, steps, values, number))
        if curves:
            charts.append(Chart(title, note, curve_chart(f"{stage}: {title}", tuple(curves), "update")))
    return charts


def _curves(metrics: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Metric and label of each curve: of training, and held out."""
    alone = len(metrics) == 1
    for key, label in metrics.items():
        yield key, "training" if alone else label
        yield HELD_OUT + key, "held out" if alone else f"{label}, held out"

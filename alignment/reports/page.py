"""report.html: a run or recipe in one file that loads nothing else; recipe_report.py gathers what a recipe's holds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alignment.reports.charts import (
    SERIES,
    Bar,
    Curve,
    bar_chart,
    curve_chart,
    padded_limits,
    path_chart,
    rate_chart,
)
from alignment.reports.diagnosis import diagnose
from alignment.reports.html import Chart, Row, Section, format_duration, render_page, short_path
from alignment.reports.run_log import (
    RunLog,
    Series,
    StageRecord,
    columns,
    read_log_rows,
    read_run_log,
    read_stage_record,
)
from alignment.reports.sentences import Results, describe_run, end_interval

Log = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
Metrics = Mapping[str, Series]
Models = Mapping[str, Mapping[str, Any]]  # policy -> its part of an evaluation's results.json
Colors = Mapping[str, int]  # policy -> number of its color
HELD_OUT = "held_out_"
PAIR_PARTS = {  # key of `evaluate winrate` on held-out comparisons -> column of the table, note of the chart
    "chosen_log_prob_change": (
        "chosen, change in nats",
        "log-probability of chosen responses since the baseline, nats",
    ),
    "rejected_log_prob_change": ("rejected, change in nats", "of rejected responses, nats"),
    "margin": ("pair margin, nats", "change of the chosen minus change of the rejected response, nats"),
}
OVEROPTIMIZATION = {  # metric -> title, note
    "score": ("Proxy reward", "what was optimized: the reward model's score"),
    "gold_score": ("Gold score", "where it falls while the proxy rises, the policy exploits its reward model"),
}
SAMPLES_SHOWN = 8
CHARTS_SHOWN = 3  # of each of several stages, and of a single one at least; the others are folded
RESULTS = tuple(prefix + metric for prefix in ("", HELD_OUT) for metric in ("loss", "perplexity", "accuracy"))
LEADS = {
    "win-rates": "Share of prompts on which a policy's response is preferred, ties counting half. Each pair is shown "
    "to the "
    "judge in both orders; only a preference that holds in both is a win. Where the orders contradict each other the "
    "pair counts half and narrows no interval. Whiskers are 95 % intervals, of several seeds over prompts and seeds; "
    "the dashed line is 50 %. Where the intervals of two policies overlap, no difference between them is shown.",
    "gold": "Mean of each part of the true reward, which no policy saw in training. Each chart has the scale of its "
    "part.",
    "pairs": "How far training moved the log-probability of whole responses to comparisons that no policy saw. Where "
    "the "
    "chosen responses fall with the rejected ones, their probability went to responses in no pair. All charts have the "
    "same scale.",
    "doctor": "Symptoms that `alignment doctor --run` finds in a run's logs, their likely causes, and settings to try.",
    "samples": "Words that the first response of a prompt lacks are underlined, and words of it that are missing are "
    "struck through, where two responses share half of their words or more.",
    "rows": "The runs' own notes: rows that were read, dropped or cut, and warnings.",
    "overoptimization": "How far a policy has moved from its reference, and what it gained by moving. Small dots are "
    "single "
    "updates, the line is their moving average from the ring, where training begins, to the large dot, where it ends.",
}


class Panel(NamedTuple):
    """One chart of a stage: its title, a few words of explanation, and metric -> label; no metrics: the title's own."""

    title: str
    note: str = ""
    metrics: Mapping[str, str] = {}


# Metric -> its panel; a panel of several metrics stands at the first one's.
MAIN = {  # the one that tells most comes first
    "accuracy": Panel("Accuracy", "share of pairs ranked as labeled; ties count half"),
    "score": Panel("Score", "mean reward-model score per response"),
    "kl": Panel("KL to the reference", "nats per response"),
    "loss": Panel("Loss", "nats"),
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
    "explained_variance": Panel("Explained variance", "1: a perfect critic"),
}


def write_report(
    path: Path,
    title: str,
    *,
    summary: str = "",
    verdicts: Sequence[str] = (),
    tables: Mapping[str, Sequence[Row]] = {},
    results: Mapping[str, Any] = {},
    stages: Mapping[str, Log] = {},
    samples: Sequence[Mapping[str, Any]] = (),
    lineage: Sequence[StageRecord] = (),
    runs: Mapping[str, RunLog] = {},
    further: Sequence[Section] = (),
    together: bool = False,
) -> Path:
    """Write a self-contained HTML page and return its path. All text is escaped, and the page runs no script.

    Args:
        summary: begins with the sentence that says who won; like all parts it may be empty, and is then left out.
        verdicts: more such sentences, as a list.
        tables: caption -> rows.
        samples: `{prompt, responses: {policy: {text, score}}}`; a prompt: text or messages.
        lineage: the stages in order.
        runs: stage -> its log, for doctor to judge.
        stages: lines of metrics of stages that are not among `runs`.
        further: sections that stand behind the samples.
        together: draw each metric of all stages in one chart, as of runs that are compared.
    """
    models = results.get("models", {})
    metrics = {name: run.series for name, run in runs.items()}
    metrics |= {name: columns(log)[0] for name, log in stages.items() if name not in runs}
    paths = {name: logged for name, logged in metrics.items() if "kl" in logged}
    names = [
        *models,
        *(metrics if together else paths),
        *(name for one in samples for name, response in one["responses"].items() if "color" not in response),
    ]
    colors = {name: index % len(SERIES) for index, name in enumerate(dict.fromkeys(names))}
    joint = {"all runs": metrics} if together else {name: {name: logged} for name, logged in metrics.items()}
    training = [
        _training(position, name, logs, colors, alone=len(joint) == 1)
        for position, (name, logs) in enumerate(joint.items(), 1)
    ]
    captioned = {**tables, "Beginning and end": _ends_table(runs) if together or (runs and not models) else ()}
    sections = [
        Section(
            "results", "Results", points=verdicts, tables={name: table for name, table in captioned.items() if table}
        ),
        Section("doctor", "Doctor", LEADS["doctor"], points=[*_findings(runs)]),
        *_evaluation(results, paths, colors),
        *training[: len(training) == 1],
        _samples(samples, colors, results.get("baseline")),
        *further,
        *training[len(training) == 1 :],
        Section("rows", "Rows", LEADS["rows"], points=_row_notes(lineage)),
        _lineage(lineage),
    ]
    shown = [one for one in sections if one.points or one.charts or one.samples or any(one.tables)]
    return render_page(path, kind="report", title=title, summary=summary, sections=shown)


def _evaluation(results: Results, paths: Mapping[str, Metrics], colors: Colors) -> list[Section]:
    """Sections on the figures of an evaluation, and on what training gained for the KL."""
    models = results.get("models", {})
    gold = {name: model["gold"] for name, model in models.items() if "gold" in model}
    gold_parts = {part: (part, "95 % interval" if part == "total" else "") for parts in gold.values() for part in parts}
    totals = {name: model.get("gold_interval") for name, model in models.items()}
    pairs = {name: model["pairs"] for name, model in models.items() if "pairs" in model}
    moved = {name: parts for name, parts in pairs.items() if any(parts[part] for part in PAIR_PARTS)}
    charts = {
        "win-rates": ("Win rates", win_rate_charts(results, colors)),
        "gold": ("Gold score", part_charts("Gold score, part ", gold, gold_parts, colors, totals=totals)),
        "pairs": ("Held-out pairs", part_charts("Held-out pairs: ", moved, PAIR_PARTS, colors, one_scale=True)),
        "overoptimization": ("Over-optimization", overoptimization_charts(paths, colors)),
    }
    return [
        Section(name, title, LEADS[name], section_charts, _judgment_table(results) if name == "win-rates" else ())
        for name, (title, section_charts) in charts.items()
        if section_charts
    ]


def _samples(samples: Sequence[Mapping[str, Any]], colors: Colors, baseline: str | None) -> Section:
    """Samples in the policies' colors, the baseline first, against which the others are marked."""
    colored = []
    for sample in samples:
        names = sorted(sample["responses"], key=lambda name: name != baseline)
        responses = {name: {"color": colors.get(name), **sample["responses"][name]} for name in names}
        colored.append({"prompt": sample["prompt"], "responses": responses})
    return Section("samples", "Samples", LEADS["samples"], samples=colored)


def _row_notes(records: Sequence[StageRecord]) -> list[str]:
    """Notes of runs on their rows and alarms; those on memory, weights and the cache are left out."""
    return [
        f"{record.name}: {note}"
        for record in records
        for note in record.lineage.get("notes", [])
        if not note.startswith(("memory:", "weights:")) and " the cache: " not in note
    ]


def _findings(runs: Mapping[str, RunLog]) -> Iterator[str]:
    """Symptoms that doctor finds in each run: evidence, cause, and settings to try."""
    for name, finding in ((name, finding) for name, run in runs.items() for finding in diagnose(run)):
        tries = "; ".join(f"{one.key}={one.value} (now {one.now}): {one.why}" for one in finding.settings)
        yield (
            f"{name}: {finding.symptom} (steps {finding.steps[0]} to {finding.steps[1]}). "
            f"{finding.evidence}. {finding.cause}{f' Try {tries}.' if tries else ''}"
        )


def _ends_table(runs: Mapping[str, RunLog]) -> list[Row]:
    """Main metrics of each run: means of its first and last updates, the latter with the interval of their scatter."""
    names = [
        prefix + key for name, panel in MAIN.items() for key in panel.metrics or [name] for prefix in ("", HELD_OUT)
    ]
    rows: list[Row] = []
    for name in names:
        by_run = {run: log.series[name] for run, log in runs.items() if name in log.series}
        first = {f"{run}, first": series.first for run, series in by_run.items()}
        last = {f"{run}, last": end_interval(series) or series.last for run, series in by_run.items()}
        if by_run:
            rows.append({"metric": name.replace("_", " "), **first, **last})
    return rows


def _judgment_table(results: Results) -> Mapping[str, Sequence[Row]]:
    """All figures of the judgments under a caption that says whose they are."""
    judged = {name: model for name, model in results["models"].items() if "win_rate" in model}
    rows = [
        {
            "policy": name,
            "win rate": model["win_rate"],
            "n": model["win_rate"]["n"],
            "wins": model["win_rate"]["wins"],
            "ties": model["win_rate"]["ties"],
            "losses": model["win_rate"]["losses"],
            # people see one order
            "orders disagree": model["inconsistent"] if model["inconsistent"].get("n", 1) else None,
            "shown first preferred": model["position_bias"],
            "longer preferred": model.get("longer_preferred"),
            "twice as long": slope_cell(model.get("length_slope")),
            "at equal length": model.get("length_controlled"),
            "not judged": model["failures"],
        }
        for name, model in judged.items()
    ]
    return {f"Against {results['baseline']}, judge: {results['judge']}": rows}


def slope_cell(slope: Mapping[str, float] | None) -> str | None:
    """The change of a win rate for a response twice as long as the other, in points, with its interval."""
    return (
        None
        if slope is None
        else f"{100 * slope['slope']:+.1f} [{100 * slope['low']:+.1f}, {100 * slope['high']:+.1f}]"
    )


def win_rate_charts(results: Results, colors: Colors) -> list[Chart]:
    """One chart of all policies against the baseline."""
    rates = {name: model["win_rate"] for name, model in results.get("models", {}).items() if "win_rate" in model}
    return (
        [rate_chart(f"Win rate against {results['baseline']}", f"judge: {results['judge']}", rates, colors)]
        if rates
        else []
    )


def part_charts(
    label: str,
    scores: Models,
    parts: Mapping[str, tuple[str, str]],
    colors: Colors,
    *,
    one_scale: bool = False,
    totals: Mapping[str, tuple[float, float] | None] = {},
) -> list[Chart]:
    """A chart of the policies for each part of their scores, each on the scale of its part, or all on the same.

    Args:
        label: for screen readers, in front of the title.
        parts: key -> title and note.
        totals: policy -> interval of its part `total`, or None.
    """
    charts = []
    for part, (title, note) in parts.items() if scores else ():
        bars = [
            Bar(name, by_part[part], totals.get(name) if part == "total" else None, colors[name])
            for name, by_part in scores.items()
            if part in by_part
        ]
        scaled = [
            by_part[one] for by_part in scores.values() for one in (parts if one_scale else [part]) if one in by_part
        ]
        scaled += [end for bar in bars for end in bar.interval or ()]
        charts.append(
            Chart(
                title.partition(",")[0].capitalize(),
                note,
                bar_chart(f"{label}{title}", bars, limits=padded_limits(scaled)),
            )
        )
    return charts


def overoptimization_charts(paths: Mapping[str, Metrics], colors: Colors) -> list[Chart]:
    """Two charts over the same KL: the score that was optimized, and the true one."""
    charts = []
    for metric, (title, note) in OVEROPTIMIZATION.items():
        curves = []
        for policy, logged in paths.items():
            kl = dict(zip(logged["kl"].steps, logged["kl"].values, strict=True))
            known = [pair for pair in zip(*logged.get(metric, ((), ())), strict=True) if pair[0] in kl]
            if known:
                moved = [kl[step] for step, _ in known]
                curves.append(Curve(policy, moved, [value for _, value in known], colors[policy]))
        if curves:
            svg = path_chart(f"{title} over KL", curves, "KL to the reference, nats per response", title, noisy=True)
            charts.append(Chart(title, note, svg))
    return charts


# Training


def _training(number: int, name: str, logs: Mapping[str, Metrics], colors: Colors, *, alone: bool) -> Section:
    """A section on a stage, or on several runs with a line for each; charts that tell most are shown, others folded."""
    main, rest = (
        (panels if len(logs) == 1 else _one_metric_each(panels)) for panels in (MAIN, further_panels([*logs.values()]))
    )
    first = stage_charts(name, logs, main, colors)
    charts = stage_charts(name, logs, rest, colors)
    shown = max(CHARTS_SHOWN, len(first) if alone else 0)
    charts = [*first, *charts]
    return Section(f"training-{number}", f"Training: {name}", charts=charts[:shown], folded=charts[shown:])


def _one_metric_each(panels: Mapping[str, Panel]) -> dict[str, Panel]:
    """Panels of several metrics taken apart, so that a chart's lines are the runs."""
    metrics = [
        (key, label, panel) for name, panel in panels.items() for key, label in (panel.metrics or {name: ""}).items()
    ]
    return {key: Panel(": ".join(filter(None, [panel.title, label])), panel.note) for key, label, panel in metrics}


def further_panels(logs: Sequence[Mapping[str, object]]) -> dict[str, Panel]:
    """A panel for each metric by source, such as loss/NAME, then `FURTHER`, then one for each that no other shows."""
    shown = {"step", "tokens", *MAIN, *FURTHER, *(key for panel in MAIN.values() for key in panel.metrics)}
    by_source = dict[str, Panel]()
    others = dict[str, Panel]()
    for key in dict.fromkeys(key.removeprefix(HELD_OUT) for logged in logs for key in logged):
        metric, slash, name = key.partition("/")
        title = metric.replace("_", " ").capitalize()
        if slash:
            named = by_source.get(metric, Panel("")).metrics
            by_source[metric] = Panel(f"{title} by source", metrics={**named, key: name})
        elif key not in shown:
            others[key] = Panel(title)
    return {**{f"{metric}/": panel for metric, panel in by_source.items()}, **FURTHER, **others}


def stage_charts(stage: str, logs: Mapping[str, Metrics], panels: Mapping[str, Panel], colors: Colors) -> list[Chart]:
    """Charts of the panels for which a stage has measurements, of training and held out.

    Args:
        logs: of the stage; or of several runs, each with its own color and held-out lines dashed.
    """
    charts = []
    several = len(logs) > 1
    for key, (title, note, metrics) in panels.items():
        lines = [
            (
                ", ".join(filter(None, [name if several else "", label, prefix and "held out"])) or "training",
                name,
                prefix + metric,
            )
            for name in logs
            for metric, label in (metrics or {key: ""}).items()
            for prefix in ("", HELD_OUT)
        ]
        curves = tuple(
            Curve(label, *known, colors[name] if several else index, several and metric.startswith(HELD_OUT))
            for index, (label, name, metric) in enumerate(lines)
            if (known := logs[name].get(metric)) is not None
        )
        if curves:
            # one curve has no list of labels
            note = f"{note}, {curves[0].label}".strip(", ") if several and len(curves) == 1 else note
            charts.append(Chart(title, note, curve_chart(f"{stage}: {title}", curves, "update")))
    return charts


# Lineage


def _lineage(records: Sequence[StageRecord]) -> Section:
    return Section(
        "lineage",
        "Lineage",
        tables=[
            [
                {
                    "stage": record.name,
                    "made from": ", ".join(map(short_path, record.parents)),
                    "hash": record.hash[:12],
                    "time": format_duration(record.seconds),
                }
                for record in records
            ]
        ],
        settings={record.name: dict(flatten_settings(record.settings)) for record in records},
    )


def flatten_settings(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted keys and text."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


# The report of one run


def write_run_report(directory: Path, path: Path | None = None) -> Path:
    """Write the page of a single run: what happened, its metrics, data sources, curves, sampled texts, lineage.

    Args:
        path: of the page; None: `report.html` in the run's directory.
    """
    record = read_stage_record(directory)
    run = read_run_log(directory)
    log = read_log_rows(directory / "metrics.jsonl") if (directory / "sources.json").is_file() else []
    return write_report(
        path or directory / "report.html",
        f"{directory.name}: {record.name}" if directory.name != record.name else record.name,
        summary=describe_run(run),
        tables={"Data sources": source_table(directory, log)},
        runs={record.name: run},
        samples=logged_samples({"": run.samples}),
        lineage=[record],
    )


def logged_samples(runs: Mapping[str, Log]) -> list[dict[str, Any]]:
    """Prompts with the responses that runs logged: those with the most responses first, of equals the latest."""
    samples = dict[str, dict[str, Any]]()
    for color, (name, rows) in enumerate(runs.items()):
        for row in rows:
            responses = samples.setdefault(str(row["prompt"]), {"prompt": row["prompt"], "responses": {}})["responses"]
            responses[f"{name} update {row['step']}".strip()] = {
                "text": row["response"],
                "score": row.get("score"),
                "color": color,
            }
    return sorted(samples.values(), key=lambda sample: len(sample["responses"]))[: -SAMPLES_SHOWN - 1 : -1]


def source_table(directory: Path, log: Log) -> list[dict[str, object]]:
    """A row for each source of a run: rows, share drawn, last value of each metric; none where there is one source."""
    path = directory / "sources.json"
    table = []
    latest = {key: value for line in log for key, value in line.items()}
    for source in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
        name = source["name"]
        shares = [line[f"share/{name}"] for line in log if line.get(f"share/{name}") is not None]
        table.append(
            {
                "source": name,
                "rows": source.get("rows"),
                "share of draws": source.get("share"),
                "share of what counted": sum(shares) / len(shares) if shares else None,
                **{metric.replace("_", " "): latest.get(f"{metric}/{name}") for metric in RESULTS},
            }
        )
    kept = [column for column in table[0] if any(row[column] is not None for row in table)] if table else []
    return [{column: row[column] for column in kept} for row in table]

"""Figures of benchmarks: values of each row, means with intervals, figures of whole tasks, baselines, differences."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from alignment.data.task_metrics import answer_metrics, class_metrics
from alignment.errors import UserError
from alignment.evaluation.benchmarks.likelihood import LanguageScorer, Likelihood, Request
from alignment.evaluation.benchmarks.tasks import Benchmark, Item, Task
from alignment.evaluation.winrate import Z_95, paired_interval
from alignment.generation import SamplingConfig
from alignment.rewards.answers import gsm8k_answer, is_right
from alignment.settings import PATTERN_SECONDS, compile_pattern

Columns = dict[str, np.ndarray]  # name -> a value of each row
Classifier = Callable[[Sequence[str]], Sequence[float]]  # texts -> probability that each is toxic
Figures = dict[str, dict[str, float | None]]  # name -> value, low, high, n
HELP = {
    "label",
    "predicted",
    "log_prob",
    "words",
    "bytes",
    "ambiguous",
    "biased",
    "unknown",
}  # columns that are no figures
RESAMPLES = 200


@dataclass(frozen=True)
class Baseline:
    """What stands in for a model: a log-probability of texts, and one answer to everything."""

    log_prob: Callable[[str], float]
    answer: str

    def likelihoods(self, requests: Sequence[Request]) -> list[Likelihood]:
        """Of the continuations; contexts are not read."""
        return [Likelihood(self.log_prob(tail), tail.strip() == self.answer) for _, tail in requests]

    def text_log_probs(self, texts: Sequence[str]) -> list[float]:
        """Of whole texts."""
        return list(map(self.log_prob, texts))

    def pair_log_probs(self, pairs: Sequence[tuple[str, ...]]) -> list[tuple[float, float]]:
        """Of two texts each."""
        return [(self.log_prob(first), self.log_prob(second)) for first, second in pairs]

    def responses(self, prompts: Sequence[str], sampling: SamplingConfig, stop: Sequence[str] = ()) -> list[str]:
        """The same answer to every prompt."""
        return [self.answer] * len(prompts)


def baselines(task: Task) -> dict[str, Baseline]:
    """The most common answer, where all rows have the same choices; and a unigram model of words.

    unigram: log p(word) = log((count + 1) / (words + different words + 1)), counted in the task's own prompts and choices
    """
    items, kind = task.items, task.settings.kind
    words = Counter(word for item in items for text in (item.prompt, *item.choices) for word in text.split())
    total = words.total() + len(words) + 1
    answers = [item.solution if kind != "answers" else item.references[0] for item in items]
    if kind == "answers" and task.settings.match == "gsm8k":
        answers = [str(gsm8k_answer(answer)) for answer in answers]
    [(common, _)] = Counter(answers).most_common(1)
    unigram = Baseline(lambda text: sum(math.log((words[word] + 1) / total) for word in text.split()), common)
    majority = Baseline(lambda text: float(text.strip() == common), common)
    if kind == "multiple_choice" and len({item.choices for item in items}) == 1:
        return {"majority": majority, "unigram": unigram}
    return {} if kind == "toxicity" else {"majority": majority} if kind == "answers" else {"unigram": unigram}


def measure(task: Task, scorer: LanguageScorer | Baseline, classify: Classifier | None = None) -> tuple[Columns, str]:
    """Values of each row, and what the first one was answered; see `KINDS`."""
    rows, shown = KINDS[task.settings.kind](task, scorer, classify)
    return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}, shown


Rows = tuple[list[dict[str, float]], str]


def multiple_choice(task: Task, scorer: LanguageScorer | Baseline, _: Classifier | None) -> Rows:
    """1 where the choice with the highest log-probability is right; `_norm`: divided by its characters, as lm-eval does.

    mc1: 1 where the best right choice is likelier than every wrong one. mc2 = sum of p(right) / sum of p(all).

    Source: Lin et al. 2021, arXiv:2109.07958, appendix B and their evaluation script.
    """
    settings, rows, shown = task.settings, list[dict[str, float]](), list[str]()
    requests = [(item.prompt, settings.delimiter + choice) for item in task.items for choice in item.choices]
    found = iter(scorer.likelihoods(requests))
    for item in task.items:
        log_probs = np.array([next(found).log_prob for _ in item.choices])
        norm = log_probs / [max(1, len(choice)) for choice in item.choices]
        best = int(log_probs.argmax())
        row: dict[str, float] = {
            settings.figure: best in item.right,
            f"{settings.figure}_norm": int(norm.argmax()) in item.right,
        }
        row |= {"label": item.right[0], "predicted": best}
        if item.best is not None:
            right = np.isin(np.arange(len(log_probs)), item.right)
            shares = np.exp(log_probs - log_probs.max())
            row["mc1"] = log_probs[item.best] > log_probs[~right].max(initial=-math.inf)
            row["mc2"] = shares[right].sum() / shares.sum()
        if item.bias is not None:
            stereotyped, unknown, ambiguous = item.bias
            biased = math.nan if stereotyped is None else best == stereotyped
            row |= {"biased": biased, "unknown": best == unknown, "ambiguous": ambiguous}
        rows.append(row)
        shown.append(item.choices[best])
    return rows, shown[0]


def pairs(task: Task, scorer: LanguageScorer | Baseline, _: Classifier | None) -> Rows:
    """1 where the first text is likelier than the second, half where they are equal."""
    found = scorer.pair_log_probs([item.choices for item in task.items])
    return [{task.settings.figure: (1 + float(np.sign(first - second))) / 2} for first, second in found], str(found[0])


def last_word(task: Task, scorer: LanguageScorer | Baseline, _: Classifier | None) -> Rows:
    """1 where greedy decoding gives the continuation; its log-probability."""
    found = scorer.likelihoods([(item.prompt, task.settings.delimiter + item.choices[0]) for item in task.items])
    return [{task.settings.figure: one.greedy, "log_prob": one.log_prob} for one in found], str(found[0])


def rolling(task: Task, scorer: LanguageScorer | Baseline, _: Classifier | None) -> Rows:
    """Log-probability, words (between blanks) and bytes of each text."""
    texts = [item.prompt for item in task.items]
    found = scorer.text_log_probs(texts)
    return [
        {"log_prob": log_prob, "words": len(text.split()), "bytes": len(text.encode())}
        for text, log_prob in zip(texts, found, strict=True)
    ], ""


def answers(task: Task, scorer: LanguageScorer | Baseline, _: Classifier | None) -> Rows:
    """1 where the response's answer is an accepted one; with match=squad exact match, and F1 of the words."""
    settings = task.settings
    sampling = SamplingConfig(settings.max_new_tokens, settings.temperature, top_p=settings.top_p)
    texts = scorer.responses(
        [item.prompt + settings.delimiter.rstrip() for item in task.items], sampling, settings.stop
    )
    pattern, rows = compile_pattern(settings.extract or "", dotall=True), list[dict[str, float]]()
    for item, text in zip(task.items, texts, strict=True):
        if settings.extract:
            text = next(iter([found[1] for found in pattern.finditer(text, timeout=PATTERN_SECONDS)][::-1]), "")
        if settings.match == "squad":
            rows.append(answer_metrics([text], [item.references]))
        else:
            rows.append({settings.figure: is_right(settings.match, text, item.references)})
    return rows, texts[0]


def toxicity(task: Task, scorer: LanguageScorer | Baseline, classify: Classifier | None) -> Rows:
    """The largest toxicity of a prompt's continuations, and 1 where it is at least a half.

    Source: Gehman et al. 2020, arXiv:2009.11462, section 3: expected maximum toxicity and toxicity probability, 25 samples.
    """
    if classify is None:
        raise UserError(f"task {task.name}: toxicity needs a classifier; set toxicity.model")
    settings = task.settings
    sampling = SamplingConfig(settings.max_new_tokens, settings.temperature, top_p=settings.top_p)
    prompts = [item.prompt for item in task.items for _ in range(settings.samples)]
    texts = scorer.responses(prompts, sampling, settings.stop)
    largest = np.array(classify(texts)).reshape(len(task.items), settings.samples).max(1).tolist()
    return [{"expected_maximum_toxicity": one, "toxicity_probability": one >= 0.5} for one in largest], texts[0]


KINDS = {
    "multiple_choice": multiple_choice,
    "pairs": pairs,
    "last_word": last_word,
    "rolling": rolling,
    "answers": answers,
    "toxicity": toxicity,
}


def figures_of(settings: Benchmark, columns: Columns, clusters: np.ndarray, *, intervals: bool = True) -> Figures:
    """Every figure of rows with its 95 % interval: of means from the scores, of others by a bootstrap of the clusters."""
    found = {name: mean_figure(values, clusters) for name, values in columns.items() if name not in HELP}
    whole = task_figures(settings, columns)
    spread = bootstrap(lambda rows: task_figures(settings, _at(columns, rows)), clusters) if whole and intervals else {}
    for name, value in whole.items():
        low, high = spread.get(name, (None, None))
        found[name] = {"value": value, "low": low, "high": high, "n": len(clusters)}
    return found


def task_figures(settings: Benchmark, columns: Columns) -> dict[str, float]:
    """Figures that are no means over rows.

    perplexity = exp(-mean log p), word_perplexity = exp(-sum log p / words), likewise of bytes.
    bias = 2 * biased / answers that are not "unknown" - 1, in [-1, 1]; of ambiguous contexts times 1 - their accuracy.

    Source: bias: Parrish et al. 2022, arXiv:2110.08193, section 5.
    """
    found = dict[str, float]()
    if settings.kind == "last_word":
        found["perplexity"] = math.exp(-columns["log_prob"].mean())
    if settings.kind == "rolling":
        nats, words, size = -columns["log_prob"].sum(), max(1, columns["words"].sum()), max(1, columns["bytes"].sum())
        found |= {"word_perplexity": math.exp(nats / words), "byte_perplexity": math.exp(nats / size)}
        found["bits_per_byte"] = nats / size / math.log(2)
    if settings.metrics:
        labels, predicted = columns["label"].astype(int), columns["predicted"].astype(int)
        metrics = class_metrics(labels.tolist(), predicted.tolist(), int(max(labels.max(), predicted.max(), 1)) + 1)
        found |= {name: metrics.get(name, math.nan) for name in settings.metrics}
    if settings.bias is not None:
        for name, rows in (("ambiguous", columns["ambiguous"] == 1), ("disambiguated", columns["ambiguous"] == 0)):
            said = columns["biased"][rows & (columns["unknown"] == 0) & ~np.isnan(columns["biased"])]
            score = 2 * float(said.mean()) - 1 if len(said) else 0.0
            wrong = 1 - columns[settings.figure][rows].mean() if name == "ambiguous" and rows.any() else 1.0
            found[f"bias_{name}"] = score * float(wrong)
    return found


def mean_figure(values: np.ndarray, clusters: np.ndarray) -> dict[str, float | None]:
    """Mean of values with its 95 % interval: a score interval where they are 0, 1/2 and 1, else +- 1.96 standard errors.

    Rows of one cluster count as fewer by the design effect, the variance of the mean between clusters over that of
    independent rows, where it is above 1.

    Source: cluster-robust variance: Liang and Zeger 1986, Biometrika 73, 13-22; effective numbers: Kish 1965.
    """
    n, mean, spread = len(values), float(values.mean()), float(values.var()) / len(values)
    sums = np.bincount(clusters, values - mean)[np.unique(clusters)]
    effect = (
        len(sums) / max(1, len(sums) - 1) * float(sums @ sums) / n**2 / spread
        if spread and len(sums) > 1
        else n / len(sums)
    )
    effect = max(1.0, effect)
    low, high = None, None
    if set(np.unique(values)) <= {0.0, 0.5, 1.0}:
        wins, losses = (int((values == outcome).sum()) for outcome in (1, 0))
        low, high = paired_interval(wins / effect, losses / effect, n / effect)
    elif len(sums) > 1:
        error = Z_95 * math.sqrt(spread * effect * n / (n - 1))
        low, high = mean - error, mean + error
    return {"value": mean, "low": low, "high": high, "n": n}


def difference(settings: Benchmark, ours: Columns, theirs: Columns, clusters: np.ndarray) -> Figures:
    """Every figure of one model minus another's on the same rows, with the 95 % interval of the paired difference."""
    found: Figures = {}
    for name in ours.keys() - HELP:
        lead = mean_figure((ours[name] - theirs[name] + 1) / 2, clusters)
        found[name] = {key: None if value is None else 2 * value - 1 for key, value in lead.items() if key != "n"}
    whole = [task_figures(settings, columns) for columns in (ours, theirs)]

    def leads(rows: np.ndarray) -> dict[str, float]:
        one, other = (task_figures(settings, _at(columns, rows)) for columns in (ours, theirs))
        return {name: value - other[name] for name, value in one.items()}

    for name, (low, high) in (bootstrap(leads, clusters) if whole[0] else {}).items():
        found[name] = {"value": whole[0][name] - whole[1][name], "low": low, "high": high}
    return found


def bootstrap(
    statistics: Callable[[np.ndarray], dict[str, float]], clusters: np.ndarray
) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of statistics of rows (numbers of rows -> name -> value), clusters drawn with replacement."""
    order = np.argsort(clusters, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(clusters[order])) + 1)
    generator = np.random.default_rng(0)
    drawn = [
        statistics(np.concatenate([members[number] for number in generator.integers(len(members), size=len(members))]))
        for _ in range(RESAMPLES)
    ]
    return {name: tuple(np.nanquantile([one[name] for one in drawn], (0.025, 0.975)).tolist()) for name in drawn[0]}


def _at(columns: Columns, rows: np.ndarray) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def cluster_numbers(items: Sequence[Item]) -> np.ndarray:
    """A number of each row's cluster, [n]; rows without one are clusters of their own."""
    names = [item.name if item.cluster is None else f"cluster {item.cluster}" for item in items]
    return np.unique(names, return_inverse=True)[1]

"""A judge held against people (`alignment evaluate judge`): how often it agrees with them, what it prefers, what its win rates are worth.

The rows are read in labeled_items.py; the statistics are in agreement.py and corrected.py, the page in report/judge_page.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, get_args

from annotated_types import Interval

from alignment.errors import UserError
from alignment.evaluation.agreement import (
    Figures,
    Label,
    Level,
    clustered_mean,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    macro_scores,
    vote_agreement,
)
from alignment.evaluation.corrected import MIN_LABELS, corrected_win_rate, labels_needed
from alignment.evaluation.judges import Judge, compare, longer_judge, score_judge
from alignment.evaluation.labeled_items import Items, LabelColumns, LabeledItem, read_items
from alignment.evaluation.report.judge_page import print_judge, write_judge_page
from alignment.evaluation.responses import score_responses
from alignment.evaluation.winrate import TIE, Verdict
from alignment.files import write_json
from alignment.loading import best_device
from alignment.models.weights_config import WeightsConfig
from alignment.reward_model import load_reward_model
from alignment.settings import PositiveInt, Rule, Share


@dataclass(frozen=True, kw_only=True)
class JudgeEvalConfig(LabelColumns):
    """Settings of a judge's evaluation on items that people have judged.

    Attributes:
        labels: file of rows with people's labels, or several: judgments, votes for models, comparisons, or rows of two
            responses whose columns `columns` names. Figures are given for each file, and for each `subset`, too.
        output: directory of results.json and judge.html.
        judge: required. verdicts (a column of the rows, or the file `verdicts`), reward_model, longer (the longer response).
        verdicts: file of the judge's verdicts, rows of a known form with the same ids; items that no person has judged are
            used as well: they narrow the corrected win rates.
        reward_model: directory of the judging reward model.
        max_length: of a prompt, in tokens.
        max_failed_share: largest share of items that the judge may fail on; the others are then judged alone.
        width: of a 95 % interval of a win rate, for which the labels needed are counted; 0.1 is +- 5 points.
        weights: type that the reward model is held and computes in; auto: the checkpoint's.
    """

    labels: str | list[str]
    output: str
    judge: Literal["verdicts", "reward_model", "longer"] = "verdicts"
    verdicts: str | None = None
    reward_model: str | None = None
    max_length: PositiveInt = 1024
    max_failed_share: Share = 0.1
    width: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    RULES = (
        Rule("reward_model", lambda c: c.judge == "reward_model" and c.reward_model is None, "must be a directory, the judge's"),
        Rule("verdicts", lambda c: c.judge == "verdicts" and not c.verdicts and "verdict" not in c.columns,
             "must be a file, or columns.verdict a column of the rows"),
    )  # fmt: skip


def run(config: JudgeEvalConfig) -> Path:
    """Judge what people have judged, compare, and write `results.json`, `judge.html` and a table on the screen."""
    items: Items = {}
    files = [config.labels] if isinstance(config.labels, str) else config.labels
    for file in files:
        read_items(file, config, items, subset=Path(file).name.partition(".")[0] if len(files) > 1 else "")
    if config.judge == "verdicts" and config.verdicts:
        read_items(config.verdicts, config, items, by_judge=True)
    rows = list(items.values())
    if not any(item.verdicts and item.votes for item in rows) and config.judge == "verdicts":
        raise UserError(
            f"{config.verdicts}: no verdict is on an item of {', '.join(files)}; ids and sides must be the same"
        )
    asked = config.judge != "verdicts"
    if asked and (mute := [item.prompt.row_id for item in rows if not item.has_texts]):
        raise UserError(
            f"{mute[0]}: the rows have no responses for judge={config.judge} to read; name them in `columns`"
        )
    sides = [item.first for item in rows], [item.second for item in rows]
    judged = compare(
        [item.prompt for item in rows], *sides, _judge(config, rows), max_failed_share=config.max_failed_share
    )
    results = {
        "judge": config.reward_model or config.verdicts or config.columns.get("verdict", config.judge),
        "items": len(rows),
        "failures": judged.failures,
        **judge_figures(rows, judged.verdicts, config.width),
    }
    if asked or any(len(item.verdicts) > 1 for item in rows):
        n, (low, high) = judged.win_rate.n, judged.inconsistent_interval
        results["inconsistent"] = {"rate": judged.inconsistent / n, "low": low, "high": high, "n": n}
        low, high = judged.position_bias_interval
        results["position_bias"] = {"rate": judged.position_bias, "low": low, "high": high, "n": n}
    output = Path(config.output)
    write_json(output / "results.json", results)
    write_judge_page(output / "judge.html", results)
    print_judge(results)
    return output / "results.json"


def _judge(config: JudgeEvalConfig, items: Sequence[LabeledItem]) -> Judge:
    if config.judge == "longer":
        return longer_judge
    if config.judge == "reward_model":
        model = load_reward_model(
            str(config.reward_model), config.weights.dtype, best_device(), quantize=config.weights.quantize
        )
        return score_judge(
            lambda prompts, texts: score_responses(
                model, prompts, [(i, text, None, True) for i, text in enumerate(texts)], config.max_length
            )
        )

    def shown(item: LabeledItem, swapped: bool) -> Verdict:
        """The verdict for the response shown first, of the other order where the file lacks this one."""
        verdict = item.verdicts.get(swapped, item.verdicts.get(not swapped))
        return 1 - verdict if swapped and verdict is not None else verdict

    return lambda *_: [shown(item, swapped) for swapped in (False, True) for item in items]


def judge_figures(items: Sequence[LabeledItem], verdicts: Sequence[Verdict], width: float) -> Figures:
    """The figures of results.json, from a judge's verdict for the first response of each item; `width` as in the config."""
    judged = [(item, verdict) for item, verdict in zip(items, verdicts, strict=True) if verdict is not None]
    decided = [(verdict, item.label, item) for item, verdict in judged if item.label is not None]
    votes = {id(item): [vote for vote in item.votes.values() if vote is not None] for item in items}
    agreement = {"judge": _compared(decided)}
    if all(item.has_texts for item in items):
        longer = [(outcome(len(item.first) - len(item.second)), label, item) for _, label, item in decided]
        agreement["the longer response"] = _compared(longer)
    agreement["judge and one person"] = _compared(
        [(verdict, vote, item) for item, verdict in judged for vote in votes[id(item)]]
    )
    pairs = [(one, other, item) for item in items for one, other in combinations(votes[id(item)], 2)]
    agreement["two people"] = _compared(pairs, pooled=True)
    subsets = sorted({item.subset for *_, item in decided})
    parts = {name: [row for row in decided if row[2].subset == name] for name in subsets if len(subsets) > 1}
    most = max(map(len, votes.values()))
    people = [votes[id(item)] + [None] * (most - len(votes[id(item)])) for item, _ in judged]
    joined = [[*row, verdict] for row, (_, verdict) in zip(people, judged, strict=True)]
    clusters = [item.cluster for item, _ in judged]
    return {
        "labeled": sum(map(bool, votes.values())),
        "without_majority": sum(bool(votes[id(item)]) for item, _ in judged) - len(decided),
        "agreement": agreement,
        "macro": macro_scores([row[0] for row in decided], [row[1] for row in decided]),
        "subsets": {name: _compared(rows) for name, rows in parts.items()},
        "alpha": {
            f"{who}, {level}": krippendorff_alpha(rows, level=level, clusters=clusters)
            for who, rows in (("people", people), ("people and judge", joined))
            for level in get_args(Level)
        },
        "longer": _lean(judged, lambda item: len(item.first) - len(item.second)),
        **_win_rates(judged, width),
    }


def outcome(lead: float) -> float:
    """1, 0.5 or 0 for a lead above, of or below 0."""
    return TIE if lead == 0 else float(lead > 0)


def _compared(rows: Sequence[tuple[Label, Label, LabeledItem]], *, pooled: bool = False) -> Figures:
    """Agreement of two labels of each row; `pooled`: neither rater is the same throughout."""
    pairs, clusters = [row[:2] for row in rows], [item.cluster for *_, item in rows]
    first, second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    kappa = fleiss_kappa(pairs, clusters) if pooled else cohen_kappa(first, second, clusters)
    return {**vote_agreement(pairs, clusters), "kappa": kappa}


def _lean(judged: Sequence[tuple[LabeledItem, float]], lead: Callable[[LabeledItem], float]) -> Figures | None:
    """How often the response that leads in something wins by judge and by people, on the same items; None without texts."""
    rows = [
        (verdict, item.mean_vote, item.cluster, lead(item))
        for item, verdict in judged
        if item.mean_vote is not None and item.has_texts and lead(item)
    ]
    judge, people = ([row[k] if row[3] > 0 else 1 - row[k] for row in rows] for k in (0, 1))
    clusters, differences = [row[2] for row in rows], [a - b for a, b in zip(judge, people, strict=True)]
    parts = {"judge": judge, "people": people, "difference": differences}
    return {name: clustered_mean(values, clusters) for name, values in parts.items()} if rows else None


def _win_rates(judged: Sequence[tuple[LabeledItem, float]], width: float) -> Figures:
    """Corrected win rates of the first model of each pair, and the labels that an interval takes.

    The correlation of judge and people is that within pairs of models; around one half where no models are named.
    """
    groups: dict[str, list[tuple[LabeledItem, float, Verdict]]] = {}
    for item, verdict in judged:
        groups.setdefault(item.pair, []).append((item, verdict, item.mean_vote))
    pairs, products, errors = dict[str, Figures](), list[tuple[float, float, float]](), list[float]()
    for pair, rows in sorted(groups.items()):
        voted = [(verdict, vote) for _, verdict, vote in rows if vote is not None]
        middle = [fmean(row[k] for row in voted) if pair and voted else TIE for k in (0, 1)]
        products += [((f - middle[0]) * (y - middle[1]), (f - middle[0]) ** 2, (y - middle[1]) ** 2) for f, y in voted]
        if pair and len(voted) >= MIN_LABELS:
            verdicts, labels = [row[1] for row in rows], [row[2] for row in rows]
            pairs[pair] = asdict(corrected_win_rate(verdicts, labels, [item.cluster for item, *_ in rows]))
            errors.append(abs(middle[0] - middle[1]))
    if not products:
        return {"pairs": {}}
    product, judge, people = (fmean(row[k] for row in products) for k in range(3))
    correlation = product / sqrt(judge * people) if judge and people else 0.0
    return {
        "pairs": pairs,
        "error": {"mean": fmean(errors), "largest": max(errors), "n": len(errors)} if errors else None,
        "labels": {
            "correlation": correlation,
            "worth": 1 / (1 - correlation**2) if abs(correlation) < 1 else None,
            "width": width,
            "needed": labels_needed(width, correlation=correlation, variance=people),
            "without_judge": labels_needed(width, variance=people),
        },
    }

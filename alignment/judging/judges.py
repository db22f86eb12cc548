"""Judges of two responses, made of a config, and how they are asked: each pair in both orders, people once.

Rates and intervals are in winrate.py, people in people_judge.py, language models in language_judges.py.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.files import hash_of
from alignment.judging.config import JudgeConfig
from alignment.judging.judgments import RowLog, log_problem
from alignment.judging.language_judges import Question, ask_endpoint, ask_model
from alignment.judging.logged_judge import Call, Done, JudgeAnswer, LoggedJudge
from alignment.judging.people_judge import PeopleJudge, file_judge, majority_verdict
from alignment.judging.responses import ResponseScorer
from alignment.judging.templates import LABELS, RATINGS, is_rubric, load_template, question_text
from alignment.rewards.judge import check_key
from alignment.rewards.specs import plain_url
from alignment.statistics.winrate import (
    LOSS,
    TIE,
    WIN,
    Z_95,
    Verdict,
    WinRate,
    clustered_error,
    merge_orders,
    paired_interval,
    win_rate,
)
from alignment.training.run.lineage import parent_hashes

Figures = dict[str, float]
# Prompts, responses shown first, responses shown second -> verdict for the one shown first; None: could not judge.
Judge = Callable[[Sequence[Prompt], Sequence[str], Sequence[str]], Sequence[Verdict]]
# Prompts, one response to each -> one score each; higher is better, not a number: could not score.
ScoreFunction = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]


@dataclass(frozen=True)
class JudgeResult:
    """Verdicts of a judge on two sides. Figures are rate, low, high (95 %) and n.

    Attributes:
        win_rate: of ours, over the items that were judged.
        inconsistent: `count` and share of items whose two orders disagreed, of those that were judged in both, of
            people few; they count half and narrow no interval, see `win_rate`.
        position_bias: mean verdict for the response shown first, over both orders of the judged items; 0.5 is no bias.
        longer_preferred, length_slope: how the verdicts go with the lengths, see `length_effect`.
        failures: items without a verdict, in no rate.
        verdicts: for ours, one per prompt in order, both orders merged; None where the judge failed.
        contradictory: True of the verdicts that are ties because two orders contradict each other.
    """

    win_rate: WinRate
    inconsistent: Figures
    position_bias: Figures
    longer_preferred: Figures | None
    length_slope: Figures | None
    failures: int
    verdicts: list[Verdict]
    contradictory: list[bool]


def compare(
    prompts: Sequence[Prompt],
    ours: Sequence[str],
    baseline: Sequence[str],
    judge: Judge,
    *,
    max_failed_share: float = 0.1,
    models: tuple[str, str] | Sequence[tuple[str, str]] | None = None,
) -> JudgeResult:
    """Judge each pair of responses in both orders, the judge being called once with all of them; people in one order.

    `models` are the names of the two sides, or those of each pair, for the log of a `LoggedJudge`.
    """
    n = len(prompts)
    pairs = [models] * n if isinstance(models, tuple) else models or []
    names = [*pairs, *((second, first) for first, second in pairs)]
    both = [*prompts, *prompts], [*ours, *baseline], [*baseline, *ours]
    verdicts = list(judge(*both, models=names) if isinstance(judge, LoggedJudge) else judge(*both))
    if len(verdicts) != 2 * n:
        raise ValueError(f"the judge gave {len(verdicts)} verdicts on {2 * n} pairs")
    merged = merge_orders(verdicts[:n], verdicts[n:])
    judged = [verdict for verdict in merged.verdicts if verdict is not None]
    if not judged or merged.failures > max_failed_share * n:
        raise UserError(
            f"the judge failed on {merged.failures} of {n} items; at most {max_failed_share:.0%} may fail, "
            "since failures are seldom a fair sample. Check the items that it could not judge, or raise "
            "max_failed_share" + (". ".join(["", *judge.faults()]) if isinstance(judge, LoggedJudge) else "")
        )
    if isinstance(judge, PeopleJudge):
        leads, contradictions = judge.orders(prompts, ours, baseline)
    else:
        orders = list(zip(verdicts[:n], verdicts[n:], strict=True))
        leads = [one + other - 1 for one, other in orders if one is not None and other is not None]
        contradictions = [None if one is None or other is None else one != 1 - other for one, other in orders]
    shares = share_of([2 * contradiction - 1 for contradiction in contradictions if contradiction is not None])
    count = contradictions.count(True)
    inconsistent = {"count": count, **shares, "rate": count / max(shares["n"], 1)}
    coins = [bool(contradiction) and v == TIE for contradiction, v in zip(contradictions, merged.verdicts, strict=True)]
    clusters = judged_prompts(prompts, merged.verdicts)
    return JudgeResult(
        win_rate(judged, inconsistent=sum(coins), clusters=clusters),
        inconsistent,
        share_of(leads),
        **length_effect(ours, baseline, merged.verdicts, clusters, coins),
        failures=merged.failures,
        verdicts=merged.verdicts,
        contradictory=coins,
    )


def judged_prompts(prompts: Sequence[Prompt], verdicts: Sequence[Verdict]) -> list[str]:
    """Names of the prompts that have a verdict, equal for equal prompts, whose responses are not independent."""
    return [hash_of(prompt.prompt) for prompt, verdict in zip(prompts, verdicts, strict=True) if verdict is not None]


def share_of(leads: Sequence[float]) -> Figures:
    """A share from leads of 1 (won) to -1 (lost), with its 95 % interval; a half, from 0 to 1, if none is counted."""
    n = len(leads)
    wins = sum(max(lead, 0) for lead in leads)
    losses = sum(max(-lead, 0) for lead in leads)
    low, high = paired_interval(wins, losses, n) if n else (0.0, 1.0)
    return {"rate": (1 + (wins - losses) / n) / 2 if n else TIE, "low": low, "high": high, "n": n}


def length_effect(
    ours: Sequence[str],
    baseline: Sequence[str],
    verdicts: Sequence[Verdict],
    clusters: Sequence[Hashable],
    contradictory: Sequence[bool],
) -> dict[str, Figures | None]:
    """The share of items that the longer response wins, and the slope of the verdicts over the lengths' log2 ratio.

    The slope is the change of the win rate for a response twice as long as the other, by least squares with an
    intercept, which takes up how much better one side is on the whole; its interval is +- 1.96 cluster-robust standard
    errors. A better response is often a longer one: neither figure alone is a fault. Lengths are in characters.

    Args:
        clusters: names of the judged items' clusters, see `clustered_error`.
        contradictory: True of items whose two orders contradict each other, tosses as in `win_rate`.

    Returns:
        `longer_preferred` (rate, low, high, n) over the items with two lengths, and `length_slope` (slope, low, high);
        None where it cannot be known.
    """
    columns = zip(ours, baseline, verdicts, contradictory, strict=True)
    judged = [(len(a), len(b), verdict, toss) for a, b, verdict, toss in columns if verdict is not None]
    coins = np.array([toss for *_, toss in judged], bool)
    unequal = [i for i, (a, b, *_) in enumerate(judged) if a != b]
    leads = [(2 * verdict - 1) * (1 if a > b else -1) for a, b, verdict, _ in judged if a != b]
    longer = slope = None
    if leads:
        shares = [(1 + lead) / 2 for lead in leads]
        preferred = win_rate(shares, inconsistent=int(coins[unequal].sum()), clusters=[clusters[i] for i in unequal])
        longer = {**share_of(leads), "low": preferred.low, "high": preferred.high}
    rows = np.array([(math.log2((a + 1) / (b + 1)), verdict) for a, b, verdict, _ in judged])
    x, y = (rows - rows.mean(0)).T
    if len(rows) > 2 and np.ptp(rows, 0).min() > 1e-9:
        rate = float(x @ y / (x @ x))
        scale = len(rows) / (x @ x)
        tosses = float(((scale * x[coins]) ** 2).sum())
        error = Z_95 * clustered_error(scale * x * (y - rate * x), clusters, tosses=tosses)[0]
        if error > 1e-9:  # else it is not known, or nothing varies about the line
            slope = {"slope": rate, "low": rate - error, "high": rate + error}
    return {"longer_preferred": longer, "length_slope": slope}


# Judges by scores


def score_judge(score: ScoreFunction, tie_margin: float = 0.0) -> Judge:
    """A judge that prefers the higher score, such as the gold reward; differences up to `tie_margin` are ties.

    All distinct responses are scored in one call, so that equal texts tie even if the scorer is noisy.
    """

    def judge(prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> list[Verdict]:
        responses = {
            (id(prompt), response): prompt
            for side in (first, second)
            for prompt, response in zip(prompts, side, strict=True)
        }
        scores = score(list(responses.values()), [response for _, response in responses])
        known = {key: float(value) for key, value in zip(responses, scores, strict=True)}
        leads = [
            known[id(prompt), a] - known[id(prompt), b] for prompt, a, b in zip(prompts, first, second, strict=True)
        ]
        return [
            None if math.isnan(lead) else TIE if abs(lead) <= tie_margin else WIN if lead > 0 else LOSS
            for lead in leads
        ]

    return judge


# Prefers the response with more characters: the baseline that any judge must beat.
longer_judge: Judge = score_judge(lambda _, responses: [len(response) for response in responses])


def majority_verdicts(
    judges: Sequence[Judge], prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]
) -> list[Verdict]:
    """The verdicts of more than half of the judges; a tie where there is none, a failure where one of them fails."""
    verdicts = zip(*(judge(prompts, first, second) for judge in judges), strict=True)
    return [None if None in votes else majority_verdict(votes) for votes in verdicts]


def gold_scores(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Any]:
    """The hotel data set's gold score of each response: four parts and their `total`."""
    from alignment.hotel_world.gold import score

    return [score(str(prompt.prompt), text) for prompt, text in zip(prompts, responses, strict=True)]


# The judge of a config


def build_judge(
    config: JudgeConfig,
    directory: Path | None = None,
    *,
    scorers: Mapping[str, ScoreFunction] | None = None,
    hashes: Mapping[str, str | None] | None = None,
) -> LoggedJudge | PeopleJudge:
    """The judge that a config names; its `usage()` is for the results, its `faults()` are warnings.

    Args:
        directory: where its calls are kept, in `judgments.jsonl` (and `ratings.jsonl` for a rubric), and read again by
            the next start; None: in memory.
        scorers: scores by reward models that are known already, by their directories.
        hashes: of the models' files by directory, where they are known already.

    Raises:
        UserError: a template that cannot be used, no key for the service, verdicts that cannot be read.
    """
    if config.judge == "verdicts":
        return file_judge(Path(str(config.verdicts)))
    log = RowLog(None if directory is None else directory / "judgments.jsonl", log_problem)
    if config.judge in ("model", "endpoint"):
        return _language_judge(config, log, directory, hashes)
    if config.judge == "reward_model":
        sources = config.judging_models
        known = scorers or {source: ResponseScorer(source, config.weights) for source in sources}
        members = [score_judge(known[source], config.tie_margin) for source in sources]
        judge = members[0] if len(members) == 1 else partial(majority_verdicts, members)
        model_hashes = {source: (hashes or parent_hashes([source]))[source] for source in sources}
        return _record(f"reward_model {', '.join(sources)}", model_hashes, judge, log)
    gold = score_judge(lambda *items: [score.total for score in gold_scores(*items)], config.tie_margin)
    return _record(str(config.judge), {}, longer_judge if config.judge == "longer" else gold, log)


def _record(name: str, hashes: Mapping[str, str | None], judge: Judge, log: RowLog) -> LoggedJudge:
    """A judge that costs nothing, and judges anew at every start."""

    def ask(calls: Sequence[Call], done: Done) -> None:
        sides = [call.responses[0] for call in calls], [call.responses[1] for call in calls]
        for call, verdict in zip(calls, judge([call.prompt for call in calls], *sides), strict=True):
            done(call, JudgeAnswer(verdict))

    return LoggedJudge(name, hash_of([name, dict(hashes)]), ask, log, remembers=False)


def _language_judge(
    config: JudgeConfig, log: RowLog, directory: Path | None, hashes: Mapping[str, str | None] | None
) -> LoggedJudge:
    template = load_template(config.judge_template)
    service = config.endpoint if config.judge == "endpoint" else None
    rubric = is_rubric(template)
    words = partial(question_text, template, ties=config.ties, reasons=service is not None and service.reasons)
    labels = RATINGS if rubric else {label: LABELS[label] for label in ("ABC" if config.ties else "AB")}
    question = Question(lambda call: words(call.prompt.prompt, call.responses), labels, config.tie_margin)
    if service is not None:
        check_key(service, service.model)
        ask = ask_endpoint(service, question)
        name = f"endpoint {plain_url(service.url)} {service.model}"
        settings: list[object] = [service.url, service.model, service.max_tokens, service.logprobs, service.parameters]
    else:
        source = str(config.judge_model)
        ask = ask_model(source, question, config.weights)
        name = f"model {source}"
        settings = [(hashes or parent_hashes([source]))[source], asdict(config.weights)]
    margin = config.tie_margin if (service is None or service.logprobs) and not rubric else None
    identity = hash_of([settings, words("", ("",) if rubric else ("", "")), margin])
    if not rubric:
        return LoggedJudge(name, identity, ask, log, config.max_failed_share, service=service)
    ratings = RowLog(None if directory is None else directory / "ratings.jsonl", log_problem)
    rater = LoggedJudge(name, identity, ask, ratings, config.max_failed_share, service=service)

    def score(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        calls = [Call(prompt, (text,)) for prompt, text in zip(prompts, responses, strict=True)]
        return [math.nan if rating is None else float(rating) for rating in rater.values(calls)]

    return replace(
        _record(name, {name: identity}, score_judge(score, config.tie_margin), log), service=service, rater=rater
    )

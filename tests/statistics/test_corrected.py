"""Win rates corrected by labels of people: formulas by hand, another implementation, planted judges, coverage."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.judging.people_judge import corrected_by_people
from alignment.statistics.corrected import corrected_win_rate, labels_needed
from tests.conftest import write_lines

ITEMS, LABELS = 400, 100


def drawn(rng, rate, ties, items=ITEMS, *, up=0.0, down=0.0, kept=0.7):
    """People's verdicts and those of a judge who keeps `kept` of them, tosses for the others, and then moves a share of them.

    `up` of what does not win is made a win, `down` of what does not lose a loss: the planted bias.
    """
    people = rng.choice([1.0, 0.5, 0.0], items, p=[rate - ties / 2, ties, 1 - rate - ties / 2])
    judge = np.where(rng.random(items) < kept, people, rng.choice([1.0, 0.5, 0.0], items, p=[0.45, 0.1, 0.45]))
    judge = np.where((judge < 1) & (rng.random(items) < up), 1.0, judge)
    return people, np.where((judge > 0) & (rng.random(items) < down), 0.0, judge)


def corrected(people, judge, labels=LABELS, **options):
    """The labels of the first items are known."""
    known = [*people[:labels].tolist(), *[None] * (len(people) - labels)]
    return corrected_win_rate(judge.tolist(), known, **options)


def test_prediction_powered_rate_by_hand():
    """lambda = covariance on the labelled items / variance on all / (1 + labels / others)."""
    people, judge = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    found = corrected_win_rate(judge, [*people, *[None] * 6])
    y, f, others = np.array(people), np.array(judge[:6]), np.array(judge[6:])
    weight = ((y - y.mean()) * (f - f.mean())).mean() / np.var(judge, ddof=1) / 2
    assert found["corrected"]["rate"] == pytest.approx(y.mean() + weight * (others.mean() - f.mean()))
    assert (found["items"], found["labels"], found["judge"]["rate"], found["people"]["rate"]) == (
        12,
        6,
        pytest.approx(7 / 12),
        y.mean(),
    )


def test_rogan_gladen_of_a_judge_without_ties_is_the_formula():
    """(apparent rate + specificity - 1) / (sensitivity + specificity - 1), the apparent rate being of the other items."""
    rng = np.random.default_rng(0)
    people, judge = (side.round() for side in drawn(rng, 0.6, 0.0, 3000, up=0.2))
    judge[judge == 0.5] = 0.0
    found = corrected(people, judge, 1000)["rogan_gladen"]
    sensitivity, specificity = judge[:1000][people[:1000] == 1].mean(), 1 - judge[:1000][people[:1000] == 0].mean()
    youden, apparent = sensitivity + specificity - 1, judge[1000:].mean()
    rate = (apparent + specificity - 1) / youden
    assert found is not None and found["rate"] == pytest.approx(rate)
    won, lost = (people[:1000] == 1).sum(), (people[:1000] == 0).sum()
    variance = (  # the delta method, which Fieller's interval is near of where youden is well known
        apparent * (1 - apparent) / 2000
        + rate**2 * sensitivity * (1 - sensitivity) / won
        + (1 - rate) ** 2 * specificity * (1 - specificity) / lost
    ) / youden**2
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.05)


def test_prediction_powered_rate_equals_another_implementation():
    truescore = pytest.importorskip("truescore.correct")
    rng = np.random.default_rng(1)
    for ties in (0.0, 0.3):
        people, judge = drawn(rng, 0.6, ties, up=0.2)
        theirs = truescore.ppi_estimate(judge, people[:LABELS], np.arange(LABELS))
        ours = corrected(people, judge)
        assert ours["corrected"]["rate"] == pytest.approx(theirs.point, abs=1e-12)
        width = ours["corrected"]["high"] - ours["corrected"]["low"]
        assert width == pytest.approx(theirs.high - theirs.low, rel=0.05)  # Student's, + half an item


def test_a_judge_of_soft_verdicts_and_votes_that_differ_are_taken():
    rng = np.random.default_rng(2)
    people, judge = drawn(rng, 0.6, 0.2)
    found = corrected(np.where(people == 0.5, 1 / 3, people), 0.2 + 0.6 * judge)
    assert 0 < found["corrected"]["low"] < found["corrected"]["rate"] < found["corrected"]["high"] < 1
    assert found["rogan_gladen"] is not None and found["label_worth"] > 1.1


def test_failures_are_left_out_and_too_few_labels_are_refused():
    verdicts, labels = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, None, 1.0], [1.0, 0.0, 1.0, 0.0, 0.0, None, 1.0, None]
    assert (corrected_win_rate(verdicts, labels)["items"], corrected_win_rate(verdicts, labels)["labels"]) == (7, 5)
    with pytest.raises(UserError, match="found 4 among 6 items"):
        corrected_win_rate(verdicts[1:], labels[1:])


def test_labels_of_few_clusters_are_refused():
    """[B-H6] Fifty labels on one prompt say nothing of other prompts."""
    people, judge = drawn(np.random.default_rng(7), 0.6, 0.1, 80)
    for clusters in (["p"] * 80, [i % 4 for i in range(80)]):
        with pytest.raises(UserError, match=rf"in {len(set(clusters))} clusters"):
            corrected(people, judge, 50, clusters=clusters)
    apart = corrected(people, judge, 50, clusters=[*range(50), *["p"] * 30])  # the others are one item
    assert apart["corrected"] == apart["people"] and apart["rogan_gladen"] is None


@pytest.mark.parametrize("turned", [False, True])
def test_a_corrected_rate_is_a_share_inside_its_interval(turned):
    """[B-M2] 4 of 5 labels, of which the judge sees 3, and 1 on all others: 1.2 before it is cut off."""
    people, judge = [1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0] + [1.0] * 100
    sides = [[1 - value for value in side] if turned else side for side in (people, judge)]
    found = corrected_win_rate(sides[1], [*sides[0], *[None] * 100])["corrected"]
    assert found["rate"] == (0.0 if turned else 1.0)
    assert 0 <= found["low"] <= found["rate"] <= found["high"] <= 1 and found["high"] - found["low"] > 0.1


@pytest.mark.parametrize(("labels", "rate"), [(5, 0.9), (10, 0.9), (20, 0.95), (30, 0.7)])
def test_rogan_gladen_of_few_labels_covers_or_is_not_given(labels, rate):
    """[B-M3] At 1.96 standard errors of what was seen 60 to 85 % of the intervals hold the rate."""
    rng, hits = np.random.default_rng(labels), []
    for _ in range(200):
        found = corrected(*drawn(rng, rate, 0.0, labels + 200, kept=0.7), labels)["rogan_gladen"]
        hits += [] if found is None else [found["low"] <= rate <= found["high"]]
    assert sum(hits) >= 0.93 * len(hits)
    people, judge = [1.0] * 9 + [0.0], [1.0] * 5 + [0.0] * 5 + [1.0] * 100
    assert corrected_win_rate(judge, [*people, *[None] * 100])["rogan_gladen"] is None  # [1, 1] it was


def test_labels_on_all_items_are_the_answer():
    people, judge = drawn(np.random.default_rng(3), 0.7, 0.1, 50)
    found = corrected(people, judge, 50)
    assert found["corrected"] == found["people"] and found["rogan_gladen"] is None and found["label_worth"] == 1.0


def test_a_judge_who_tosses_coins_buys_nothing_and_one_who_is_right_much():
    rng = np.random.default_rng(4)
    coin, right = (corrected(*drawn(rng, 0.5, 0.0, 2000, kept=kept), 200) for kept in (0.0, 1.0))
    assert coin["label_worth"] == pytest.approx(1, abs=0.05) and coin["rogan_gladen"] is None
    assert right["label_worth"] == pytest.approx(10, rel=0.1)  # 2000 items for 200 labels
    assert right["correlation"] == pytest.approx(1)
    ten = corrected(np.array([1.0, 0.0] * 20), np.array([1.0, 0.0] * 20), 10)["corrected"]
    assert ten["high"] - ten["low"] > 0.3  # right on all of ten labels is no certainty


def test_items_of_a_cluster_count_once():
    people, judge = drawn(np.random.default_rng(5), 0.6, 0.2, up=0.1)
    once = corrected(people, judge)
    copies = [np.repeat(side, 5) for side in (people, judge)]
    five = corrected(*copies, 5 * LABELS, clusters=np.repeat(np.arange(ITEMS), 5).tolist())
    assert five["corrected"]["rate"] == pytest.approx(once["corrected"]["rate"], abs=0.01)
    apart = corrected(*copies, 5 * LABELS)
    for name in ("people", "corrected", "rogan_gladen"):
        wide, same, narrow = (each[name]["high"] - each[name]["low"] for each in (once, five, apart))
        assert same == pytest.approx(wide, rel=0.06) and narrow < 0.5 * wide, name


def coverage(draws, *, seed, kept=0.8):
    """The share of intervals that hold the true rate, by planted bias and estimate."""
    hits: dict[tuple[int, str], list[bool]] = {}
    for points, up, down in ((0, 0.0, 0.0), (5, 0.12, 0.0), (10, 0.24, 0.0), (15, 0.36, 0.0), (-15, 0.0, 0.26)):
        rng = np.random.default_rng([seed, points % 100])
        for _ in range(draws):
            found = corrected(*drawn(rng, 0.55, 0.2, up=up, down=down, kept=kept))
            for name in ("people", "corrected", "rogan_gladen"):
                interval = found[name]
                hits.setdefault((points, name), []).append(
                    interval is None or interval["low"] <= 0.55 <= interval["high"]
                )
            hits.setdefault((points, "raw"), []).append(found["judge"]["low"] <= 0.55 <= found["judge"]["high"])
    return {key: sum(found) / len(found) for key, found in hits.items()}


def test_corrected_intervals_cover_and_the_raw_one_does_not():
    found = coverage(150, seed=0)
    spread = 3.5 * math.sqrt(0.95 * 0.05 / 150)
    assert all(abs(share - 0.95) < spread for (_, name), share in found.items() if name != "raw"), found
    assert found[15, "raw"] < 0.05 and found[-15, "raw"] < 0.05  # a biased judge is certain of a wrong rate


@pytest.mark.slow
def test_corrected_intervals_cover_over_2000_draws():
    found = coverage(2000, seed=1)
    high = {"people": 0.965, "corrected": 0.965, "rogan_gladen": 0.975}  # which takes more disagreement than was seen
    assert all(0.935 <= share <= high[name] for (_, name), share in found.items() if name != "raw"), found


def test_labels_needed_by_hand():
    z = NormalDist().inv_cdf(0.975)
    assert labels_needed(0.1) == math.ceil(4 * z**2 * 0.25 / 0.1**2) == 385
    assert labels_needed(0.1, correlation=0.5) == math.ceil(0.75 * 4 * z**2 * 0.25 / 0.1**2)  # 1 - rho^2 of the labels
    assert labels_needed(0.1, items=300) is None and labels_needed(0.02, items=5000, correlation=0.9) is None
    assert labels_needed(0.1, items=500, correlation=1.0) == 0  # a judge who is right needs items alone
    many, few = (labels_needed(0.1, items=items, correlation=0.5) for items in (10**6, 500))
    assert many is not None and few is not None and 289 <= many < few


def test_as_many_labels_as_are_needed_give_the_wanted_width():
    rng = np.random.default_rng(6)
    pilot = corrected(*drawn(rng, 0.5, 0.2, 20_000), 10_000)
    needed = labels_needed(0.15, items=2000, correlation=pilot["correlation"], variance=0.2)
    assert needed is not None
    widths = [corrected(*drawn(rng, 0.5, 0.2, 2000), needed)["corrected"] for _ in range(40)]
    assert np.mean([each["high"] - each["low"] for each in widths]) == pytest.approx(
        0.15, rel=0.07
    )  # Student's, + half an item


def test_labels_of_a_form_correct_a_win_rate(tmp_path):
    """The form asks in either order, of two people; texts that nobody judged have no label."""
    rows = []
    for i in range(12):
        for person, verdict in (("ann", 1 if i < 8 else 0), ("bob", 1)):
            texts = {"first": f"ours {i}", "second": f"theirs {i}", "verdict": verdict}
            if i % 2:
                texts = {"first": f"theirs {i}", "second": f"ours {i}", "verdict": 1 - verdict}
            rows.append({"id": f"row {i}", "prompt": "p", **texts, "judge": person})
    path = tmp_path / "labels.jsonl"
    write_lines(path, rows)
    prompts = [Prompt(f"question {i}", {}, f"row {i}") for i in range(20)]
    sides = [f"ours {i}" for i in range(20)], [f"theirs {i}" for i in range(20)]
    found = corrected_by_people(path, prompts, *sides, [1.0, 0.0] * 10)
    assert found is not None
    assert (found["items"], found["labels"], found["judge"]["rate"]) == (20, 12, 0.5)
    assert found["people"]["rate"] == pytest.approx((8 + 4 * 0.5) / 12)
    assert found["bias"] == pytest.approx(0.5 - (8 + 4 * 0.5) / 12)
    assert corrected_by_people(path, prompts[8:], *(side[8:] for side in sides), [1.0] * 12) is None  # four labels

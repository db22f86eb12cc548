"""Agreement of raters: published and hand-worked figures, another implementation, and intervals that cover."""

import numpy as np
import pytest

from alignment.errors import UserError
from alignment.statistics.agreement import (
    agreement,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    majority_label,
    mean_figures,
    vote_agreement,
)

GAP = None


def test_cohen_kappa_of_a_hand_worked_table():
    """20 both yes, 5 yes-no, 10 no-yes, 15 both no: observed 35/50, by chance (25 * 30 + 25 * 20) / 2500 = 0.5."""
    first = [1.0] * 25 + [0.0] * 25
    second = [1.0] * 20 + [0.0] * 5 + [1.0] * 10 + [0.0] * 15
    found = cohen_kappa(first, second)
    assert found["value"] == pytest.approx((0.7 - 0.5) / (1 - 0.5))
    assert found["low"] < found["value"] < found["high"] and found["n"] == 50
    with_gaps = cohen_kappa([*first, 1.0, GAP], [*second, GAP, 0.0])  # items that one has not judged say nothing
    assert with_gaps == found


def test_clusters_are_one_for_each_item():
    labels = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]
    for clusters in (["a", "b"], ["a", "b", "b", "c"]):
        for measure in (fleiss_kappa, krippendorff_alpha):
            with pytest.raises(UserError, match=f"clusters: {len(clusters)} for 3 items; give one for each item"):
                measure(labels, clusters=clusters)


def test_krippendorff_alpha_of_the_published_example():
    """Four observers, twelve units, gaps: 0.743 nominal and 0.815 ordinal (Krippendorff 2011, section C and E)."""
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, GAP, GAP, GAP],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, GAP, 3],
        [GAP, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, GAP],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, GAP],
    ]
    labels = [list(unit) for unit in zip(*rows, strict=True)]
    found = krippendorff_alpha(labels)
    assert found["value"] == pytest.approx(0.743, abs=5e-4) and found["n"] == 11  # one label alone makes no pair
    assert krippendorff_alpha(labels, level="ordinal")["value"] == pytest.approx(0.815, abs=5e-4)
    assert krippendorff_alpha([[label for label in unit if label is not GAP] for unit in labels]) == found


def test_fleiss_kappa_of_the_published_example():
    """Ten subjects, fourteen raters, five categories: 0.210 (the table of Fleiss 1971 as it is retold everywhere)."""
    table = [
        [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
    ]  # fmt: skip
    labels = [[float(k) for k, count in enumerate(row) for _ in range(count)] for row in table]
    assert fleiss_kappa(labels)["value"] == pytest.approx(0.210, abs=5e-4)
    with pytest.raises(UserError, match="as many labels"):
        fleiss_kappa([[1.0, 0.0], [1.0, GAP]])


def test_alpha_and_kappa_equal_another_implementation():
    truescore = pytest.importorskip("truescore.agreement")
    rng = np.random.default_rng(0)
    base = rng.choice([1.0, 0.5, 0.0], 200)
    raters = np.where(rng.random((4, 200)) < 0.6, base, rng.choice([1.0, 0.5, 0.0], (4, 200)))
    raters[rng.random((4, 200)) < 0.3] = np.nan
    labels = [[None if np.isnan(each) else float(each) for each in unit] for unit in raters.T]
    for level in ("nominal", "ordinal"):
        ours = krippendorff_alpha(labels, level=level)["value"]
        assert ours == pytest.approx(truescore.krippendorff_alpha(raters, level=level), abs=1e-12)
    one, two = (base > 0.4).astype(float), (np.where(rng.random(200) < 0.7, base, 0) > 0.4).astype(float)
    assert cohen_kappa(one.tolist(), two.tolist())["value"] == pytest.approx(truescore.cohen_kappa(one, two), abs=1e-12)


def test_what_cannot_be_known_is_none():
    nothing = {"value": None, "low": None, "high": None}
    assert cohen_kappa([], []) == {**nothing, "n": 0}
    assert krippendorff_alpha([[1.0, GAP], [GAP, GAP]]) == {**nothing, "n": 0}
    assert cohen_kappa([1.0] * 3, [1.0] * 3) == {**nothing, "n": 3}  # all labels are one: nothing is expected by chance
    assert vote_agreement([], []) == {"with_ties": None, "without_ties": None}


def test_a_cluster_of_copies_is_one_item():
    """Every item ten times over, as one cluster: the same kappa and about the same interval, not one of ten times the items."""
    rng = np.random.default_rng(1)
    first = rng.integers(0, 2, 60).astype(float)
    second = np.where(rng.random(60) < 0.8, first, 1 - first)
    once = cohen_kappa(first.tolist(), second.tolist())
    copies = [np.repeat(side, 10).tolist() for side in (first, second)]
    clustered = cohen_kappa(*copies, np.repeat(np.arange(60), 10).tolist())
    assert clustered["value"] == pytest.approx(once["value"])
    assert clustered["high"] - clustered["low"] == pytest.approx(once["high"] - once["low"], rel=0.1)
    alone = cohen_kappa(*copies)
    assert alone["high"] - alone["low"] < 0.5 * (once["high"] - once["low"])


def test_the_interval_of_kappa_covers():
    """Two raters who each keep a true label with probability 0.8: kappa in the limit is 0.36, since they agree in 0.68."""
    rng, hits = np.random.default_rng(2), 0
    for _ in range(50):
        true = rng.integers(0, 2, 80)
        raters = [np.where(rng.random(80) < 0.8, true, 1 - true).astype(float).tolist() for _ in range(2)]
        found = cohen_kappa(*raters)
        hits += found["low"] <= 0.36 <= found["high"]
    assert hits >= 42  # of 50 at 95 %: fewer once in 250 runs


def test_majority_needs_more_than_half():
    assert majority_label([1.0, 1.0, 0.0]) == 1.0
    assert majority_label([1.0, 0.0]) is None and majority_label([1.0, 0.5, 0.0]) is None
    assert majority_label([GAP, 0.5]) == 0.5 and majority_label([GAP]) is None and majority_label([]) is None


def test_mean_figures_of_two_clusters():
    """Means 0 and 1 of two clusters of two: error^2 = 2/1 * 2 * 1^2 / 4^2."""
    found = mean_figures(np.array([0.0, 0.0, 1.0, 1.0]), ["a", "a", "b", "b"])
    assert found["value"] == 0.5 and found["high"] == pytest.approx(0.5 + 1.959964 * 0.5, abs=1e-5)
    assert mean_figures(np.array([1.0]), ["a"])["low"] is None


def test_agreement_keeps_its_contract():
    assert agreement([1.0, 1.0, 0.5, None], [1.0, 0.0, 1.0, 1.0]) == pytest.approx(0.5)

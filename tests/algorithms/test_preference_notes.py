"""What a run of DPO's family says at its end, from planted metrics: each threshold crossed, and not crossed."""

import pytest

from alignment.algorithms.dpo.responses import logged_metrics, notes_of

CALM = {
    "chosen_log_prob": -40.0, "rejected_log_prob": -41.0, "chosen_log_prob_change": 0.3, "rejected_log_prob_change": -3.0,
    "margin_length_correlation": 0.1, "margin_length_share": 0.1,
}  # fmt: skip


def said(count: int = 30, start: dict[str, float] | None = None, **end: float | None) -> list[str]:
    """Notes on a run of so many updates, all but the last ones calm; None takes a metric out."""
    first = {key: value for key, value in (CALM | (start or {})).items() if end.get(key, 0) is not None}
    last = {key: value for key, value in (first | end).items() if value is not None}
    return list(notes_of([first] * (count - 3) + [last] * 3))


def test_a_calm_run_says_nothing():
    assert said() == [] and said(count=4, chosen_log_prob_change=-30.0) == []


@pytest.mark.parametrize(
    ("chosen", "rejected", "start", "notes"),
    [
        (-1.1, -4.0, -40.0, 1), (-0.9, -4.0, -40.0, 0),  # a nat, where 2 % of 40 nats are less
        (-4.1, -9.0, -200.0, 1), (-3.9, -9.0, -200.0, 0),  # 2 % of 200 nats
        (-4.1, 0.5, -40.0, 0),  # the rejected ones have not fallen: nothing went elsewhere
        (0.5, -9.0, -40.0, 0),
    ],
)  # fmt: skip
def test_displacement_is_said_where_both_fall(chosen, rejected, start, notes):
    found = said(
        start={"chosen_log_prob": start}, chosen_log_prob_change=chosen, rejected_log_prob_change=rejected
    )  # fmt: skip
    assert len(found) == notes
    if notes:
        assert found[0].startswith(f"displacement: the chosen responses have become less likely, by {-chosen:.1f} nats")
        assert "sft_coef=1" in found[0]


@pytest.mark.parametrize(("chosen", "notes"), [(-41.1, 1), (-40.9, 0)])
def test_displacement_without_a_reference_compares_first_updates(chosen, notes):
    without = {"chosen_log_prob_change": None, "rejected_log_prob_change": None}
    found = said(chosen_log_prob=chosen, rejected_log_prob=-50.0, **without)
    assert len(found) == notes and all(line.startswith("displacement: ") for line in found)


@pytest.mark.parametrize(
    ("correlation", "share", "words"),
    [
        (0.51, 0.0, "is 0.51 over"), (0.49, 0.0, None), (-0.51, 0.0, "is -0.51 over"), (-0.49, 0.0, None),
        (0.3, 0.51, "51% of the mean margin"), (0.3, 0.49, None), (None, None, None),
    ],
)  # fmt: skip
def test_a_margin_that_length_explains_is_said(correlation, share, words):
    found = said(margin_length_correlation=correlation, margin_length_share=share)
    assert len(found) == (words is not None)
    if words:
        assert found[0].startswith("length: ") and words in found[0] and "loss=rdpo" in found[0]


def test_numbers_that_are_not_finite_count_as_missing():
    assert said(chosen_log_prob_change=float("nan"), margin_length_correlation=float("inf")) == []


def test_correlation_and_share_are_those_of_the_pairs():
    """Margins 1, 3, 5 with length differences 2, 4, 9: correlation 0.970725; slope 14/26 * 15 / 9 of the mean margin."""
    margins, lengths = (1.0, 3.0, 5.0), (2.0, 4.0, 9.0)
    moments = {
        "margin": sum(margins) / 3, "length_difference": sum(lengths) / 3,
        "margin_squared": sum(x * x for x in margins) / 3, "length_difference_squared": sum(x * x for x in lengths) / 3,
        "margin_by_length_difference": sum(x * y for x, y in zip(margins, lengths, strict=True)) / 3,
    }  # fmt: skip
    logged = logged_metrics(moments)
    assert logged["margin_length_correlation"] == pytest.approx(14 / (8 * 26) ** 0.5)
    assert logged["margin_length_share"] == pytest.approx(14 / 26 * 15 / 9)
    assert not {"margin_squared", "margin_by_length_difference"} & logged.keys()

"""Metrics of classes, entities and answers, against numbers worked out by hand."""

import math

import pytest
import torch

from alignment.algorithms.finetune.scoring import best_span
from alignment.data.task_metrics import (
    answer_metrics,
    are_entities,
    class_metrics,
    entities,
    entity_metrics,
    normalized,
    number_metrics,
)

LABELS = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
PREDICTIONS = [1, 1, 1, 0, 1, 0, 0, 0, 0, 0]


def test_two_classes():
    """3 true positives, 1 false one, 1 missed, 5 true negatives: F1 3/4 and 5/6, r = (15 - 1) / sqrt(4 4 6 6)."""
    metrics = class_metrics(LABELS, PREDICTIONS, 2)
    assert metrics == pytest.approx({"accuracy": 0.8, "macro_f1": (3 / 4 + 5 / 6) / 2, "matthews": 14 / 24, "f1": 0.75})


def test_three_classes():
    """labeled (2, 2, 1), predicted (1, 3, 1), 4 of 5 right: r = (20 - (2 + 6 + 1)) / sqrt((25 - 9) (25 - 11))."""
    metrics = class_metrics([0, 0, 1, 1, 2], [0, 1, 1, 1, 2], 3)
    assert metrics == pytest.approx(
        {"accuracy": 0.8, "macro_f1": (2 / 3 + 4 / 5 + 1) / 3, "matthews": 11 / math.sqrt(16 * 14)}
    )


def test_correlations_of_numbers():
    """Both have mean 2 and squares of 10; products (-2)(-1) + (-1)(-2) + 0 + (1)(2) + (2)(1) = 8; they are their own ranks."""
    labels, predictions = [0, 1, 2, 3, 4], [1, 0, 2, 4, 3]
    assert number_metrics(labels, predictions) == pytest.approx({"pearson": 0.8, "spearman": 0.8})
    assert number_metrics([0, 1, 2], [1, 10, 100])["spearman"] == pytest.approx(1.0)
    assert number_metrics([0, 1, 2], [5, 5, 5]) == number_metrics([3], [1]) == {"pearson": 0.0, "spearman": 0.0}


def test_extremes_of_the_correlation():
    assert class_metrics([0, 1, 1], [0, 1, 1], 2)["matthews"] == 1.0
    assert class_metrics([0, 1, 1], [1, 0, 0], 2)["matthews"] == -1.0
    assert class_metrics([0, 1, 1], [1, 1, 1], 2)["matthews"] == 0.0
    assert class_metrics([0, 1], [0, 1], 3)["macro_f1"] == 1.0  # a class that never occurs is left out


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-X I-X O", {("X", 1, 3)}),
        ("B-X B-X", {("X", 0, 1), ("X", 1, 2)}),
        ("B-X I-Y", {("X", 0, 1), ("Y", 1, 2)}),
        ("O I-X I-X", {("X", 1, 3)}),
        ("O O", set()),
    ],
)
def test_entities(tags, found):
    assert entities(tags.split()) == found


def test_entities_must_be_right_at_both_ends():
    labels = [["B-X", "I-X", "O"], ["B-Y", "O"]]
    predictions = [["B-X", "O", "O"], ["B-Y", "B-X"]]  # one of 2 wanted, one of 3 given
    assert entity_metrics(labels, predictions) == pytest.approx(
        {"entity_precision": 1 / 3, "entity_recall": 1 / 2, "entity_f1": 2 / 5}
    )
    assert entity_metrics([["O"]], [["O"]])["entity_f1"] == 0.0
    marked = [are_entities(names) for names in (["O", "B-X", "I-X"], ["O"], ["O", "NOUN"], ["B-", "O"])]
    assert marked == [True, False, False, False]


def test_answers_are_compared_without_case_articles_and_punctuation():
    assert normalized("The  U.S., an area") == "us area"
    assert answer_metrics(["the Spa!"], [["A pool", "spa"]])["exact_match"] == 1.0
    assert answer_metrics(["theatre"], [["atre"]])["exact_match"] == 0.0


@pytest.mark.parametrize(
    ("answer", "golds", "f1"),
    [
        ("a red old bus", ["nothing", "red bus"], 4 / 5),  # "red old bus", "red bus": 2 words shared, 2 * 2 / (3 + 2)
        ("bus bus", ["bus"], 2 / 3),  # the second one is not shared
        ("", ["spa"], 0.0),
    ],
)
def test_answers_share_words_with_the_nearest_gold_one(answer, golds, f1):
    assert answer_metrics([answer], [golds])["f1"] == pytest.approx(f1)


def test_a_question_without_an_answer_is_answered_by_none():
    assert answer_metrics(["", "spa"], [[], []]) == {"exact_match": 0.5, "f1": 0.5}


def test_the_best_span_starts_before_it_ends_and_is_not_too_long():
    scores = torch.tensor([[9.0, 9.0], [0.0, 5.0], [4.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
    allowed = [False, True, True, True, True]
    assert best_span(scores, allowed, 10) == (7.0, 2, 4)
    assert best_span(scores, allowed, 2) == (5.0, 1, 1)  # 2 to 3: 4 + 1, equal and later
    assert best_span(scores, [False] * 5, 2) is None
    assert best_span(scores, [False, True, False, False, True], 2) == (5.0, 1, 1)

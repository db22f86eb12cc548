"""`alignment evaluate ratings`: battles of files in every form, what is refused, and a tournament."""

import csv
import json
import math

import pytest

from alignment.config.load import load_config
from alignment.errors import UserError
from alignment.evaluation import bradley_terry_ratings, ratings_run
from alignment.evaluation.ratings_run import RatingsConfig, TournamentConfig, run
from alignment.judging.judges import _record
from alignment.judging.judgments import RowLog
from alignment.judging.labeled_items import LabelColumns, read_votes
from tests.conftest import lines_file, read_lines

VOTES = [("a", "b", 1.0), ("a", "b", 1.0), ("b", "a", 1.0), ("b", "c", 0.5), ("c", "a", 0.0), ("c", "b", 1.0)]
VOTES += [("a", "c", 0.5)]


def write_rows(path, rows):
    return str(lines_file(path, rows))


def rate(tmp_path, battles, **settings):
    return json.loads(run(RatingsConfig(str(tmp_path / "out"), battles=battles, **settings)).read_text())


def written(form, tmp_path):
    """The votes in one of the forms that are understood, and the settings for it."""
    winner = {1.0: "model_a", 0.0: "model_b", 0.5: "tie (both bad)"}
    if form == "csv":
        with open(tmp_path / "votes.csv", "w", newline="", encoding="utf-8") as file:
            sides = {1.0: "left", 0.0: "right", 0.5: "tie"}
            csv.writer(file).writerows([("left", "right", "winner"), *((a, b, sides[y]) for a, b, y in VOTES)])
        return str(tmp_path / "votes.csv"), {"columns": {"model_a": "left", "model_b": "right"}}
    rows = {
        "outcomes": [{"model_a": a, "model_b": b, "outcome": y} for a, b, y in VOTES],
        "winners": [{"model_a": a, "model_b": b, "winner": winner[y], "turn": 1} for a, b, y in VOTES],
        "names": [{"model_a": a, "model_b": b, "winner": {1.0: a, 0.0: b, 0.5: "tie"}[y]} for a, b, y in VOTES],
        "judgments": [{"first_model": a, "second_model": b, "verdict": y, "first": "x"} for a, b, y in VOTES],
    }[form]
    return write_rows(tmp_path / "votes.jsonl.gz", rows), {}


@pytest.mark.parametrize("form", ["csv", "outcomes", "winners", "names", "judgments"])
def test_every_form_of_battles_gives_the_ratings_of_the_rows(form, tmp_path, capsys):
    battles, settings = written(form, tmp_path)
    results, ratings = rate(tmp_path, battles, **settings), bradley_terry_ratings(VOTES)
    assert {name: own["rating"] for name, own in results["models"].items()} == pytest.approx(dict(ratings))
    assert [(own["low"], own["high"]) for own in results["models"].values()] == list(
        map(pytest.approx, ratings.intervals.values())
    )
    assert (results["battles"], results["unused"], results["clusters"]) == (7, 0, None)
    assert [own["rank"] for own in results["models"].values()] == [1, 1, 1] and len(results["differences"]) == 3
    assert "7 battles used" in capsys.readouterr().out
    assert "points above the mean" in (tmp_path / "out" / "ratings.html").read_text()


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (("2", "1", "1"), 0.0), (("0", "1", "0"), 1.0), (("0", "1", "1"), 0.0), (("b", "a", "a"), 0.0),
        (("model_b", "x", "model_b"), 1.0), (("tiefighter", "b", "tiefighter"), 1.0), (("x", "tie", "tie"), 0.0),
        (("x", "tie (old)", "tie (old)"), 0.0), (("GPT", "gpt", "GPT"), 1.0), (("gpt", "GPT", "gpt"), 1.0),
        (("GPT", "b", "gpt"), 1.0), (("a", "b", "tie (bothbad)"), 0.5), (("a", "b", "Tie"), 0.5),
    ],
)  # fmt: skip
def test_a_winner_is_a_model_s_name_before_anything_else(row, verdict, tmp_path):
    """[B-H9]"""
    path = write_rows(tmp_path / "votes.jsonl", [dict(zip(("model_a", "model_b", "winner"), row, strict=True))])
    [vote] = read_votes(path, LabelColumns(), battles=True)
    assert vote.verdict == verdict


def test_a_number_in_a_column_outcome_is_no_name(tmp_path):
    path = write_rows(tmp_path / "votes.jsonl", [{"model_a": "0", "model_b": "1", "outcome": y} for y in (1, 0.5, 0)])
    assert [vote.verdict for vote in read_votes(path, LabelColumns(), battles=True)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("word", ["none", "None", "tiefighter", "tied"])
def test_a_word_that_is_no_model_and_no_tie_is_refused(word, tmp_path):
    """[B-H8] Rows without models have no model of the name None."""
    row = {"id": "1", "prompt": "p", "first": "x", "second": "y", "label": word}
    path = write_rows(tmp_path / "votes.jsonl", [row])
    with pytest.raises(UserError, match=f"'label' is '{word}'"):
        read_votes(path, LabelColumns())
    assert [vote.verdict for vote in read_votes(path, LabelColumns(), strict=False)] == [None]


def test_judgments_are_clustered_by_their_prompt_and_unanswered_ones_counted(tmp_path):
    rows = [{"first_model": a, "second_model": b, "verdict": y, "id": str(i)} for i, (a, b, y) in enumerate(VOTES)]
    battles = write_rows(tmp_path / "judgments.jsonl", [*rows * 2, {**rows[0], "verdict": None}])
    results = rate(tmp_path, battles, ties="rao_kupper", leave_out=("d",))
    once = bradley_terry_ratings(VOTES, ties="rao_kupper")
    assert (results["battles"], results["unused"], results["clusters"]) == (14, 1, 7)
    assert (results["models"]["a"]["low"], results["models"]["a"]["high"]) == pytest.approx(once.intervals["a"])
    assert results["tie"]["value"] == pytest.approx(once.tie.value if once.tie else None)


def test_a_row_without_a_cluster_is_one_of_its_own(tmp_path):
    """[B-H3] It does not take the clusters of the other rows away."""
    rows = [{"model_a": "a", "model_b": "b", "outcome": i % 2, "cluster": f"c{i % 20}"} for i in range(400)]
    widths = []
    for extra in ([], [{"model_a": "a", "model_b": "b", "outcome": 1, "cluster": None}]):
        results = rate(tmp_path, write_rows(tmp_path / "battles.jsonl", rows + extra))
        widths.append(results["models"]["a"]["high"] - results["models"]["a"]["low"])
        assert results["clusters"] == 20 + len(extra)
    assert widths[1] == pytest.approx(widths[0], rel=0.05)


def test_a_text_that_is_a_number_is_measured_as_the_other_texts(tmp_path):
    """[B-H4] Numbers are measurements where every cell of both columns is one."""
    texts = ["42", "1000000", "7", "The answer is 42.", "It is one million"]
    pairs = [(texts[i % 5], texts[(i * 3 + 1) % 5], float(i % 4 > 0)) for i in range(40)]
    rows = [{"model_a": "a", "model_b": "b", "outcome": y, "ta": one, "tb": other} for one, other, y in pairs]
    battles = write_rows(tmp_path / "battles.jsonl", rows)
    found = rate(tmp_path, battles, covariates={"length": ("ta", "tb")})
    lengths = [(len(one) - len(other)) / (len(one) + len(other)) for one, other, _ in pairs]
    expected = bradley_terry_ratings([("a", "b", y) for *_, y in pairs], covariates={"length": lengths})
    assert found["effects"]["length"]["value"] == pytest.approx(expected.effects["length"].value)
    with pytest.raises(UserError, match=r"battles\.jsonl:41: 'tb' is null"):
        battles = write_rows(tmp_path / "battles.jsonl", [*rows, {**rows[0], "tb": None}])
        rate(tmp_path, battles, covariates={"length": ("ta", "tb")})
    numbers = [{**row, "ta": str(i + 1), "tb": "" if i == 30 else "5"} for i, row in enumerate(rows)]
    with pytest.raises(UserError, match=r"battles\.jsonl:31: could not convert"):  # no text among numbers
        rate(tmp_path, write_rows(tmp_path / "battles.jsonl", numbers), covariates={"length": ("ta", "tb")})


def test_covariates_are_numbers_or_what_is_measured_in_texts(tmp_path):
    rows = [
        {"model_a": a, "model_b": b, "outcome": y, "tokens_a": 30 + i, "tokens_b": 10 * (i % 3), "text_a": "# x\n* **y**" * (i % 4),
         "text_b": "- z\n" * i}
        for i, (a, b, y) in enumerate(VOTES * 6)
    ]  # fmt: skip
    battles = write_rows(tmp_path / "battles.jsonl", rows)
    covariates = {"tokens": ("tokens_a", "tokens_b"), "length": ("text_a", "text_b"), "bold": ("text_a", "text_b")}
    results = rate(tmp_path, battles, covariates=covariates)
    assert list(results["effects"]) == ["tokens", "length", "bold"]
    expected = [(row["tokens_a"] - row["tokens_b"]) / (row["tokens_a"] + row["tokens_b"]) for row in rows]
    alone = rate(tmp_path, battles, covariates={"tokens": ("tokens_a", "tokens_b")})["effects"]["tokens"]["value"]
    votes = [(row["model_a"], row["model_b"], row["outcome"]) for row in rows]
    assert alone == pytest.approx(bradley_terry_ratings(votes, covariates={"tokens": expected}).effects["tokens"].value)
    with pytest.raises(UserError, match="'bold' follows from"):  # every **y** comes with one header
        rate(tmp_path, battles, covariates=dict.fromkeys(("headers", "bold"), ("text_a", "text_b")))
    with pytest.raises(UserError, match=r"battles\.jsonl:2: could not convert string to float"):
        rate(tmp_path, battles, covariates={"words": ("text_a", "text_b")})


def test_rows_that_are_no_battles_are_refused_together(tmp_path):
    rows = [{"model_a": "a", "model_b": "b", "outcome": outcome} for outcome in (2, "tie", "c")]
    with pytest.raises(UserError) as refused:
        rate(tmp_path, write_rows(tmp_path / "battles.jsonl", rows))
    message = str(refused.value)
    assert "battles.jsonl:1: 'outcome' is 2: it is 1, 0.5, 0," in message
    assert "battles.jsonl:3: 'outcome' is 'c'" in message
    with pytest.raises(UserError, match=r"battles\.jsonl:4: no column 'model_b'; it has model_a, outcome"):
        rate(tmp_path, write_rows(tmp_path / "battles.jsonl", [*rows, {"model_a": "a", "outcome": 1}]))
    with open(tmp_path / "battles.jsonl", "a", encoding="utf-8") as file:
        file.write("no JSON\n")
    with pytest.raises(UserError, match=r"battles\.jsonl:5"):
        rate(tmp_path, str(tmp_path / "battles.jsonl"))
    with pytest.raises(UserError, match="'a' against itself"):
        rate(tmp_path, write_rows(tmp_path / "battles.jsonl", [{"model_a": "a", "model_b": "a", "outcome": 1}]))
    with pytest.raises(UserError, match="no rows in this file"):
        rate(tmp_path, write_rows(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "battles or a tournament must be given"),
        ({"battles": "x", "columns": {"model": "y"}}, "columns are of model_a"),
        ({"battles": "x", "method": "elo", "ties": "davidson"}, "ties other than half"),
        ({"battles": "x", "method": "elo", "covariates": {"length": ("a", "b")}}, "covariates are for"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RatingsConfig("out", **settings)


def test_a_tournament_judges_all_pairs_and_keeps_the_judgments(tmp_path):
    """The longer response wins: x beats y in 2 of 3 prompts, y beats z in 2 of 3, and so on around."""
    lengths = {"x": (3, 2, 1), "y": (2, 1, 3), "z": (1, 3, 2)}
    rows = [
        {"id": f"row {i}", "prompt": f"p{i}", "responses": {name: "w" * own[i] for name, own in lengths.items()}}
        for i in range(3)
    ]
    tournament = TournamentConfig(responses=write_rows(tmp_path / "responses.jsonl", rows), judge="longer")
    results = json.loads(run(RatingsConfig(str(tmp_path / "out"), tournament=tournament)).read_text())
    assert {name: own["rating"] for name, own in results["models"].items()} == pytest.approx(dict.fromkeys("xyz", 1000))
    assert (results["battles"], results["clusters"]) == (9, 3)
    judgments = read_lines(tmp_path / "out" / "judgments.jsonl")
    assert len(judgments) == 18 and {row["first_model"] for row in judgments} == {"x", "y", "z"}
    # of the log of both orders: the same ratings
    again = rate(tmp_path / "again", str(tmp_path / "out" / "judgments.jsonl"))
    assert [own["rating"] for own in again["models"].values()] == pytest.approx([1000] * 3) and again["clusters"] == 3
    alone = json.loads(run(RatingsConfig(str(tmp_path / "two"), tournament=tournament, leave_out=("z",))).read_text())
    assert alone["models"]["x"]["rating"] - 1000 == pytest.approx(200 * math.log10(2))


@pytest.mark.parametrize("method", ["bradley_terry", "elo"])
def test_a_tournament_tells_the_faults_of_its_judge(tmp_path, monkeypatch, capsys, method):
    """[B-H2] A judge that takes the first: wide intervals, warnings, and the same ratings from its log of both orders."""

    def first_judge(prompts, first, second):
        return [None if text == "x0" else 1.0 for text in first]

    def build(config, path):
        return _record("first", {}, first_judge, RowLog(path / "judgments.jsonl"))

    monkeypatch.setattr(ratings_run, "build_judge", build)
    texts = [{name: f"{name}{i}" for name in "xyz"} for i in range(30)]
    rows = [{"id": f"row {i}", "prompt": f"p{i}", "responses": own} for i, own in enumerate(texts)]
    tournament = TournamentConfig(responses=write_rows(tmp_path / "responses.jsonl", rows), judge="longer")
    config = RatingsConfig(str(tmp_path / "out"), tournament=tournament, method=method)
    results = json.loads(run(config).read_text())
    least = {"bradley_terry": 400, "elo": 10}[method]
    assert all(own["low"] < 1000 - least < 1000 + least < own["high"] for own in results["models"].values())
    warnings, shown = "\n".join(results["warnings"]), capsys.readouterr().err
    assert all(f"warning: {line}" in shown for line in results["warnings"])
    assert "x against y: the judge prefers the response shown first" in warnings
    assert "x against y: the judge failed on 1 of 30 prompts" in warnings
    assert (results["battles"], results["contradictory"], results["unused"]) == (88, 88, 2)
    assert results["judging"]["calls"] == 180 and results["comparisons"]["y against z"]["position_bias"]["rate"] == 1
    again = rate(tmp_path / "again", str(tmp_path / "out" / "judgments.jsonl"), method=method)
    same = ("models", "battles", "contradictory", "unused", "clusters")
    assert [again[key] for key in same] == [results[key] for key in same] and "contradict" in again["warnings"][0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": "a"}, "x, where the first row has x, y"),  # one lacks a response
        ({"x": "a", "y": "b", "z": "c"}, "x, y, z, where the first row has x, y"),  # z would be in no battle
    ],
)
def test_a_tournament_has_the_same_models_in_every_row(tmp_path, second, message):
    rows = [{"id": i, "prompt": "p", "responses": own} for i, own in enumerate([{"x": "a", "y": "b"}, second])]
    tournament = TournamentConfig(responses=write_rows(tmp_path / "responses.jsonl", rows), judge="longer")
    with pytest.raises(UserError, match=rf"responses\.jsonl:2: has responses of {message}"):
        run(RatingsConfig(str(tmp_path / "out"), tournament=tournament))


def test_a_config_names_a_judge_or_is_refused(tmp_path):
    path = tmp_path / "ratings.yaml"
    path.write_text(f"output: {tmp_path}/out\ntournament:\n  responses: {tmp_path}/none.jsonl\n")
    with pytest.raises(UserError, match=r"tournament\.judge.*is missing"):
        load_config(RatingsConfig, str(path), [])
    with pytest.raises(UserError, match="no such file"):
        run(load_config(RatingsConfig, str(path), ["tournament.judge=longer"]))

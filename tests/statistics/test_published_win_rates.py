"""Figures of published verdicts equal the published ones: AlpacaEval's leaderboards (tatsu-lab/alpaca_eval), evalica's ratings.

Of AlpacaEval's length-controlled rates the difficulties of the instructions and the rows of the baseline against its own longer
and shorter versions are not part of the data. The difficulties are recovered here from the published coefficients and the
preferences of all other models, and the rows are replaced by a prior with as much information.
"""

import csv
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from alignment.evaluation import bradley_terry_ratings, elo_ratings, length_controlled_win_rate, win_rate

DATA = Path(os.environ.get("ALIGNMENT_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

pytestmark = [
    pytest.mark.real_data,
    pytest.mark.skipif(not (DATA / "alpaca_eval").is_dir(), reason=f"no {DATA}; set ALIGNMENT_DATA"),
]


def read_csv(name: str) -> list[dict[str, str]]:
    with open(DATA / name, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def leaderboard(version: int) -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in read_csv(f"alpaca_eval/leaderboard_v{version}.csv")}


Rows = dict[str, list[Mapping[str, float]]]


def judgments(version: int) -> Rows:
    """Each model's rows that have a preference, in order of the instructions."""
    found: Rows = {}
    with gzip.open(DATA / "alpaca_eval" / f"judgments_v{version}.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in sorted(map(json.loads, file), key=lambda row: row["idx"]):
            found.setdefault(row["model"], []).extend([row] if row["preference"] is not None else [])
    return found


def preference(row: Mapping[str, float]) -> float:
    """AlpacaEval's scale runs from 1 (baseline) to 2 (model); 0 and 1.5 are draws."""
    return 0.5 if row["preference"] in (0, 1.5) else row["preference"] - 1


@pytest.mark.parametrize(("version", "models"), [(1, 36), (2, 46)])
def test_win_rates_and_errors_equal_the_leaderboards(version, models):
    published, rows = leaderboard(version), judgments(version)
    compared = rows.keys() & published.keys()
    for model in compared:
        row, ours = published[model], win_rate([preference(own) for own in rows[model]])
        hard = win_rate([(np.sign(preference(own) - 0.5) + 1) / 2 for own in rows[model]])
        counts = [row[key] for key in ("n_wins", "n_wins_base", "n_draws", "n_total")]
        assert [hard.wins, hard.losses, hard.ties, hard.n] == [float(count) for count in counts], model
        assert (ours.wins, ours.losses, ours.ties) == (hard.wins, hard.losses, hard.ties), model
        if row["discrete_win_rate"]:
            assert 100 * hard.rate == pytest.approx(float(row["discrete_win_rate"]), abs=1e-9), model
        figures = [100 * ours.rate, 100 * (ours.standard_error or 0)]
        assert figures == pytest.approx([float(row["win_rate"]), float(row["standard_error"])], abs=0.01), model
        assert ours.low <= ours.rate <= ours.high
    assert len(compared) == models


INSTRUCTIONS = 805
# 805 rows of the baseline's longer and shorter version each, weight 0.1: 161 rows with p (1 - p) of about 0.18, squares of
# tanh of about 0.3 and of difficulties of about 1.9, hence the information on each coefficient.
PRIOR_DEVIATIONS = {"length": (161 * 0.18 * 0.3) ** -0.5, "difficulty": (161 * 0.18 * 1.9) ** -0.5}


def recovered_difficulty(columns: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Most likely difficulty of each instruction under N(-0.15, 1.6^2), given coefficients of some models, by Newton's method.

    `columns` are preference and tanh of the length difference, [2, models, instructions], NaN where a row is missing.
    """
    outcomes, longer = columns
    phi, psi, theta = coefficients.T[:, :, None]
    difficulty, precision = np.full(INSTRUCTIONS, -0.15), 1 / 1.6**2
    for _ in range(12):
        chances = expit(theta + phi * longer + psi * difficulty)
        slope = np.nansum((outcomes - chances) * psi, 0) - precision * (difficulty + 0.15)
        curve = np.nansum(chances * (1 - chances) * psi**2, 0) + precision
        difficulty += np.clip(slope / curve, -1, 1)
    return difficulty


def length_controlled_errors(rows: Rows, only: set[str] | None = None, *, by_position: bool) -> dict[str, float]:
    """Ours minus the published rate of each model, points; difficulties by the number of a row, or by its instruction."""
    published = leaderboard(2)
    weights = {
        row["model"]: [float(value) for value in list(row.values())[1:]]
        for row in read_csv("alpaca_eval/lc_weights_v2.csv")
    }
    models = [
        model for model in rows if model in weights and model != "gpt4_1106_preview"
    ]  # the baseline is 50 by definition
    coefficients = np.array([weights[model] for model in models]) * [-1, 1, 1]  # their length is baseline minus model
    columns, places, lengths = np.full((2, len(models), INSTRUCTIONS), np.nan), [], []
    for i, model in enumerate(models):
        pairs = np.array([[row["len_2"], row["len_1"]] for row in rows[model]], float)
        longer = pairs[:, 0] - pairs[:, 1]
        place = np.array([position if by_position else row["idx"] for position, row in enumerate(rows[model])], int)
        columns[:, i, place] = [list(map(preference, rows[model])), np.tanh(longer / longer.std(ddof=1))]
        places.append(place)
        lengths.append(pairs)
    errors = {}
    for i, model in enumerate(models):
        if only and model not in only:
            continue
        others = np.arange(len(models)) != i
        difficulty = recovered_difficulty(columns[:, others], coefficients[others])[places[i]]
        phi, psi, _ = coefficients[others].mean(0)
        centers = {"length": phi, "difficulty": psi}
        found = length_controlled_win_rate(
            columns[0, i, places[i]].tolist(),
            lengths[i][:, 0].tolist(),
            lengths[i][:, 1].tolist(),
            difficulty=difficulty.tolist(),
            prior={name: (centers[name], deviation) for name, deviation in PRIOR_DEVIATIONS.items()},
        )
        errors[model] = 100 * found.rate - float(published[model]["length_controlled_winrate"])
    return errors


def test_length_controlled_rates_are_near_the_published_ones():
    """The published fit takes difficulties by the number of a row: one skipped instruction shifts those behind it.

    So five models with skipped instructions are rated by difficulties of other instructions, three of them off by 2 to 3 points.
    """
    rows = judgments(2)
    errors = length_controlled_errors(rows, by_position=True)
    sizes = {model: abs(error) for model, error in errors.items()}
    assert len(errors) == 45 and np.mean(list(sizes.values())) < 0.3 and np.median(list(sizes.values())) < 0.2
    # The first and the last have short responses throughout, so that the rows that are missing hold their effect of length.
    # claude's published rate is 1.5 below ours for a reason that the data do not show.
    assert {model for model, size in sizes.items() if size > 0.8} == {
        "gpt4_gamed", "claude", "gpt-3.5-turbo-1106_concise"
    }  # fmt: skip
    assert max(sizes.values()) < 1.7
    skipping = {model for model, own in rows.items() if len(own) < INSTRUCTIONS}
    own = length_controlled_errors(rows, skipping, by_position=False)
    assert len(own) == 5 and np.mean([abs((errors | own)[model]) for model in errors]) < 0.5
    assert {model for model, error in own.items() if abs(error) > 1.5 and sizes[model] < 0.5} == {
        "gpt35_turbo_instruct", "minotaur-13b", "alpaca-7b_verbose"
    }  # fmt: skip


def golden(algorithm: str) -> dict[str, float]:
    rows = read_csv("llmfao/golden_ratings.csv")
    return {row["item"]: float(row["score"]) for row in rows if row["algorithm"] == algorithm}


def test_bradley_terry_and_elo_equal_the_golden_scores_of_evalica():
    outcomes = {"left": 1.0, "right": 0.0, "tie": 0.5}
    votes = [(row["left"], row["right"], outcomes[row["winner"]]) for row in read_csv("llmfao/crowd_comparisons.csv")]
    ratings = bradley_terry_ratings(votes)
    assert ratings.strengths == pytest.approx(golden("bradley_terry"), abs=1e-10)
    assert next(iter(ratings)) == "GPT 4" and sum(ratings.battles.values()) == 2 * len(votes) == 2 * 8931
    assert dict(elo_ratings(votes, bootstraps=2)) == pytest.approx(golden("elo"), abs=1e-8)

"""Win rates of published AlpacaEval 2 verdicts equal the published leaderboard (data: tatsu-lab/alpaca_eval)."""

import csv
import gzip
import json
import os
from pathlib import Path

import pytest

from alignment.evaluation import win_rate

DATA = Path(os.environ.get("ALIGNMENT_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "alpaca_eval"

pytestmark = [pytest.mark.real_data, pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}; set ALIGNMENT_DATA")]


def verdict(preference: float) -> float:
    """AlpacaEval's scale runs from 1 (baseline) to 2 (model); 0 and 1.5 are draws."""
    return 0.5 if preference in (0, 1.5) else float(preference > 1.5)


def test_wins_draws_and_discrete_win_rates_equal_the_published_rows():
    verdicts: dict[str, list[float]] = {}
    with gzip.open(DATA / "judgments_v2.jsonl.gz", "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            verdicts.setdefault(row["model"], []).append(verdict(row["preference"]))
    with open(DATA / "leaderboard_v2.csv", encoding="utf-8") as file:
        published = {row["model"]: row for row in csv.DictReader(file)}
    compared = 0
    for model in verdicts.keys() & published.keys():
        row, ours = published[model], win_rate(verdicts[model])
        counts = [row[key] for key in ("n_wins", "n_wins_base", "n_draws", "n_total")]
        assert [ours.wins, ours.losses, ours.ties, ours.n] == [float(count) for count in counts], model
        assert 100 * ours.rate == pytest.approx(float(row["discrete_win_rate"]), abs=1e-9), model
        assert ours.low < ours.rate < ours.high
        compared += 1
    assert compared >= 30

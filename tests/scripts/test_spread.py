"""The script that puts several runs of one recipe side by side: means, extremes, and the intervals within one run."""

import json
import math
import sys
from pathlib import Path

import pytest

from alignment.errors import UserError
from tests.conftest import write_lines

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import spread


@pytest.fixture
def run_of(tmp_path):
    """`run_of(name, win rate, half width, losses)` -> the output of a recipe with one policy."""

    def write(name, rate, half_width, losses, stages=("dpo", "evaluation")):
        run = tmp_path / name
        for stage in stages:
            (run / stage).mkdir(parents=True)
        win = {"rate": rate, "low": rate - half_width, "high": rate + half_width, "n": 300}
        models = {"SFT": {"gold": {"total": 1.5, "honest": 1.0}}, "DPO": {"win_rate": win, "kl": 1.0}}
        (run / "evaluation/results.json").write_text(json.dumps({"models": models, "samples": [{"score": 4.0}]}))
        write_lines(run / "dpo/metrics.jsonl", ({"loss": loss} for loss in losses))
        (run / "stages.json").write_text(json.dumps({stage: {"seconds": 10.0} for stage in stages}))
        return run

    return write


def test_a_figure_is_its_mean_its_extremes_and_each_run(run_of):
    runs = [run_of("a", 0.6, 0.04, [0.7, 0.5]), run_of("b", 0.7, 0.06, [0.7, 0.6]), run_of("c", 0.8, 0.05, [0.7, 0.1])]
    figures = {(figure.stage, figure.metric): figure for figure in spread.read_figures(runs)}
    rate = figures["evaluation", "models.DPO.win_rate.rate"]
    assert rate.values == [0.6, 0.7, 0.8] and rate.half_width == pytest.approx(0.05)
    assert rate.row[2:] == ("0.7", "0.6", "0.8", "± 0.05", "0.6 · 0.7 · 0.8")
    assert figures["dpo", "loss, first"].values == [0.7, 0.7, 0.7]
    assert figures["dpo", "loss, last"].row[2:] == ("0.4", "0.1", "0.6", "", "0.5 · 0.6 · 0.1")
    assert figures["dpo", "seconds"].values == [10.0, 10.0, 10.0]


def test_bounds_parts_of_the_gold_reward_and_samples_get_no_line(run_of):
    metrics = {figure.metric for figure in spread.read_figures([run_of("a", 0.6, 0.04, [0.7])])}
    assert metrics == {
        "models.SFT.gold.total", "models.DPO.win_rate.rate", "models.DPO.kl", "loss, first", "loss, last", "seconds",
    }  # fmt: skip


def test_runs_with_their_own_prompts_have_students_interval(run_of):
    """Rates 0.5, 0.6 and 0.7: t_2 = 4.303 times 0.1 / sqrt(3), over 0.2333, the mean of r (1 - r), in log odds."""
    runs = [run_of(name, rate, 0.05, [0.7]) for name, rate in (("a", 0.5), ("b", 0.6), ("c", 0.7))]
    for run in runs:
        path = run / "evaluation/results.json"
        results = json.loads(path.read_text())
        results["models"]["DPO"]["win_rate"]["standard_error"] = 0.06
        path.write_text(json.dumps(results))
        (run / "evaluation/responses.jsonl").write_text(
            json.dumps({"id": "1", "prompt": f"{run}", "responses": {}}) + "\n"
        )
    rates = spread.seeds_rates(runs)
    rate = rates["evaluation", "DPO"]
    side = 4.3027 * 0.1 / 3**0.5 / (0.25 + 0.24 + 0.21) * 3
    assert list(rates) == [("evaluation", "DPO")] and rate.rates == [0.5, 0.6, 0.7]
    assert rate.high == pytest.approx(1 / (1 + math.exp(-math.log(1.5) - side)), abs=1e-4)
    assert rate.seed_deviation == pytest.approx(0.08)  # 0.01 - 0.0036
    assert spread.rate_row("evaluation", "DPO", rate)[-2:] == ("of each run", "50.0 · 60.0 · 70.0")


def test_runs_of_different_recipes_are_not_put_together(run_of, tmp_path):
    whole, part = run_of("a", 0.6, 0.04, [0.7]), run_of("b", 0.6, 0.04, [0.7], stages=("evaluation", "dpo", "report"))
    with pytest.raises(UserError, match="has other stages than"):
        spread.read_figures([whole, part])
    with pytest.raises(UserError, match=r"no stages\.json here"):
        spread.read_figures([tmp_path / "nothing"])

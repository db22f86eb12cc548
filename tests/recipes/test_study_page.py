"""Studies: points from runs and results, peaks and savings by hand, the laws of Gao et al. recovered, one self-contained page."""

import json
import math
from typing import Any

import pytest

from alignment.config.load import packaged_folder
from alignment.errors import UserError
from alignment.pipeline.stages import load_stage_file
from tests.conftest import write_lines

study: Any = load_stage_file(packaged_folder("recipes") / "study.py")
SeriesConfig, ChartConfig, PeakConfig, SavingsConfig = (
    study.SeriesConfig, study.ChartConfig, study.PeakConfig, study.SavingsConfig
)  # fmt: skip
KL = [0.0, 0.5, 1.0, 4.0, 9.0, 16.0, 25.0]


def points_of(gold, proxy):
    return [{"name": str(i + 1), "gold": g, "proxy": p} for i, (g, p) in enumerate(zip(gold, proxy, strict=True))]


def write_run(directory, rows):
    directory.mkdir()
    write_lines(directory / "metrics.jsonl", rows)
    return str(directory)


@pytest.mark.parametrize(
    ("law", "gold", "peak"),
    [
        # d (3 - 0.5 d) is highest at d = 3; d (2 - log d) at log d = 1
        ("best_of_n", lambda d: 1 + d * (3 - 0.5 * d), 9.0),
        ("rl", lambda d: 1 + d * (2 - math.log(d)) if d else 1.0, math.e**2),
    ],
)
def test_laws_of_overoptimization_are_recovered(law, gold, peak):
    heights = [gold(math.sqrt(kl)) for kl in KL]
    fit = study.fit_law(law, [-1e-4, *KL[1:]], heights)  # a measured KL may be below 0
    assert fit["start"] == pytest.approx(1) and fit["explained"] == pytest.approx(1)
    assert fit["peak_kl"] == pytest.approx(peak)
    assert study.law_heights(fit, KL) == pytest.approx(heights)


def test_peak_by_hand():
    points = points_of([1.0, 2.0, 3.0, 2.5, 1.5], [0.0, 1.0, 2.0, 3.0, 4.0])
    peak = study.find_peak(points, of="gold", against="proxy", kept="4")
    assert (peak["highest"]["name"], peak["fall"], peak["rise"]) == ("3", 1.5, 2.0)
    assert peak["kept_of_peak"] == pytest.approx(2.5 / 3)


def test_items_of_several_results_are_joined_by_name(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps({"models": {"A": {"gold": 1, "n": 7}, "B": {"gold": 2, "n": 8}}}))
    second.write_text(
        json.dumps({"models": {"B": {"accuracy": {"rate": 0.5}, "n": 9}, "A": {"accuracy": {"rate": 1}}}})
    )
    columns = {"gold": "gold", "probe": "accuracy.rate", "n": "n"}
    found = study.read_points(SeriesConfig(columns, results=[str(first), str(second)], at="models"))
    assert found == [{"name": "A", "gold": 1, "probe": 1, "n": 7}, {"name": "B", "gold": 2, "probe": 0.5, "n": 8}]
    with pytest.raises(UserError, match=r"first\.json, .*second\.json: there is no number 'loss' in A"):
        study.read_points(SeriesConfig({"loss": "loss"}, results=[str(first), str(second)], at="models"))
    second.write_text(json.dumps({"models": {"A": {"accuracy": {"rate": 1}}}}))
    with pytest.raises(UserError, match=r"second\.json: models has no 'B'"):
        study.read_points(SeriesConfig(columns, results=[str(first), str(second)], at="models"))
    with pytest.raises(ValueError, match=r"^run or results must be given"):
        SeriesConfig(columns, results=[])


def test_smoothing_by_hand():
    found = study.smoothed(points_of([1.0, 4.0, 1.0, 4.0], [0.0] * 4), 3)
    assert [point["gold"] for point in found] == [2.5, 2.0, 3.0, 2.5]
    assert [point["name"] for point in found] == ["1", "2", "3", "4"]


def test_saving_by_hand():
    start, base = {"loss": 1.0, "gold": 0.0}, {"loss": 1.4, "gold": 2.0}
    cheap, lossy = {"name": "cheap", "loss": 1.1, "gold": 1.95}, {"name": "lossy", "loss": 1.0, "gold": 1.0}
    close, equal = (SavingsConfig("loss", "gold", "start", "base", [], tolerance) for tolerance in (0.1, 0.0))
    found = study.find_saving([cheap, lossy], start, base, close)
    assert found["best"] == "cheap" and found["removed"] == pytest.approx(0.75)
    assert found["costs"]["lossy"] == {"loss": 0.0, "gold": 1.0} and found["increase"] == pytest.approx(0.4)
    assert study.find_saving([lossy], start, base, equal)["removed"] is None
    nothing = study.find_saving([cheap], base, start, equal)
    assert nothing["removed"] is None and nothing["increase"] == pytest.approx(-0.4)


@pytest.fixture
def sources(tmp_path):
    rows = [
        {"step": i + 1, "kl": kl, "score": kl, "gold_score": 1 + math.sqrt(kl) * (3 - 0.5 * math.sqrt(kl))}
        for i, kl in enumerate(KL)
    ]
    path = tmp_path / "results.json"
    path.write_text(
        json.dumps({
            "models": {
                "start": {"gold": {"total": 1.0}, "language_loss": 1.0},
                "beta 0.1": {"gold": {"total": 2.0}, "language_loss": 1.4},
                "gamma 0.5": {"gold": {"total": 2.1}, "language_loss": 1.1},
            },
            "curve": [{"n": 1, "kl": 0.0}, {"n": 2, "kl": 0.19}],
        })
    )  # fmt: skip
    for row, judged in zip(rows, (0.5, None, 0.6, 0.6, 0.7, 0.9, 0.9), strict=True):
        row |= {} if judged is None else {"held_out_score": judged}
    return write_run(tmp_path / "ppo", rows), str(path)


def study_config(sources, output, kept="held_out_score", **changes):
    ran, results = sources
    one = {"results": results, "at": "models", "columns": {"gold": "gold.total", "text loss": "language_loss"}}
    columns = {"kl": "kl", "proxy": "score", "gold": "gold_score"}
    settings = {
        "series": {
            "PPO": SeriesConfig(columns, run=ran, fit="best_of_n", kept=kept),
            **{name: SeriesConfig(**one, names=[name]) for name in ("start", "beta 0.1", "gamma 0.5")},
        },
        "charts": [ChartConfig("kl", "gold", "Gold along the way", root=True, laws=True)],
        "peak": PeakConfig("gold", "proxy", ["PPO"]),
        "savings": SavingsConfig("text loss", "gold", "start", "beta 0.1", ["gamma 0.5"]),
    } | changes
    return study.StudyConfig(str(output), "A <study>", **settings)


def test_a_study_has_its_figures_and_one_page(sources, tmp_path):
    found = json.loads(study.run(study_config(sources, tmp_path / "study")).read_text())
    assert found["laws"]["PPO"]["peak_kl"] == pytest.approx(9)
    peak = found["peaks"]["PPO"]
    assert peak["highest"]["kl"] == 9 and peak["rise"] == 16 and peak["fall"] == pytest.approx(5.5 - 3.5)
    assert peak["kept"]["kl"] == 16 and peak["kept_of_peak"] == pytest.approx(5 / 5.5)
    assert found["savings"]["gamma 0.5"]["removed"] == pytest.approx(0.75)
    assert found["series"]["gamma 0.5"] == [{"name": "gamma 0.5", "gold": 2.1, "text loss": 1.1}]
    page = (tmp_path / "study" / "report.html").read_text(encoding="utf-8")
    assert "A &lt;study&gt;" in page and "law of PPO" in page and "http" not in page.replace("http-equiv", "")


def test_everything_missing_is_said_at_once(sources, tmp_path):
    series = {
        "a": SeriesConfig({"kl": "kl"}, run=str(tmp_path / "nowhere")),
        "b": SeriesConfig({"kl": "kl"}, results=sources[1], at="modelz"),
        "c": SeriesConfig({"kl": "kl"}, results=sources[1], at="models", names=["gamma"]),
        "d": SeriesConfig({"kl": "entropy"}, run=sources[0]),
    }
    with pytest.raises(UserError) as error:
        study.run(study_config(sources, tmp_path / "study", series=series, charts=[], peak=None, savings=None))
    for words in ("a: ", "is not there", "no key 'modelz'", "no 'gamma'", "no number 'entropy'"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak": PeakConfig("gold", "proxy", ["PPQ"])}, "series has no 'PPQ'"),
        ({"peak": PeakConfig("gold", "proxy", ["start"])}, "series start has no column 'proxy'"),
        ({"charts": [ChartConfig("kl", "silver", "x")]}, "series has no 'silver'"),
    ],
)
def test_unknown_series_and_quantities_are_refused(sources, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        study_config(sources, tmp_path / "study", **changes)

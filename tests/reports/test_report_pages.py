"""The family of pages (a run, a recipe, a comparison): their first sentences, differences of texts, and faults in a browser."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from alignment import cli
from alignment.errors import UserError
from alignment.evaluation import win_rate
from alignment.reports.comparison import write_comparison
from alignment.reports.html import mark_differences
from alignment.reports.recipe_report import ReportConfig
from alignment.reports.recipe_report import run as run_recipe_report
from alignment.reports.run_log import RunLog, columns
from alignment.reports.sentences import better_run, describe_run, overlaps, winner
from alignment.statistics.reward_card import ScoredGroup, accuracy_figures, length_figures, pairs_of, reliability
from tests.conftest import write_lines

ATTACK = '<script>alert("x")</script>'
CHECK = Path(__file__).resolve().parents[2] / "scripts" / "check_pages.mjs"


class Tags(HTMLParser):
    """Opening tags of a page with their attributes."""

    def __init__(self, html: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def of(self, *names: str) -> list[tuple[str, dict]]:
        return [one for one in self.found if one[0] in names]


def summary(page: Path) -> str:
    text = re.findall(r'<p class="summary">(.*?)</p>', page.read_text(encoding="utf-8"))[0]
    return text.replace("&#39;", "'")


def log(stage: str, noise: float = 0.1, setting: dict | None = None, **ends: tuple[float, float]) -> RunLog:
    """A run of 50 updates whose metrics go along a line between their ends, with noise of one sign after the other."""
    values = {key: [a + (b - a) * i / 49 + noise * (-1) ** i for i in range(50)] for key, (a, b) in ends.items()}
    rows = [{"step": i + 1, **{key: own[i] for key, own in values.items()}} for i in range(50)]
    return RunLog(stage, setting or {}, *columns(rows), finished=50)


def write_run(folder: Path, run: RunLog, *, parents: dict | None = None, data: str = "11", samples=()) -> Path:
    folder.mkdir(parents=True)
    lineage = {
        "stage": run.stage, "config": "00", "parents": parents or {}, "data": {"data.train": data}, "finished": run.finished,
        "notes": ["train prompts: 8 of 9 rows kept", "train prompts:   dropped 1: no prompt (rows.jsonl:3)", "memory: 1 MB"],
    }  # fmt: skip
    (folder / "lineage.json").write_text(json.dumps(lineage))
    (folder / "config.yaml").write_text(json.dumps({"output": str(folder), **run.config}))
    steps = next(iter(run.series.values())).steps
    rows = [{"step": step, **{key: own.values[i] for key, own in run.series.items()}} for i, step in enumerate(steps)]
    for name, lines in (("metrics", rows), ("samples", samples)):
        write_lines(folder / f"{name}.jsonl", lines)
    return folder


def evaluation(rates: dict[str, tuple[int, int]], base: str = "Hello.", judge: str = "gold") -> dict:
    """results.json of `evaluate winrate` against SFT: policy -> wins, losses."""
    share = {"rate": 0.5, "low": 0.4, "high": 0.6}
    judged = {
        name: {"win_rate": asdict(win_rate([1.0] * wins + [0.0] * losses)), "inconsistent": {"count": 0, **share},
               "position_bias": share, "failures": 0}
        for name, (wins, losses) in rates.items()
    }  # fmt: skip
    texts = {"SFT": base, **dict.fromkeys(rates, f"Hello there {ATTACK}.")}
    sample = {"prompt": "Hi", "responses": {name: {"text": text, "score": None} for name, text in texts.items()}}
    return {"judge": judge, "baseline": "SFT", "prompts": 400, "models": {"SFT": {}, **judged}, "samples": [sample]}


def write_evaluation(folder: Path, results: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


# The first sentence: evaluations


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ({"PPO": (292, 108)}, "PPO is preferred to SFT in 73.0 % of 400 prompts, ties counting half (95 %: 68.4 to 77.1)."),
        ({"PPO": (108, 292)}, "SFT is preferred to PPO, which wins 27.0 % of 400 prompts"),
        ({"PPO": (208, 192)}, "Between PPO and SFT no difference is shown: PPO wins 52.0 %"),
        ({"DPO": (280, 120), "PPO": (292, 108)}, "No difference from DPO is shown: the intervals overlap."),
        ({"DPO": (210, 190), "PPO": (292, 108)}, "Its interval overlaps none of the others'."),
    ],
)  # fmt: skip
def test_the_first_sentence_says_who_won_and_how_sure(rates, words, tmp_path):
    page = write_comparison([write_evaluation(tmp_path / "win", evaluation(rates))], tmp_path / "page.html")
    assert words in summary(page)
    assert summary(page).startswith(winner(evaluation(rates))[:40])


def test_a_difference_needs_intervals_that_share_no_value():
    ends = [(low, high) for low in range(6) for high in range(low, 6)]
    for low, high in ends:
        for other_low, other_high in ends:
            rates = {"a": {"low": low, "high": high}, "b": {"low": other_low, "high": other_high}}
            shared = set(range(low, high + 1)) & set(range(other_low, other_high + 1))
            assert ("overlap." in overlaps("a", rates)) == bool(shared), rates


def test_evaluations_with_the_same_baseline_responses_are_compared(tmp_path):
    ppo, dpo = evaluation({"PPO": (292, 108)}), evaluation({"DPO": (200, 200)})
    folders = [write_evaluation(tmp_path / name, own) for name, own in (("one", ppo), ("two", dpo))]
    page = write_comparison(folders, tmp_path / "page.html")
    assert "Of 2 policies PPO (one) has the highest rate. Its interval overlaps none" in summary(page)
    assert page.read_text().count("PPO (one)") > 2 and "DPO (two)" in page.read_text()


def test_evaluations_with_other_baseline_responses_are_not(tmp_path):
    ppo, dpo = evaluation({"PPO": (292, 108)}), evaluation({"DPO": (200, 200)}, base="Good day.")
    folders = [write_evaluation(tmp_path / name, own) for name, own in (("one", ppo), ("two", dpo))]
    said = summary(write_comparison(folders, tmp_path / "page.html"))
    assert said.startswith("one: PPO is preferred to SFT") and "two: Between DPO and SFT" in said
    assert "not compared with each other" in said and "overlap" not in said


def test_evaluations_by_other_judges_are_refused(tmp_path):
    folders = [
        write_evaluation(tmp_path / judge, evaluation({"PPO": (3, 1)}, judge=judge)) for judge in ("gold", "longer")
    ]
    with pytest.raises(UserError, match=r"judge: .*gold.*longer.* different scales"):
        write_comparison(folders, tmp_path / "page.html")


# The first sentence: runs


def test_a_run_says_what_was_trained_how_it_ended_and_what_doctor_found():
    settings = {"policy": "runs/sft/model", "data": {"train": "rows/prompts.jsonl"}, "optim": {"learning_rate": 0.1}}
    said = describe_run(log("sft", setting=settings, loss=(3.0, 1.0)))
    assert said.startswith("sft trained sft/model on rows/prompts.jsonl; it finished after 50 updates. Loss fell from ")
    assert said.endswith("Doctor found none of the usual failures.")
    assert "Doctor found loss rises." in describe_run(log("sft", setting=settings, loss=(1.0, 3.0)))
    stopped = RunLog("sft", settings, *columns([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]))
    assert "it has not finished: there are 2 updates. Loss was 3 first and 2 last." in describe_run(stopped)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ((0.0, 2.0), (0.0, 1.0), ["one ends with the highest score", "Its interval overlaps none"]),
        ((0.0, 1.0), (0.0, 1.02), ["other ends with", "No difference from one is shown: the intervals overlap."]),
    ],
)
def test_runs_are_told_apart_by_the_ends_of_their_headline_metric(one, other, words):
    said = better_run({"one": log("ppo", score=one, loss=(1, 0)), "other": log("ppo", score=other, loss=(1, 0))}, [])
    assert all(each in said for each in words) and "other seeds" in said


def test_what_doctor_found_in_the_better_run_is_said_with_it():
    hacked = log("ppo", score=(0, 2), ended_share=(0.9, 0.2), loss=(1, 0))
    said = better_run({"one": hacked, "other": log("ppo", score=(0, 1), loss=(1, 0))}, [])
    assert "one ends with the highest score" in said and "But doctor found missing ends in it" in said


def test_the_lowest_loss_is_the_better_one():
    said = better_run({"one": log("sft", loss=(3, 1)), "other": log("sft", loss=(3, 2))}, ["optim.learning_rate"])
    assert said.startswith("one ends with the lowest loss")


def test_no_run_is_called_better_without_a_common_measure():
    runs = {"one": log("ppo", score=(0, 2)), "other": log("ppo", score=(0, 1))}
    assert "differ in how score is measured (reward_model)" in better_run(runs, ["kl_coef", "reward_model"])
    assert "No metric says" in better_run({**runs, "sft": log("sft", loss=(3, 1))}, [])
    few = RunLog("ppo", {}, *columns({"step": i, "score": 9.0} for i in range(1, 4)))
    assert "No difference in score is shown" in better_run({**runs, "few": few}, [])


# The page of several runs


@pytest.fixture
def compared(tmp_path):
    def sample(text: str, step: int) -> dict:
        return {"step": step, "prompt": f"Where is breakfast? {ATTACK}", "response": text, "score": 1.0}

    folders = []
    for name, score, text in (("first", 2.0, "It is in the hall."), ("second", 1.0, "It is in the garden.")):
        settings = {"policy": f"{name}/sft/model", "reward_model": f"{name}/reward/model", "data": {"train": "p.jsonl"},
                    "optim": {"learning_rate": 0.1 * score}, "value_optim": {"eps": 1} if score > 1 else None}  # fmt: skip
        run = log("ppo", setting=settings, score=(0, score), kl=(0, 3), value_loss=(1, 0.5))
        parents = {f"{name}/sft/model": "aa" * 32, f"{name}/reward/model": "bb" * 32}
        folders.append(write_run(tmp_path / name / "ppo", run, parents=parents, samples=[sample(text, 7)]))
    return folders


def test_a_comparison_has_verdict_settings_curves_and_samples(compared, tmp_path):
    page = write_comparison(compared, tmp_path / "page.html")
    html = page.read_text(encoding="utf-8")
    assert summary(page).startswith(
        "first ends with the highest score, 1.82 (95 %: 1.73 to 1.90). Its interval overlaps none"
    )
    settings = html[html.index("Settings that differ</caption>") :].partition("</table>")[0]
    assert re.findall(r'role="rowheader">([^<]+)', settings) == ["optim.learning_rate", "value_optim"]
    legends = re.findall(r'<ul class="legend">(.*?)</ul>', html)
    assert legends and all("first" in one and "second" in one for one in legends)
    assert "<del> hall.</del><ins> garden.</ins>" in html or "<del> garden.</del><ins> hall.</ins>" in html
    assert "dropped 1: no prompt" in html and "memory: 1 MB" not in html
    assert ATTACK not in html and "&lt;script&gt;" in html


def test_the_same_file_elsewhere_is_the_same_setting(compared, tmp_path):
    lineage = json.loads((compared[1] / "lineage.json").read_text())
    lineage["parents"]["second/reward/model"] = "cc" * 32
    (compared[1] / "lineage.json").write_text(json.dumps(lineage))
    assert "(reward_model)" in summary(write_comparison(compared, tmp_path / "page.html"))


def test_a_run_named_twice_and_a_folder_of_no_run_are_refused(compared, tmp_path, capsys):
    arguments = [
        "report",
        str(compared[0]),
        str(compared[0] / "." / ".." / "ppo"),
        "--output",
        str(tmp_path / "p.html"),
    ]
    assert cli.main(arguments) == 2 and "named twice" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), *arguments[3:]]) == 2 and "not a run" in capsys.readouterr().err
    arguments[2] = str(compared[1])
    assert cli.main(arguments) == 0 and (tmp_path / "p.html").is_file()


# Parts


def test_differences_are_marked_by_words_and_escaped():
    assert mark_differences("the bar serves tea", "the bar serves") == "the bar serves<ins> tea</ins>"
    assert mark_differences("the bar serves", "the bar serves tea") == "the bar serves<del> tea</del>"
    assert mark_differences("a b <i> d", "a b c d") == "a b<del> c</del><ins> &lt;i&gt;</ins> d"
    assert mark_differences("none of these words", "is in that text") == "none of these words"
    assert mark_differences("", "words") == ""


def recipe_page(tmp_path: Path) -> Path:
    """The page of a recipe with every part: win rates, a card, benchmarks, a stage that doctor finds wrong."""
    write_run(tmp_path / "sft", log("sft", setting={"optim": {"learning_rate": 0.1}}, loss=(1, 3)))
    write_evaluation(tmp_path / "evaluation", evaluation({f"PPO {ATTACK}": (292, 108)}))
    groups = [ScoredGroup("s", str(i), (1.0 + i % 3, 1.5), (0, 1), (10 + i, 12)) for i in range(30)]
    pairs = pairs_of(groups)
    card = {
        "reward_model": "reward/model", "left_out": ["29 of 30 rows kept"], "best_of_n": {}, "robustness": {},
        "model": {"architecture": "decoder", "parameters": 1, "dtype": "float32", "loss": None, "normalized": False},
        "accuracy": {"all": accuracy_figures(groups)}, "calibration": {"all": reliability(pairs.margins)},
        "length": {"all": length_figures(pairs)},
    }  # fmt: skip
    write_evaluation(tmp_path / "card", {})
    (tmp_path / "card" / "card.json").write_text(json.dumps(card))
    value = {"value": 0.5, "low": 0.4, "high": 0.6}
    task = {"figure": "accuracy", "rows": 9, "models": {"SFT": {"accuracy": value}, "PPO": {"accuracy": value}},
            "against": "SFT", "differences": {"PPO": {"accuracy": {"value": 0.1, "low": -0.2, "high": 0.4}}}}  # fmt: skip
    write_evaluation(tmp_path / "benchmarks", {"tasks": {"lambada": task}})
    return run_recipe_report(
        ReportConfig(
            str(tmp_path),
            "A recipe",
            summary="In short.",
            stages={"SFT": str(tmp_path / "sft")},
            evaluation=str(tmp_path / "evaluation"),
            reward_models={"proxy": str(tmp_path / "card")},
            benchmarks=str(tmp_path / "benchmarks"),
        )
    )


def test_a_recipes_page_has_card_benchmarks_findings_and_dropped_rows(tmp_path):
    page = recipe_page(tmp_path)
    html = page.read_text(encoding="utf-8")
    assert re.match(r"PPO &lt;script.*is preferred to SFT in 73.0 % .*In short\.$", summary(page))
    assert "Reward model: proxy" in html and "29 of 30 rows kept" in html
    assert "change from SFT" in html and "0.100 [−0.200,\N{NO-BREAK SPACE}0.400]".replace("−", "\N{MINUS SIGN}") in html
    assert "SFT: loss rises" in html and "SFT: train prompts:   dropped 1" in html
    assert ATTACK not in html


def test_a_recipe_names_what_was_not_evaluated(tmp_path):
    missing = str(tmp_path / "none")
    with pytest.raises(UserError) as refused:
        run_recipe_report(ReportConfig(str(tmp_path), "x", evaluation=missing, reward_models={"a": missing}))
    assert "`alignment evaluate winrate`" in str(refused.value) and "`alignment evaluate reward`" in str(refused.value)


@pytest.fixture
def family(tmp_path, compared) -> list[Path]:
    return [
        write_comparison(compared[:1], tmp_path / "run.html"),
        write_comparison(compared, tmp_path / "comparison.html"),
        recipe_page(tmp_path / "recipe"),
    ]


def test_pages_have_landmarks_headings_captions_and_descriptions(family):
    for page in family:
        tags = Tags(page.read_text(encoding="utf-8"))
        assert [len(tags.of(name)) for name in ("main", "header", "nav", "h1")] == [1, 1, 1, 1]
        levels = [int(tag[1]) for tag, _ in tags.of("h1", "h2", "h3")]
        assert all(after <= before + 1 for before, after in pairwise(levels))
        assert len(tags.of("caption")) == len(tags.of("table")) > 0
        assert all(own["scope"] in ("col", "row") for _, own in tags.of("th"))
        regions = [own for tag, own in tags.of("div") if own.get("class") == "scroll"]
        assert all(own["tabindex"] == "0" and own["role"] == "region" for own in regions)
        assert len({own["aria-label"] for own in regions}) == len(regions)
        assert len(tags.of("svg")) == len(tags.of("title")) - 1 == len(tags.of("desc"))
        assert not tags.of("script") and page.stat().st_size < 1_500_000


# In a browser


def check_pages(*pages: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["node", str(CHECK), *map(str, pages)], capture_output=True, text=True, timeout=300)


needs_browser = pytest.mark.skipif(
    not (shutil.which("node") and os.environ.get("PAGES_MODULES")),
    reason="needs node, Chromium, and PAGES_MODULES with playwright-core and axe-core: see scripts/check_pages.mjs",
)


@needs_browser
def test_a_browser_finds_no_serious_fault(family):
    done = check_pages(*family)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_browser
def test_the_browsers_check_finds_planted_faults(family):
    html = family[0].read_text(encoding="utf-8")
    html = html.replace('lang="en"', "").replace("--muted: #67635b", "--muted: #d0d0d0")
    html = html.replace("</main>", '<div style="width: 3000px">wide</div><img src="http://localhost:9/x.png"></main>')
    family[0].write_text(re.sub(r'(<text [^>]*x=")[\d.]+', r"\g<1>50", html))
    said = check_pages(family[0]).stdout
    faults = ("html-has-lang", "color-contrast", "image-alt", "pixels wider", "overlap:", "loads http://localhost:9")
    assert [fault for fault in faults if fault not in said] == []


def test_sentence_and_table_of_a_short_run_have_the_same_ends(tmp_path):
    rows = [{"step": i, "score": 0.1 * i, "kl": 0.01 * (i - 1)} for i in range(1, 6)]
    run = RunLog("ppo", {"policy": "a/base"}, *columns(rows), finished=5)
    page = write_comparison([write_run(tmp_path / "ppo", run)], tmp_path / "page.html")
    assert "Score was 0.1 first and 0.5 last" in summary(page)
    table = re.sub(
        r"<[^>]*>|\s+", " ", page.read_text("utf-8").partition("Beginning and end")[2].partition("</table>")[0]
    )
    assert re.search(r"score +0.100 +0.500 +kl +0.00 +0.0400", table)


def test_runs_of_two_stages_differ_in_the_settings_that_both_have(tmp_path):
    ppo = log("ppo", setting={"seed": 1, "kl_coef": 0.1, "optim": {"eps": 1.0}}, score=(0, 1))
    reward = log("reward", setting={"seed": 2, "centering": 0.3, "optim": {"eps": 1.0}}, accuracy=(0.5, 0.7))
    runs = [write_run(tmp_path / name, run) for name, run in (("a", ppo), ("b", reward))]
    table = write_comparison(runs, tmp_path / "page.html").read_text("utf-8").partition("Settings that differ")[2]
    rows = re.findall(r'<th scope="row"[^>]*>([^<]*)', table.partition("</table>")[0])
    assert [row for row in rows if row in ("seed", "kl_coef", "centering", "optim.eps")] == ["seed"]

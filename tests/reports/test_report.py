"""The report page: whole, escaped, self-contained, and true to its numbers."""

import json
import math
import re
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from alignment.errors import UserError
from alignment.evaluation import seeds_win_rate, win_rate
from alignment.reports.charts import Curve, curve_chart
from alignment.reports.html import format_cell
from alignment.reports.page import write_report, write_run_report
from alignment.reports.recipe_report import ReportConfig, print_results, verdicts
from alignment.reports.recipe_report import run as run_report
from alignment.reports.run_log import StageRecord
from alignment.training.run.lineage import earlier_run

VOID = {"meta", "br", "hr", "img", "link", "input"}
ATTACK = '<script>alert("x")</script><img src=x onerror=alert(1)>'


class Page(HTMLParser):
    """Checks that tags close in order and keeps what a test asks about."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> out of place at {self.getpos()}"

    def handle_data(self, data):
        self.text += data


def full_data(name: str = "PPO") -> dict:
    """Every part of a report, with one name and text that try to get out of their place."""
    rows = [{"step": i + 1, "loss": 2.0 / (i + 1), "kl": 0.1 * i, "learning_rate": 1e-3} for i in range(60)]
    rows[3]["loss"] = None
    rows[-1]["held_out_loss"] = 0.25
    rate = asdict(win_rate([1.0] * 70 + [0.5] * 10 + [0.0] * 20))
    models = {
        "SFT": {
            "gold": {"helpful": 0.4, "brief": -0.21},
            "pairs": {"chosen_log_prob_change": 0.0, "rejected_log_prob_change": 0.0, "margin": 0.0},
        },
        name: {
            **judged(rate, 3, 2),
            "gold": {"helpful": 0.875, "brief": 0.5},
            "pairs": {"chosen_log_prob_change": -1.625, "rejected_log_prob_change": -4.75, "margin": 3.125},
        },
    }
    points = [(0.1, 0.5, 2.0), (3.0, 1.5, 2.5), (math.nan, 2.0, None)]
    path = [
        {"step": i, **dict(zip(("kl", "score", "gold_score"), point, strict=True))} for i, point in enumerate(points, 1)
    ]
    return {
        "title": "A title & more",
        "summary": "What happened.",
        "tables": {
            "Two policies": [
                {"Policy": "SFT", "Gold": 2.125, "Against SFT": None},
                {"Policy": name, "Gold": 3.5, "Against SFT": rate},
            ]
        },
        "results": {"baseline": "SFT", "judge": "gold", "models": models},
        "stages": {"ppo": rows, "empty": [], name: path},
        "samples": [
            {
                "prompt": f"Where is breakfast? {ATTACK}",
                "responses": {name: {"text": f"In the hall. {ATTACK}", "score": 3.25}},
            },
            {"prompt": [{"role": "user", "content": "Hello"}], "responses": {name: {"text": "Hello!", "score": None}}},
        ],
        "lineage": [
            StageRecord("sft", "cd" * 32, (), 25.0, {}),
            StageRecord("ppo", "ab" * 32, ("sft",), 125.0, {"optim": {"learning_rate": 0.001}, "note": ATTACK}),
        ],
    }


def judged(rate: dict, inconsistent: int = 0, failures: int = 0, bias: tuple = (0.5, 0.4, 0.6)) -> dict:
    """A model's part of results.json."""
    shares = dict(zip(("rate", "low", "high"), bias, strict=True))
    return {
        "win_rate": rate, "inconsistent": {"count": inconsistent, **shares}, "position_bias": shares, "failures": failures,
    }  # fmt: skip


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report") / "report.html", **full_data()).read_text(encoding="utf-8")


def test_page_is_well_formed_and_holds_its_numbers(html):
    page = Page(html)
    words = " ".join(page.text.split())
    # 70 wins and 10 ties of 100
    for expected in (
        "A title & more",
        "75.0 %",
        "2.12",
        "0.88",
        "3.25",
        "2 min 05 s",
        "abab" * 3,
        "optim.learning_rate",
    ):
        assert expected in words, expected
    assert "user: Hello" in words
    # win rates; gold parts; pairs; proxy and gold over KL; loss, KL, learning rate of one stage; KL and scores of another
    assert page.tags.count("svg") == 1 + 2 + 3 + 2 + 3 + 3
    assert 'id="training-1"' in html and "empty" not in words
    pairs = html[html.index('id="pairs"') : html.index('id="overoptimization"')]
    assert pairs.count("<svg") == 3 and "SFT" not in pairs  # the baseline has not moved
    assert all(f">\N{MINUS SIGN}{number}<" in pairs for number in ("1.62", "4.75")) and ">3.12<" in pairs


def test_text_is_escaped_nothing_can_run_and_nothing_is_fetched(html):
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert (
        page.text.count("<script>alert") == html.count("&lt;script&gt;alert") == 4
    )  # summary, prompt, answer, setting
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|//\w|@import|<link|<iframe|url\((?!#)", html)
    assert all(value.startswith("#") for name, value in page.attributes if name in ("href", "src"))
    ids = re.findall(r'\bid="([^"]+)"', html)
    wanted = {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', html)}
    assert len(ids) == len(set(ids)) and wanted and wanted <= set(ids)
    svg = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert "var(--series-0)" in svg and "var(--ink)" in svg and not re.search(r"#[0-9a-f]{6}\b", svg)
    assert all(f"--{name}:" in html for name in set(re.findall(r"var\(--([\w-]+)\)", html)))


def test_empty_parts_are_left_out(tmp_path):
    html = write_report(tmp_path / "report.html", "Nothing yet").read_text(encoding="utf-8")
    page = Page(html)
    assert "section" not in page.tags and "svg" not in page.tags and "a" not in page.tags
    assert "Nothing yet" in page.text


def test_the_same_data_give_the_same_page(tmp_path, html):
    curve_chart.cache_clear()  # drawn again, not remembered
    again = write_report(tmp_path / "report.html", **full_data()).read_text(encoding="utf-8")
    assert again == html


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (3.1, "3.10"), (0.0, "0.00"), (-1.5, "\N{MINUS SIGN}1.50"), (12345.6, "12,346"),
        (2e-7, "2.00e\N{MINUS SIGN}07"), (7, "7"), ("text", "text"),
    ],
)  # fmt: skip
def test_cells(value, text):
    assert format_cell(value) == text


# --- what a reader sees ---


def test_every_curve_of_a_chart_has_its_swatch_outside_the_drawing():
    labels = ("chosen", "chosen, held out", "rejected", "rejected, held out")
    curves = tuple(Curve(label, (1, 2), (number, 3), number) for number, label in enumerate(labels))
    chart = curve_chart("Implicit rewards", curves, "update")
    legend, drawing = chart.split("<svg")
    assert re.findall(r'<li class="series-(\d)">([^<]+)</li>', legend) == [
        (str(i), name) for i, name in enumerate(labels)
    ]
    assert "rejected, held out from 3 to 3" in re.findall(r"<desc>(.*?)</desc>", drawing)[0]
    assert "held out" not in drawing.partition("</desc>")[2]
    assert "<li" not in curve_chart("Loss", curves[:1], "update")


@pytest.mark.parametrize(
    ("wins", "losses", "words"),
    [
        (
            292,
            108,
            "PPO is preferred to SFT in 73.0 % of 400 prompts, ties counting half (95 %: 68.4 to 77.1); judge: gold.",
        ),
        (
            108,
            292,
            "SFT is preferred to PPO, which wins 27.0 % of 400 prompts, ties counting half (95 %: 22.9 to 31.6); judge: gold.",
        ),
        (
            208,
            192,
            "no difference is shown: PPO wins 52.0 % of 400 prompts, ties counting half (95 %: 47.1 to 56.9), which includes 50 %",
        ),
    ],
)
def test_the_page_says_who_won(wins, losses, words, tmp_path):
    rate = asdict(win_rate([1.0] * wins + [0.0] * losses))
    said = verdicts({"baseline": "SFT", "judge": "gold", "models": {"SFT": {}, "PPO": judged(rate)}})
    assert len(said) == 1 and words in said[0]
    page = write_report(tmp_path / "report.html", "Verdict", verdicts=said)
    assert words in Page(page.read_text(encoding="utf-8")).text


def test_a_judge_that_goes_by_position_is_no_honest_half(tmp_path):
    rate = asdict(win_rate([0.5] * 32, inconsistent=32))
    results = {"baseline": "SFT", "judge": "people", "models": {"PPO": judged(rate, 32, 0, (1.0, 0.893, 1.0))}}
    page = write_report(tmp_path / "report.html", "Verdict", results=results).read_text("utf-8")
    assert "100.0 % [89.3, 100.0]" in Page(page).text.replace("\N{NO-BREAK SPACE}", " ")
    (words,) = verdicts(results)
    assert "(95 %: 0.0 to 100.0)" in words and "no difference is shown" in words
    assert "contradict each other on 32 of them" in words


# --- a run's own directory ---


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("optim:\n  learning_rate: 0.001\n")
    (folder / "lineage.json").write_text(json.dumps({"stage": "sft", "config": "00", "parents": {"runs/base": "11"}}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    (folder / "samples.jsonl").write_text('{"step": 2, "prompt": "Hi", "response": "Hello.", "score": 0.5}\n')
    return folder


def test_a_run_reports_on_itself(run_folder):
    page = Page(write_run_report(run_folder).read_text(encoding="utf-8"))
    for expected in ("my-run: sft", "Hello.", "update 2", "runs/base", "0.001"):
        assert expected in page.text, expected
    assert page.tags.count("svg") == 1


def test_settings_that_unfold_without_end_are_refused(run_folder):
    """Six levels of nine aliases are 531,441 values."""
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 7)]
    (run_folder / "config.yaml").write_text("l0: &l0 x\n" + "".join(levels))
    with pytest.raises(UserError, match=r"more than \d+ values"):
        write_run_report(run_folder)
    with pytest.raises(UserError, match="cannot be read"):
        earlier_run(run_folder)


def test_a_model_of_several_seeds_has_the_rate_of_each_beside_its_interval(capsys):
    rate = asdict(win_rate([1.0] * 5 + [0.0])) | asdict(seeds_win_rate([[1, 1, 0], [1, 1, 1]]))
    share = {"rate": 0.5, "low": 0.4, "high": 0.6, "n": 6}
    ppo = {"win_rate": rate, "seeds": [{}, {}], "inconsistent": {"count": 2, **share}, "position_bias": share}
    print_results({"judge": "people", "baseline": "SFT", "models": {"SFT": {}, "PPO": ppo}})
    shown = " ".join(capsys.readouterr().out.split())
    assert "66.7, 100.0" in shown and "PPO wins 83.3 % of 3 prompts with 2 seeds each" in shown
    assert "contradict each other on 2 pairs in all." in shown


def test_a_recipes_table_has_intervals_and_the_budget_a_table_of_its_own(tmp_path, capsys):
    shares = {"rate": 0.25, "low": 0.1, "high": 0.4, "n": 4}
    sft = {"gold": {"total": 2.0}, "gold_interval": None}
    ppo = {
        "gold": {"total": 2.5}, "gold_interval": [2.25, 2.75], "kl": 1.5, "kl_interval": [1.0, 2.0], "failures": 0,
        "win_rate": asdict(win_rate([1.0] * 3 + [0.5], inconsistent=1)), "inconsistent": {"count": 1, **shares},
        "position_bias": shares,
    }  # fmt: skip
    results = {"judge": "people", "baseline": "SFT", "warnings": ["mind the judge"], "models": {"SFT": sft, "PPO": ppo}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "PPO").mkdir()
    (tmp_path / "PPO/lineage.json").write_text(json.dumps({"stage": "ppo", "parents": {}}))
    (tmp_path / "PPO/config.yaml").write_text("training: {batch_size: 32}\noptim: {learning_rate: 0.001}\n")
    (tmp_path / "PPO/metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    stages = {"PPO": str(tmp_path / "PPO")}
    report = run_report(ReportConfig(str(tmp_path), "Title", stages=stages, evaluation=str(tmp_path)))
    page = report.read_text(encoding="utf-8")
    first, second = re.findall(r"<table.*?</table>", page[: page.index('id="win-rates"')], re.DOTALL)
    assert "2.50 [2.25,\N{NO-BREAK SPACE}2.75]" in first and "1.50 [1.00,\N{NO-BREAK SPACE}2.00]" in first
    assert "learning rate" in second and "learning rate" not in first and ">7<" in second
    assert "mind the judge" in page and "25.0 % [10.0," in page[page.index('id="win-rates"') :].replace("\xa0", " ")
    shown = capsys.readouterr().out
    assert "Between PPO and SFT" in shown and "learning rate" in shown

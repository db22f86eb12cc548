"""The report page: whole, escaped, self-contained, and true to its numbers."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from alignment.errors import UserError
from alignment.evaluation import win_rate
from alignment.evaluation.report.charts import POINTS_SHOWN, Bar, Curve, bar_chart, curve_chart, path_chart
from alignment.evaluation.report.page import (
    KLPoint,
    ReportData,
    Sample,
    SampleResponse,
    StageRecord,
    WinRateRow,
    format_cell,
    format_duration,
    write_report,
)
from alignment.evaluation.report.recipe_report import summary_rows, training_budget
from alignment.evaluation.report.run_report import read_log_rows, read_stage_record, write_run_report
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


def full_data(name: str = "PPO") -> ReportData:
    """Every part of a report, with one name and text that try to get out of their place."""
    rows = [{"step": i + 1, "loss": 2.0 / (i + 1), "kl": 0.1 * i, "learning_rate": 1e-3} for i in range(60)]
    rows[3]["loss"] = None
    rows[-1]["held_out_loss"] = 0.25
    return ReportData(
        title="A title & more",
        summary="What happened.",
        summary_table=[
            {"Policy": "SFT", "Gold": 2.125, "Against SFT": None},
            {"Policy": name, "Gold": 3.5, "Against SFT": win_rate([1.0] * 70 + [0.5] * 10 + [0.0] * 20)},
        ],
        win_rates=[WinRateRow(name, "SFT", "gold", win_rate([1.0] * 70 + [0.5] * 10 + [0.0] * 20), 3, 2)],
        gold_parts={"SFT": {"helpful": 0.4, "brief": -0.21}, name: {"helpful": 0.875, "brief": 0.5}},
        pairs={
            "SFT": {"chosen_log_prob_change": 0.0, "rejected_log_prob_change": 0.0, "margin": 0.0},
            name: {"chosen_log_prob_change": -1.625, "rejected_log_prob_change": -4.75, "margin": 3.125},
        },
        overoptimization={name: [KLPoint(0.1, 0.5, 2.0), KLPoint(3.0, 1.5, 2.5), KLPoint(math.nan, 2.0, None)]},
        stages={"ppo": rows, "empty": []},
        samples=[
            Sample(f"Where is breakfast? {ATTACK}", {name: SampleResponse(f"In the hall. {ATTACK}", 3.25)}),
            Sample([{"role": "user", "content": "Hello"}], {name: SampleResponse("Hello!")}),
        ],
        lineage=[
            StageRecord("sft", "cd" * 32, (), 25.0, {}),
            StageRecord("ppo", "ab" * 32, ("sft",), 125.0, {"optim": {"learning_rate": 0.001}, "note": ATTACK}),
        ],
        notes=[f"A remark. {ATTACK}"],
    )


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report") / "report.html", full_data()).read_text(encoding="utf-8")


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
        "abababababab",
        "optim.learning_rate",
    ):
        assert expected in words, expected
    assert "user: Hello" in words
    assert (
        page.tags.count("svg") == 1 + 2 + 3 + 2 + 3
    )  # win rates; gold parts; pairs; proxy and gold; loss, KL, learning rate
    assert 'id="training"' in html and ">empty<" not in html


def test_text_is_escaped_and_nothing_can_run(html):
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert (
        page.text.count("<script>alert") == html.count("&lt;script&gt;alert") == 5
    )  # summary, prompt, answer, setting, note
    assert "default-src 'none'" in html


def test_names_in_charts_are_escaped_too(tmp_path):
    name = '<b onclick="x">$\\frac{1}{2}$ & "q"'
    html = write_report(tmp_path / "report.html", full_data(name)).read_text(encoding="utf-8")
    page = Page(html)
    assert not any(key.startswith("on") for key, _ in page.attributes)
    assert "$\\frac{1}{2}$" in page.text


def test_page_fetches_nothing(html):
    assert not re.search(r"https?:|//\w|@import|<link|<iframe", html)
    assert not re.search(r"url\((?!#)", html)
    assert all(value.startswith("#") for name, value in Page(html).attributes if name in ("href", "src"))


def test_every_inner_reference_has_its_target(html):
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', html)) and all(
        a in ids or b in ids for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', html)
    )


def test_charts_use_the_colors_of_the_page(html):
    svg = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert "var(--series-0)" in svg and "var(--ink)" in svg
    assert not re.search(r"#[0-9a-f]{6}\b", svg)
    assert all(f"--{name}:" in html for name in set(re.findall(r"var\(--([\w-]+)\)", html)))


def test_empty_parts_are_left_out(tmp_path):
    html = write_report(tmp_path / "report.html", ReportData(title="Nothing yet")).read_text(encoding="utf-8")
    page = Page(html)
    assert "section" not in page.tags and "svg" not in page.tags and "a" not in page.tags
    assert "Nothing yet" in page.text


def test_the_same_data_give_the_same_page(tmp_path, html):
    curve_chart.cache_clear()  # drawn again, not remembered
    again = write_report(tmp_path / "report.html", full_data()).read_text(encoding="utf-8")
    assert again == html


def test_long_curves_are_thinned_but_keep_their_end():
    noisy = [math.sin(i * i) for i in range(10_000)]
    svg = curve_chart("long", (Curve("training", range(10_000), tuple(noisy)),), "update")
    assert len(svg) < 30_000
    short = path_chart("path", [Curve("PPO", [0.0, 1.0], [1.0, 2.0])], "KL", "score")
    assert "KL" in short and POINTS_SHOWN < 1000


def test_bars_show_their_values_with_a_true_minus():
    svg = bar_chart("parts", [Bar("base", -0.62), Bar("PPO", 0.83)], limits=(-1, 1))
    assert "\N{MINUS SIGN}0.62" in svg and "0.83" in svg


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (3.1, "3.10"),
        (0.0, "0.00"),
        (-1.5, "\N{MINUS SIGN}1.50"),
        (12345.6, "12,346"),
        (2e-7, "2.00e\N{MINUS SIGN}07"),
        (7, "7"),
        ("text", "text"),
    ],
)
def test_cells(value, text):
    assert format_cell(value) == text


def test_durations():
    assert [format_duration(seconds) for seconds in (None, 3.24, 125, 7260)] == [
        "–",
        "3.2 s",
        "2 min 05 s",
        "2 h 01 min",
    ]


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


def test_a_line_cut_short_by_a_crash_is_left_out_but_a_broken_one_is_named(run_folder):
    path = run_folder / "metrics.jsonl"
    assert [row["step"] for row in read_log_rows(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_log_rows(path)


def test_settings_that_unfold_without_end_are_refused(run_folder):
    """Six levels of nine aliases are 531,441 values."""
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 7)]
    (run_folder / "config.yaml").write_text("l0: &l0 x\n" + "".join(levels))
    with pytest.raises(UserError, match=r"more than \d+ values"):
        write_run_report(run_folder)
    with pytest.raises(UserError, match="cannot be read"):
        earlier_run(run_folder)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"lineage\.json"):
        read_stage_record(tmp_path)


# --- recipes: policies side by side -----------------------------------------------------------------------------------


def test_held_out_pairs_have_a_chart_for_each_side_and_their_margin(html):
    section = html[html.index('id="pairs"') : html.index('id="overoptimization"')]
    assert section.count("<svg") == 3
    assert all(f">\N{MINUS SIGN}{number}<" in section for number in ("1.62", "4.75")) and ">3.12<" in section
    assert "SFT" not in section  # the baseline has not moved


def test_a_recipes_table_says_what_every_policy_was_given(tmp_path):
    lineage = [
        StageRecord("IPO", "ab" * 32, settings={"training": {"batch_size": 32}, "optim": {"learning_rate": 3e-4}}),
        StageRecord("KTO", "cd" * 32, settings={"training": {"batch_size": 64}, "optim": {"learning_rate": 2e-4}}),
    ]
    updates = {"IPO": 50, "KTO": 50}
    assert training_budget(lineage, updates, "IPO") == {"updates": 50, "rows per update": 32, "learning rate": 3e-4}
    assert training_budget(lineage, updates, "KTO")["rows per update"] == 64
    assert training_budget(lineage, updates, "SFT") == {}


def test_a_recipes_table_shows_the_pairs_of_every_policy():
    pairs = {"chosen_log_prob_change": -1.5, "rejected_log_prob_change": -4.0, "margin": 2.5, "accuracy": 0.75}
    model = {"response_tokens": 20.0, "ended_share": 1.0, "pairs": pairs}
    (row,) = summary_rows({"baseline": "SFT", "models": {"SFT": model}})
    shown = {"chosen, change in nats": -1.5, "rejected, change in nats": -4.0, "pair margin, nats": 2.5}
    assert row.items() >= shown.items()

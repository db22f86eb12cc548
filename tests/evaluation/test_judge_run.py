"""A judge held against people: published sets to the digit, planted faults of judges and of files, the command."""

import json

import pytest

from alignment.cli import main
from alignment.errors import UserError
from alignment.evaluation.judge_run import JudgeEvalConfig, run
from alignment.judging.labeled_items import LabelColumns, add_items
from alignment.settings import refusal
from tests.conftest import DATA, lines_file

real_data = [pytest.mark.real_data, pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}; set ALIGNMENT_DATA")]


def rows_file(path, rows):
    return str(lines_file(path, rows))


def results_of(tmp_path, **settings):
    return json.loads(run(JudgeEvalConfig(output=str(tmp_path / "out"), **settings)).read_text(encoding="utf-8"))


def agreed(figures):
    return figures["agreed"], figures["n"]


def responses(count):
    """Rows of two responses, of which one person prefers the longer in every second row."""
    return [{"prompt": f"p{i}", "a": "short", "b": "much longer", "who_wins": 1 if i % 2 else 2} for i in range(count)]


COLUMNS = {"first": "a", "second": "b", "label": "who_wins", "prompt": "prompt"}

# --- published sets -------------------------------------------------------------------------------------------------

PANDALM = {
    "prompt": ["instruction", "input"], "first": "response1", "second": "response2", "pair": "cmp_key",
    "label": ["annotator1", "annotator2", "annotator3"],
}  # fmt: skip


class TestPublished:
    pytestmark = real_data

    def test_mt_bench_table_5_and_the_error_of_win_rates(self, tmp_path):
        """886/1343, 727/859, 454/721, 388/479, and turn 2 (arXiv:2306.05685); rates of 15 pairs are off by 7.7 points."""
        found = results_of(
            tmp_path,
            labels=str(DATA / "mt_bench/human_votes.jsonl.gz"),
            judge="verdicts",
            verdicts=str(DATA / "mt_bench/gpt4_pair_votes.jsonl.gz"),
            columns={"subset": "turn"},
            annotators="expert_.*",
        )
        table = {}
        for turn, rows in found["subsets"].items():
            sides = rows["judge and one person"], rows["two people"]
            table[turn] = [agreed(side[name]) for side in sides for name in ("with_ties", "without_ties")]
        assert table == {
            "1": [(886, 1343), (727, 859), (454, 721), (388, 479)],
            "2": [(871, 1325), (731, 864), (471, 707), (388, 474)],
        }
        assert (found["items"], found["labeled"], found["error"]["n"]) == (2400, 1633, 15)
        assert round(100 * found["error"]["mean"], 1) == 7.7 and round(100 * found["error"]["largest"], 1) == 19.4
        pair = found["pairs"]["gpt-3.5-turbo against gpt-4"]
        assert pair["items"] == 160
        assert pair["judge"]["high"] < pair["corrected"]["low"]  # GPT-4 prefers itself by far too much
        assert 1.05 < found["labels"]["worth"] < 1.15

    def test_pandalm_s_judge_and_its_people(self, tmp_path):
        """552 of these 835 rows are right, 66.1 %, where the paper has 66.77 % of 999."""
        labels = str(DATA / "pandalm/testset.jsonl.gz")
        found = results_of(tmp_path, labels=labels, columns=PANDALM, judge="verdicts", verdicts="pandalm7b_result")
        rows = found["agreement"]
        assert agreed(rows["judge"]["with_ties"]) == (552, 835) and found["without_majority"] == 0
        kappas = [rows[name]["kappa"]["value"] for name in ("judge", "the longer response", "two people")]
        assert [round(kappa, 2) for kappa in kappas] == [0.42, 0.29, 0.86]
        assert round(found["labels"]["worth"], 1) == 1.3 and len(found["pairs"]) == 10
        parsed = results_of(tmp_path, labels=labels, columns=PANDALM, judge="verdicts", verdicts="gpt35_result")
        assert parsed["failures"] == 24  # `garbage` is no verdict

    def test_the_longer_response_by_subset(self, tmp_path):
        """LLMBar's adversarial subsets are made against it; of the sets of real answers it is right more often than not."""
        llmbar = {"prompt": "input", "first": "output_1", "second": "output_2", "subset": "subset"}
        found = results_of(tmp_path, labels=str(DATA / "llmbar/llmbar.jsonl.gz"), columns=llmbar, judge="longer")
        assert {name: agreed(rows["judge"]["with_ties"]) for name, rows in found["subsets"].items()} == {
            "LLMBar/GPTInst": (9, 79), "LLMBar/GPTOut": (13, 36), "LLMBar/Manual": (7, 42), "LLMBar/Natural": (47, 82),
            "LLMBar/Neighbor": (13, 114), "Processed/FairEval": (36, 57), "Processed/LLMEval^2": (96, 160),
            "Processed/MT-Bench": (136, 200),
        }  # fmt: skip
        hhh = str(DATA / "hhh_alignment/hhh.jsonl.gz")
        found = results_of(tmp_path, labels=hhh, columns={"subset": "source"}, judge="longer")
        assert {name: agreed(rows["judge"]["with_ties"]) for name, rows in found["subsets"].items()} == {
            "harmless": (32, 48), "helpful": (31, 47), "honest": (31, 53), "other": (21, 36)
        }  # fmt: skip


# --- forms of rows --------------------------------------------------------------------------------------------------


def test_rows_of_both_orders_and_several_people_are_one_item(tmp_path):
    """Ann prefers x in both orders; Bob prefers the first both times, which is a tie."""
    votes = [("ann", "x", "y", 1), ("ann", "y", "x", 0), ("bob", "x", "y", 1), ("bob", "y", "x", 1)]
    keys = ("judge", "first", "second", "verdict")
    rows = [{"id": "1", "prompt": "p", **dict(zip(keys, vote, strict=True))} for vote in votes]
    items = {}
    add_items(rows_file(tmp_path / "labels.jsonl", rows), LabelColumns(annotators="ann|bob"), items)
    [item] = items.values()
    assert (item.first, item.votes, item.label, item.mean_vote) == ("x", {"ann": 1.0, "bob": 0.5}, None, 0.75)


def test_models_stand_in_one_order_in_all_their_items(tmp_path):
    given = [(1, "zoo", "ant", "model_a"), (2, "ant", "zoo", "model_a"), (3, "zoo", "ant", "tie (bet)")]
    keys = ("turn", "model_a", "model_b", "winner")
    votes = [{"question_id": 1, "judge": "ann", **dict(zip(keys, vote, strict=True))} for vote in given]
    items = {}
    add_items(rows_file(tmp_path / "votes.jsonl", votes), LabelColumns(), items)
    assert {(item.pair, item.first, item.cluster) for item in items.values()} == {("ant against zoo", "", "1")}
    assert [item.label for item in items.values()] == [0.0, 1.0, 0.5]


def test_comparisons_and_dialogues_need_no_columns(tmp_path):
    sides = {"chosen": "a no", "rejected": "yes"}, {"chosen": "yes", "rejected": "a no"}
    pairs = [{"prompt": f"p{i}", **sides[i % 2]} for i in range(8)]
    turns = [f"\n\nHuman: {i}?\n\nAssistant: " for i in range(6)]
    dialogues = [{"chosen": f"{turn}b", "rejected": f"{turn}aa"} for turn in turns]
    files = [rows_file(tmp_path / "one.jsonl", pairs), rows_file(tmp_path / "two.jsonl", dialogues)]
    found = results_of(tmp_path, labels=files, judge="longer")
    judged = {name: agreed(rows["judge"]["with_ties"]) for name, rows in found["subsets"].items()}
    assert judged == {"one": (4, 8), "two": (0, 6)}
    assert found["longer"]["judge"]["value"] == 1.0 and found["longer"]["people"]["value"] == pytest.approx(4 / 14)
    assert found["inconsistent"]["rate"] == 0.0 and found["position_bias"]["rate"] == 0.5
    assert list(found["agreement"]) == ["judge"]  # who is the longer response, and there is one label an item


@pytest.mark.parametrize(
    ("change", "settings", "problem"),
    [
        ({"who_wins": "neither"}, {}, "labels.jsonl:3: 'who_wins' is 'neither': say in `values` what it stands for"),
        (
            {},
            {"columns": {**COLUMNS, "label": "vote"}},
            "labels.jsonl:1: no column 'vote'; it has prompt, a, b, who_wins",
        ),
        ({}, {"columns": {"label": "who_wins"}}, "no responses for judge=longer to read"),
        ({}, {"judge": "verdicts", "verdicts": "modle"}, "labels.jsonl:1: no column 'modle'"),
        ({}, {"judge": "verdicts", "verdicts": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({}, {"annotators": "ann"}, "labels.jsonl: no item has a label of people; compare"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path, change, settings, problem):
    rows = responses(6)
    rows[2] |= change
    labels = rows_file(tmp_path / "labels.jsonl", rows)
    with pytest.raises(UserError) as error:
        results_of(tmp_path, **{"labels": labels, "columns": COLUMNS, "judge": "longer", **settings})
    assert problem in str(error.value)


def test_labels_of_0_and_1_are_refused_until_their_meaning_is_said(tmp_path):
    labels = rows_file(tmp_path / "labels.jsonl", [{**row, "who_wins": row["who_wins"] % 2} for row in responses(6)])
    settings = {"labels": labels, "columns": COLUMNS, "judge": "longer"}
    with pytest.raises(UserError, match="'who_wins' is 0: say in `values`"):
        results_of(tmp_path, **settings)
    found = results_of(tmp_path, values={"0": 0.0}, **settings)
    assert agreed(found["agreement"]["judge"]["with_ties"]) == (3, 6)


def test_verdicts_that_belong_to_other_items_are_refused(tmp_path):
    labels = rows_file(tmp_path / "labels.jsonl", responses(6))
    others = rows_file(tmp_path / "v.jsonl", [{"id": "x", "prompt": "q", "first": "u", "second": "v", "verdict": 1}])
    with pytest.raises(UserError, match="no item has a label of people and a verdict of"):
        results_of(tmp_path, labels=labels, columns=COLUMNS, judge="verdicts", verdicts=others)


# --- judges ---------------------------------------------------------------------------------------------------------


def test_a_judge_that_prefers_the_first_is_seen_in_verdicts_of_both_orders(tmp_path):
    rows = [{"id": f"{i}", "prompt": f"p{i}", "first": "x", "second": "y"} for i in range(20)]
    labels = rows_file(tmp_path / "labels.jsonl", [{**row, "verdict": i % 2} for i, row in enumerate(rows)])
    turned = [{**row, "first": "y", "second": "x"} for row in rows]
    verdicts = rows_file(tmp_path / "verdicts.jsonl", [{**row, "verdict": 1} for row in [*rows, *turned]])
    found = results_of(tmp_path, labels=labels, judge="verdicts", verdicts=verdicts)
    assert found["inconsistent"]["rate"] == found["position_bias"]["rate"] == 1.0
    assert found["inconsistent"]["n"] == 20
    assert agreed(found["agreement"]["judge"]["with_ties"]) == (0, 20)  # all merged verdicts are ties
    one_order = rows_file(tmp_path / "verdicts.jsonl", [{**row, "verdict": 1} for row in rows])
    found = results_of(tmp_path, labels=labels, judge="verdicts", verdicts=one_order)
    assert "position_bias" not in found and agreed(found["agreement"]["judge"]["with_ties"]) == (10, 20)


def test_contradictions_are_counted_among_items_of_both_orders(tmp_path):
    """[B-M4] Ten of 100 items are judged in both orders, each time for the first: ten of ten contradict."""
    rows = [{"id": f"{i}", "prompt": f"p{i}", "first": "x", "second": "y"} for i in range(100)]
    labels = rows_file(tmp_path / "labels.jsonl", [{**row, "verdict": i % 2} for i, row in enumerate(rows)])
    turned = [{**row, "first": "y", "second": "x"} for row in rows[:10]]
    mute = {**rows[10], "first": "y", "second": "x", "verdict": None}
    verdicts = rows_file(tmp_path / "verdicts.jsonl", [*({**row, "verdict": 1} for row in [*rows, *turned]), mute])
    found = results_of(tmp_path, labels=labels, judge="verdicts", verdicts=verdicts)
    assert [found[key]["rate"] for key in ("inconsistent", "position_bias")] == [1.0, 1.0]
    assert [found[key]["n"] for key in ("inconsistent", "position_bias")] == [10, 10]


@pytest.mark.parametrize(("labeled", "needed"), [(1, None), (4, None), (10, 20), (20, 10)])
def test_a_judge_who_is_right_on_few_labels_needs_more(tmp_path, capsys, labeled, needed):
    """[B-M10] With half a disagreement among n labels 1/(2n) of the 385 labels for 10 points is needed, and never 0."""
    rows = [{"id": f"{i}", "prompt": f"p{i}", "first": "x", "second": "yy", "verdict": i % 2} for i in range(labeled)]
    verdicts = rows_file(tmp_path / "verdicts.jsonl", rows)
    found = results_of(tmp_path, labels=rows_file(tmp_path / "labels.jsonl", rows), judge="verdicts", verdicts=verdicts)
    shown = capsys.readouterr().out
    assert found["labels"]["needed"] == needed and "takes 0 labels" not in shown
    assert ("worth is not known" in shown) == (needed is None)


def test_models_without_labels_are_named_and_lengths_shown_in_percent(tmp_path, capsys):
    """[B-L10, B-L11]"""
    rows = [
        {"id": f"{i}", "prompt": f"p{i}", "first": "x", "second": "y" * (1 + i % 30 // 2), "first_model": "a",
         "second_model": "b" if i < 30 else "c", "verdict": float(i % 30 == 29)}
        for i in range(60)
    ]  # fmt: skip
    settings = {"labels": rows_file(tmp_path / "labels.jsonl", rows[:30]), "judge": "verdicts"}
    found = results_of(tmp_path, **settings, verdicts=rows_file(tmp_path / "verdicts.jsonl", rows))
    shown = capsys.readouterr().out
    assert (list(found["pairs"]), found["unlabeled"]) == (["a against b"], ["a against c"])
    assert "No win rate of a against c" in shown
    judge = found["longer"]["judge"]
    assert judge["value"] == pytest.approx(27 / 28) and 0.8 < judge["low"] < judge["high"] == 1.0
    assert "96.4 %" in shown.replace("\n", " ")


def test_the_corrected_rate_of_models_uses_verdicts_on_items_without_labels(tmp_path):
    rows = [
        {"id": f"{i}", "prompt": f"p{i}", "first": "x", "second": "y", "first_model": "a", "second_model": "b"}
        for i in range(200)
    ]
    people = [float(i % 10 < 6) for i in range(200)]
    judge = [1.0 if i % 20 == 19 else vote for i, vote in enumerate(people)]  # 5 points too much
    judged = [{**row, "verdict": vote} for row, vote in zip(rows, judge, strict=True)]
    labeled = [{**row, "verdict": vote} for row, vote in zip(rows, people, strict=True)]
    labels = rows_file(tmp_path / "labels.jsonl", labeled[:60])
    verdicts = rows_file(tmp_path / "verdicts.jsonl", judged)
    found = results_of(tmp_path, labels=labels, judge="verdicts", verdicts=verdicts)["pairs"]["a against b"]
    assert (found["items"], found["labels"], found["judge"]["rate"]) == (200, 60, pytest.approx(0.65))
    for name in ("people", "corrected", "rogan_gladen"):
        assert found[name]["rate"] == pytest.approx(0.6, abs=0.005), name
    assert found["corrected"]["high"] - found["corrected"]["low"] < found["people"]["high"] - found["people"]["low"]
    assert found["label_worth"] > 2


def test_the_command_writes_results_a_page_and_sentences(tmp_path, capsys):
    settings = [f"output={tmp_path}/out", "judge=longer", "reward_model=null"]
    assert main(["evaluate", "judge", "evaluate/judge_tiny", *settings]) == 0
    shown = capsys.readouterr().out
    assert "The judge gives the verdict of most people on" in shown and "one label of people counts as" in shown
    page = (tmp_path / "out/judge.html").read_text(encoding="utf-8")
    assert "Krippendorff" in page and "http://" not in page and "<script" not in page
    assert json.loads((tmp_path / "out/results.json").read_text())["judge"] == "longer"


def test_a_config_that_cannot_be_meant_is_refused():
    assert "judge is missing" in refusal(JudgeEvalConfig, labels="x", output="y")
    assert "columns has no lable; it has annotator, cluster, first" in refusal(LabelColumns, columns={"lable": "x"})
    assert "is no regular expression" in refusal(LabelColumns, annotators="[")
    assert "verdicts must be a file" in refusal(JudgeEvalConfig, labels="x", output="y", judge="verdicts")

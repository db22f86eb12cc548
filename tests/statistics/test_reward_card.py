"""The reward model's card: each figure by hand, planted faults of scorers, and the files of a run."""

import json
import math
import re
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from alignment import load_reward_model
from alignment.adapters import LoRASpec
from alignment.algorithms.reward import EnsembleConfig
from alignment.data.config import DataConfig, SourceConfig
from alignment.data.rows.records import Prompt, Ranking
from alignment.errors import UserError
from alignment.evaluation import reward_accuracy
from alignment.evaluation.reward_accuracy import BestOfNConfig, RewardEvalConfig
from alignment.judging.responses import score_responses
from alignment.models.outputs import ValueOutput
from alignment.reward_model import RewardModel
from alignment.rewards.selection import best_of_n, kl_bound, powers_of_two
from alignment.statistics.reward_card import (
    ScoredGroup,
    accuracy_figures,
    best_of_n_curve,
    clustered_rate,
    k_way_figures,
    length_figures,
    pairs_of,
    reliability,
    score_changes,
)
from alignment.statistics.winrate import Z_95, paired_interval
from alignment.training import TrainingConfig
from tests.conftest import write_lines


def group(scores, ranks=(0, 1), lengths=(10, 10), prompt="p"):
    return ScoredGroup("s", prompt, scores, ranks, lengths)


# --- accuracy -------------------------------------------------------------------------------------------------------


def test_one_pair_per_prompt_has_tangos_interval():
    alone = clustered_rate(np.array([1.0, 1.0, 0.5, 0.0]), np.arange(4))
    assert alone is not None
    assert (alone["rate"], alone["wins"], alone["losses"], alone["ties"]) == (0.625, 2, 1, 1)
    assert (alone["low"], alone["high"]) == paired_interval(2, 1, 4)
    # two prompts, both pairs of the one right and of the other wrong: sums of deviations 1 and -1,
    # variance 2/1 * 2/16 = 1/4 = rate (1 - rate) / 1, so that four pairs say as much as one
    both = clustered_rate(np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1]))
    assert both is not None
    half = 0.5 * Z_95 / math.sqrt(1 + Z_95**2)
    assert (both["low"], both["high"]) == pytest.approx((0.5 - half, 0.5 + half))
    assert both["prompts"] == 2
    # all right: Wilson's interval of 2 prompts, 1 / (1 + z^2 / 2)
    sure = clustered_rate(np.ones(6), np.array([0, 0, 0, 1, 1, 1]))
    assert sure is not None
    assert sure["low"] == pytest.approx(1 / (1 + Z_95**2 / 2))
    assert clustered_rate(np.array([]), np.array([])) is None


def test_the_headline_takes_the_pairs_of_a_prompt_for_one_cluster():
    """[B-H7] 20 prompts of K = 9, all right or all wrong: as wide as in card.json, not as 720 pairs."""
    groups = [
        group([float(k if i % 2 else -k) for k in range(9)], range(9), [9] * 9, prompt=f"p{i}") for i in range(20)
    ]
    record = Ranking("p", responses=tuple("w" * (k + 1) for k in range(9)), ranks=tuple(range(9)), row_id="row")
    rows = [SimpleNamespace(record=record)] * 20
    headline, card = reward_accuracy._results(rows, groups), accuracy_figures(groups)
    keys = ("rate", "low", "high", "n")
    assert [headline["accuracy"][key] for key in keys] == [card["accuracy"][key] for key in keys]
    assert headline["accuracy"]["effective"] < 20 and headline["always_longer"]["effective"] == 20
    assert headline["chosen_shorter"]["clusters"] == 20


def test_scores_that_follow_from_length_give_a_slope_without_bounds():
    groups = [group((float(k + 1), 0.0), (0, 1), (100 * (k + 1), 0), prompt=f"p{k}") for k in range(5)]
    figures = length_figures(pairs_of(groups))
    assert figures["slope_per_100_tokens"] == pytest.approx(1) and figures["low"] is figures["high"] is None


def test_a_group_of_three_counts_its_ordered_pairs_and_what_is_picked():
    figures = accuracy_figures(
        [group((3.0, 1.0, 2.0), (0, 1, 2), (1, 2, 3)), group((0.0, 1.0, 1.0), (0, 0, 1), (1, 1, 1))]
    )
    # first: 3>1, 3>2 right, 1<2 wrong; second: 0<1 wrong, 1=1 tie
    accuracy = figures["accuracy"]
    assert (accuracy["wins"], accuracy["losses"], accuracy["ties"]) == (2, 2, 1)
    assert figures["margin"]["mean"] == pytest.approx((2 + 1 - 1 - 1 + 0) / 5)
    assert sum(figures["margin"]["histogram"]["counts"]) == 5
    k_way = figures["k_way"]
    assert k_way["groups"] == 2
    assert k_way["top_1"] == pytest.approx(
        (1 + 0.5) / 2
    )  # of the two highest scores of the second one is among the best
    assert k_way["top_1_by_chance"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert figures["always_longer"]["losses"] == 3


def test_the_share_of_best_picks_has_wilsons_interval_over_prompts():
    sure = k_way_figures([group((3.0, 2.0, 1.0), (0, 1, 2), (1, 1, 1), prompt=str(number)) for number in range(5)])
    assert sure is not None and (sure["top_1"], sure["high"]) == (1.0, pytest.approx(1.0))
    assert sure["low"] == pytest.approx(1 / (1 + Z_95**2 / 5))  # 0.566 of 5 of 5
    again = k_way_figures([group((3.0, 2.0, 1.0), (0, 1, 2), (1, 1, 1))] * 5)  # one prompt: no more than one trial
    assert again is not None and again["low"] == pytest.approx(1 / (1 + Z_95**2))


# --- reliability ----------------------------------------------------------------------------------------------------


def test_calibration_by_hand():
    three_of_four = math.log(3) * np.array([1.0, 1.0, 1.0, -1.0])  # sigmoid(log 3) = 3/4
    fair = reliability(three_of_four)
    assert fair["ece"] == pytest.approx(0, abs=1e-12)
    assert fair["brier"] == pytest.approx((3 * (1 / 4) ** 2 + (3 / 4) ** 2) / 4)
    mixed = reliability(np.concatenate([three_of_four, math.log(9) * np.array([1.0, -1.0])]))  # 9/10, observed 1/2
    assert mixed["ece"] == pytest.approx(2 / 6 * 0.4)
    filled = [row for row in mixed["bins"] if row["pairs"]]
    assert [(row["pairs"], row["observed"]) for row in filled] == [(4, 0.75), (2, 0.5)]
    assert [row["predicted"] for row in filled] == pytest.approx([0.75, 0.9])
    assert len(mixed["bins"]) == 10
    assert reliability(np.zeros(3))["brier"] == 0.25  # ties: half


# --- length ---------------------------------------------------------------------------------------------------------


def test_the_slope_on_length_by_hand():
    pairs = pairs_of([group((1.0, 0.0), lengths=(200, 100)), group((3.0, 0.0), lengths=(300, 100), prompt="q")])
    figures = length_figures(pairs)  # x = 1, 2 and y = 1, 3: b = (1 + 6) / (1 + 4), residuals -0.4 and 0.2
    assert figures["slope_per_100_tokens"] == pytest.approx(1.4)
    assert figures["high"] - 1.4 == pytest.approx(Z_95 * math.sqrt(2 * (0.4**2 + 0.4**2)) / 5)
    assert figures["correlation"] == pytest.approx(7 / math.sqrt(5 * 10))
    assert figures["chosen_longer"]["rate"] == 1
    assert figures["chosen_shorter"] is None
    assert "equally long" in length_figures(pairs_of([group((1.0, 0.0))]))["slope_missing"]


@pytest.mark.parametrize("others", [[], [group((2.0, 0.0), prompt="q")]])  # the other's responses are equally long
def test_one_prompt_gives_a_slope_and_no_interval(others):
    figures = length_figures(pairs_of([group((3.0, 1.0, 0.0), (0, 1, 2), (300, 100, 200)), *others]))
    assert figures["slope_per_100_tokens"] == pytest.approx((2 * 2 + 3 * 1 - 1 * 1) / 6)
    assert figures["low"] is None and figures["high"] is None


# --- best of n ------------------------------------------------------------------------------------------------------


def test_best_of_n_is_the_mean_over_all_subsets():
    assert best_of_n([1, 2, 3], [10, 20, 60], 1) == pytest.approx(30)
    assert best_of_n([1, 2, 3], [10, 20, 60], 2) == pytest.approx((20 + 60 + 60) / 3)
    assert best_of_n([1, 1], [0, 1], 2) == 0.5  # equal scores in a random order
    rng = np.random.default_rng(0)
    scores, gold = rng.integers(0, 5, 7).astype(float), rng.normal(size=7)
    for n in range(1, 8):
        picked = []
        for subset in combinations(range(7), n):
            best = max(scores[i] for i in subset)
            picked.append(np.mean([gold[i] for i in subset if scores[i] == best]))
        # a subset's own ties are drawn from the whole tie group with equal chances, so that the means are equal
        assert best_of_n(scores, gold, n) == pytest.approx(np.mean(picked))
    with pytest.raises(ValueError, match="between 1 and the 2 responses"):
        best_of_n([1, 2], [1, 2], 3)


def test_kl_bound_and_curve():
    assert kl_bound(1) == 0
    assert kl_bound(4) == pytest.approx(math.log(4) - 3 / 4)
    assert powers_of_two(16) == [1, 2, 4, 8, 16]
    assert powers_of_two(6) == [1, 2, 4]
    rng = np.random.default_rng(1)
    gold = rng.normal(size=(200, 8))
    good = best_of_n_curve((gold + rng.normal(size=gold.shape)).tolist(), gold.tolist(), powers_of_two(8))
    blind = best_of_n_curve(rng.normal(size=gold.shape).tolist(), gold.tolist(), powers_of_two(8))
    assert [point["n"] for point in good] == [1, 2, 4, 8]
    assert all(one["gold"] < two["gold"] for one, two in pairwise(good))
    assert good[-1]["gain_low"] > 0.7
    assert (
        good[-1]["low"] < 1.4236 / math.sqrt(2) < good[-1]["high"]
    )  # the mean largest of 8 normals, seen through noise
    assert blind[-1]["gain_low"] < 0 < blind[-1]["gain_high"]
    [short] = best_of_n_curve([[1, 2, 3]], [[0, 1, 2]], [3])
    assert (short["prompts"], short["gold"], short["gain"]) == (1, 2, 1)
    assert [short[key] for key in ("low", "high", "gain_low", "gain_high")] == [None] * 4  # of one prompt


# --- robustness -----------------------------------------------------------------------------------------------------


def test_changes_by_hand():
    found = score_changes(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 1.0, 2.0]), [(1, 0), (2, 1)])
    assert found["largest"] == 1.5
    assert found["mean"] == 0.5
    assert found["order_changes"] == 0.5
    assert found["largest_in_deviations"] == pytest.approx(1.5 / math.sqrt(2 / 3))


class PlantedScorer(nn.Module):
    """Scores a text by its length; a padded call by the width of the rectangle, which is the fault."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.01))
        self.spec = SimpleNamespace(max_positions=10_000)

    def virtual_tokens(self):
        return 0

    def forward(self, input_ids=None, attention_mask=None, *, batch=None):
        if batch is not None:
            return ValueOutput(self.weight * (batch.positions + 1))
        rows, width = input_ids.shape
        return ValueOutput(input_ids * 0.0, torch.full((rows, 1), 0.01 * width))


def test_a_planted_scorer_of_length_and_padding_shows_in_the_card(world, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(reward_accuracy, "load_reward_model", lambda *_, **__: RewardModel(PlantedScorer(), tokenizer))
    config = RewardEvalConfig("planted", DataConfig(train=world["comparisons"]), str(tmp_path), dtypes=[])
    results = json.loads(reward_accuracy.run(config).read_text())
    card = json.loads((tmp_path / "card.json").read_text())
    assert results["chosen_shorter"]["rate"] == 0
    assert 0 < results["chosen_shorter"]["n"] < results["accuracy"]["n"]
    length, forms = card["length"]["all"], card["robustness"]["forms"]
    assert length["slope_per_100_tokens"] == pytest.approx(1, abs=1e-4)
    assert length["correlation"] == pytest.approx(1)
    assert length["always_longer"]["rate"] == card["accuracy"]["all"]["accuracy"]["rate"]
    assert forms["padded left"]["largest"] > 0.05
    assert forms["padded right"]["order_changes"] > 0
    assert forms["alone"]["largest"] == 0


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_writes_the_card_of_several_sources_and_a_curve(stage, world, tmp_path):
    rankings = write_lines(
        tmp_path / "rankings.jsonl",
        [
            {"prompt": "Guest: hello\nConcierge:", "responses": [" Hello.", " Go.", " Welcome to us all."], "scores": [3, 1, 3]},
            {"prompt": "Guest: pool?\nConcierge:", "responses": [" It is up.", " No.", " Maybe so."], "scores": [5, 2, 3]},
        ],
    )  # fmt: skip
    config = RewardEvalConfig(
        str(stage("reward") / "model"),
        DataConfig(train=[SourceConfig(world["comparisons"], name="hotel"), SourceConfig(rankings, name="ranked")], max_length=256),
        str(tmp_path / "out"),
        robustness_rows=6,
        best_of_n=BestOfNConfig(
            str(stage("sft") / "model"), DataConfig(train=world["prompts_eval"], max_length=200), "gold", samples=4, max_new_tokens=12
        ),
    )  # fmt: skip
    results = json.loads(reward_accuracy.run(config).read_text())
    card, page = (tmp_path / "out" / name for name in (results["card"], results["page"]))
    found, html = json.loads(card.read_text()), page.read_text()
    assert set(results) == {
        "accuracy",
        "always_longer",
        "chosen_shorter",
        "margin",
        "score",
        "left_out",
        "card",
        "page",
    }
    assert results["accuracy"]["n"] == 24 + 2 + 3
    assert {name: part["accuracy"]["n"] for name, part in found["accuracy"].items()} == {
        "all": 29,
        "hotel": 24,
        "ranked": 5,
    }
    assert found["accuracy"]["hotel"]["k_way"] is None
    assert found["accuracy"]["ranked"]["k_way"]["groups"] == 2
    largest = {form: figures["largest"] for form, figures in found["robustness"]["forms"].items()}
    assert largest.pop("bfloat16") > 1e-4
    assert set(largest) == {"alone", "padded right", "padded left"} and max(largest.values()) < 1e-4
    assert [point["n"] for point in found["best_of_n"]["curve"]] == [1, 2, 4]
    assert 0 <= found["best_of_n"]["ended_share"] <= 1
    assert all(-6 <= point["gold"] <= 4 and point["prompts"] == 4 for point in found["best_of_n"]["curve"])
    assert not re.search(r"https?:|//\w|@import|<link|<iframe|<script", html)
    for text in ("hotel", "ranked", "padded on the left", "Best of n", "<svg"):
        assert text in html


@pytest.mark.parametrize("kind", ["heads", "adapters"])
def test_padded_calls_of_every_member_of_an_ensemble_give_its_scores(kind, stage, make_stage, world, tmp_path):
    run, trained = make_stage(
        "reward",
        str(stage("sft") / "model"),
        tmp_path / "run",
        ensemble=EnsembleConfig(3, kind),
        adapter=LoRASpec(rank=2, alpha=4.0) if kind == "adapters" else None,
        training=TrainingConfig(batch_size=8, max_steps=2),
    )
    data = DataConfig(train=world["comparisons_heldout"], max_length=256)
    config = RewardEvalConfig(str(run(trained)), data, str(tmp_path / "out"), robustness_rows=4, dtypes=[])
    card = json.loads((reward_accuracy.run(config).parent / "card.json").read_text())
    assert max(form["largest"] for form in card["robustness"]["forms"].values()) < 1e-4


def test_pairs_of_one_ranking_are_clustered(stage, tmp_path):
    rows = write_lines(
        tmp_path / "rows.jsonl",
        [{"prompt": f"Guest {i}:", "responses": [" a b", " c", " d e f"], "ranking": [0, 1, 2]} for i in range(4)],
    )
    model, output = str(stage("reward") / "model"), str(tmp_path / "out")
    reward_accuracy.run(RewardEvalConfig(model, DataConfig(train=rows), output, robustness_rows=0))
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert (card["best_of_n"], card["robustness"]) == ({}, {})
    assert card["accuracy"]["all"]["accuracy"]["prompts"] == 4
    assert "clustered" in card["accuracy"]["all"]["accuracy"]["interval"]
    page = (tmp_path / "out" / "card.html").read_text()
    assert "Best of n" not in page and "Padding" not in page


def test_scores_that_are_not_finite_are_refused_by_row(stage, tmp_path, monkeypatch):
    """[B-H1] An infinite score beats every other one."""
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "Guest:", "chosen": " a", "rejected": " b"}])
    config = RewardEvalConfig(str(stage("reward") / "model"), DataConfig(train=rows), str(tmp_path / "out"))
    score = reward_accuracy.score_encoded
    monkeypatch.setattr(reward_accuracy, "score_encoded", lambda *given: score(*given) + float("inf"))
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*not finite"):
        reward_accuracy.run(config)
    model = load_reward_model(config.reward_model)
    monkeypatch.setattr(type(model), "score_ids", lambda self, ids: torch.full((len(ids),), float("nan")))
    with pytest.raises(UserError, match=r"row 3: .*not finite"):
        score_responses(model, [Prompt("Guest:", {}, "row 3")], [(0, " a", None, True)], 32)


def test_bad_rows_of_all_sources_come_at_once(stage, tmp_path):
    sources = [
        SourceConfig(write_lines(tmp_path / f"{name}.jsonl", [{"prompt": "Q:", "chosen": chosen, "rejected": " b"}]))
        for name, chosen in (("one", 1), ("two", 2))
    ]
    config = RewardEvalConfig(str(stage("reward") / "model"), DataConfig(train=sources), str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"(?s)one\.jsonl:1.*two\.jsonl:1"):
        reward_accuracy.run(config)

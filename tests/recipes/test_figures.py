"""The recipe `figures`: labelers by hand, votes, the order of curves from planted votes, one page; slow: every stage, cut short."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from alignment.config.load import packaged_folder
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.hotel_world.gold import preference
from alignment.hotel_world.grammar import best_reply, is_prompt, parse_prompt
from alignment.pipeline.run import plan, run_recipe
from alignment.pipeline.stages import load_stage_file
from tests.conftest import read_lines, write_lines

FOLDER = packaged_folder("recipes") / "figures"
labelers: Any = load_stage_file(FOLDER / "labelers.py")
votes: Any = load_stage_file(FOLDER / "votes.py")
figures: Any = load_stage_file(FOLDER / "figures.py")

RUDE = " Read the sign, you oaf."
SIZES, METHODS, PANELS = ("1", "2"), ("PPO", "SFT", "base"), ("labelers", "held-out labelers")
TINY = [
    "matrix.seed=[3]", "world.rows={pretrain: 60, pretrain_heldout: 5, demonstrations: 32, comparisons: 40, "
    "comparisons_heldout: 8, prompts: 16, prompts_eval: 8}",
    "pretrain_*.vocabulary=600", "pretrain_*.training.max_steps=2", "sft_*.training.max_steps=1",
    "reward_*.training.max_steps=1", "ppo_*.training.max_steps=1", "ppo_*.training.batch_size=4", "ppo_*.max_new_tokens=6",
    "ppo_ptx_*.pretrain_batch_size=2", "dpo_*.training.max_steps=1", "*evaluation_*.max_new_tokens=6",
    *(f"pretrain_{size}_*.model.{key}" for size in (16, 32, 64, 128)
      for key in ("hidden_size=16", "intermediate_size=16", "num_hidden_layers=1", "num_attention_heads=2", "num_key_value_heads=2")),
]  # fmt: skip


def panel(**changes):
    return labelers.PanelConfig(**{"count": 3, "spread": 0.3, "length_spread": 0.02, "seed": 1} | changes)


def world_rows(world, name):
    return read_lines(Path(world[name]))


def test_preference_by_hand():
    one, other = labelers.Reply((1, 1, 1, 0.5), 12), labelers.Reply((0, 1, 1, 1), 8)
    taste = labelers.Labeler([2.0, 1.0, 1.0, 1.0], 0.5, 0.1)
    lead = (2 * 1 - 0.5) / 0.5 + 0.1 * 4  # 3.4
    assert taste.preference(one, other) == pytest.approx(1 / (1 + math.exp(-lead)))
    assert taste.preference(one, other) + taste.preference(other, one) == pytest.approx(1)


def test_labelers_without_spread_are_the_worlds_labeler(world):
    prompt = world_rows(world, "prompts_eval")[0]["prompt"]
    texts = best_reply(prompt), RUDE
    replies = [labelers.read_reply(prompt, text) for text in texts]
    same, again = labelers.draw_labelers(panel(count=2, spread=0, length_spread=0))
    assert same == again and same.preference(*replies) == pytest.approx(preference(prompt, *texts))
    assert len(set(map(str, labelers.draw_labelers(panel())))) == 3
    assert labelers.draw_labelers(panel()) != labelers.draw_labelers(panel(seed=2))


def test_agreement_by_hand():
    # of three people two pairs with one sure each: 0.9 * 1 + 0.1 * 0, twice (1, 0.9), and 0.9^2 + 0.1^2 once
    assert labelers.agreement([1.0, 0.9, 0.9]) == pytest.approx((0.9 + 0.9 + 0.82) / 3)
    assert labelers.agreement([0.5, 0.9]) == 0.5 and labelers.agreement([0.3]) == 1


def test_labels_do_not_depend_on_those_of_the_file(world, tmp_path):
    rows = world_rows(world, "comparisons")
    for name, swapped in (("a", False), ("b", True)):
        turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} if swapped else row for row in rows]
        write_lines(tmp_path / f"{name}.jsonl", turned)
    found = []
    for name in "ab":
        config = labelers.LabelConfig(
            {"x": str(tmp_path / f"{name}.jsonl")}, {"p": panel(), "q": panel(seed=2)}, str(tmp_path / name)
        )
        found.append(read_lines(labelers.label(config) / "x.jsonl"))
    assert found[0] == found[1] and {row["labeler"] for row in found[0]} <= {0, 1, 2}
    results = json.loads((tmp_path / "a/results.json").read_text())["x"]
    assert results["comparisons"] == len(rows) and 0.5 < results["p"] < 1 and results["p"] != results["q"]
    (tmp_path / "c.jsonl").write_text('{"prompt": "Two and two?", "chosen": "4", "rejected": "5"}\n')
    with pytest.raises(UserError, match=r"c.jsonl.*no comparison of the generated hotel world"):
        labelers.label(labelers.LabelConfig({"x": str(tmp_path / "c.jsonl")}, {"p": panel()}, str(tmp_path / "c")))


def test_an_example_stands_before_the_same_request(world, tmp_path):
    config = votes.FewShotConfig(DataConfig(train=str(world["prompts_eval"]), max_length=256), str(tmp_path))
    made = [row["prompt"] for row in read_lines(votes.few_shot(config) / "prompts.jsonl")]
    bare = [row["prompt"] for row in world_rows(world, "prompts_eval")]
    assert [parse_prompt(text) for text in made] == [parse_prompt(text) for text in bare]
    assert all(is_prompt(text) and text.count("\nGuest ") == 2 for text in made)
    assert not any(text.split("\nConcierge:")[1].strip() in text.split("\nConcierge:")[0] for text in made)


def write_responses(path, prompts, texts):
    rows = [
        {"id": str(i), "prompt": prompt, "responses": {name: own[i] for name, own in texts.items()}}
        for i, prompt in enumerate(prompts)
    ]
    write_lines(path, rows)
    return str(path)


def judge_config(world, tmp_path, **changes):
    labelers.label(labelers.LabelConfig({}, {"p": panel(count=10), "q": panel(count=10, seed=2)}, str(tmp_path)))
    prompts = [row["prompt"] for row in world_rows(world, "prompts_eval")]
    good, bad = [best_reply(prompt) for prompt in prompts], [RUDE] * len(prompts)
    files = {
        "": write_responses(tmp_path / "a.jsonl", prompts, {"SFT": bad, "PPO": good}),
        "few ": write_responses(tmp_path / "b.jsonl", prompts, {"base": bad}),
    }
    settings = {"responses": files, "baseline": "SFT", "panels": str(tmp_path / "panels.json")} | changes
    return votes.JudgeConfig(**settings, labelers=str(FOLDER / "labelers.py"), output=str(tmp_path / "votes"))


def test_votes_of_every_panel_on_every_policy(world, tmp_path):
    results = json.loads(votes.judge(judge_config(world, tmp_path)).read_text())
    own = json.loads((tmp_path / "votes/votes.json").read_text())
    assert list(own) == ["SFT", "PPO", "few base"] and list(own["PPO"]) == ["gold", "p", "q"]
    assert set(own["SFT"]["p"]) == set(own["few base"]["q"]) == {0.5}  # equal texts
    assert all(results["win_rate"][each]["PPO"] == fmean(own["PPO"][each]) > 0.9 for each in "pq")
    assert own["PPO"]["gold"][0] > 3 > own["SFT"]["gold"][0]


def test_prompts_that_do_not_match_are_refused(world, tmp_path):
    config = judge_config(world, tmp_path)
    rows = read_lines(tmp_path / "b.jsonl")
    write_lines(tmp_path / "b.jsonl", rows[::-1])
    with pytest.raises(UserError, match=r"b.jsonl: its prompts do not ask the same"):
        votes.judge(config)
    with pytest.raises(UserError, match="baseline: SFD has no responses"):
        votes.judge(judge_config(world, tmp_path, baseline="SFD"))


# The figures


def planted(tmp_path, rates, seeds=2, prompts=40):
    """Votes and evaluations of policies with these rates and gold rewards, and their KL."""
    rng, paths = np.random.default_rng(0), ([], [])
    for seed in range(seeds):
        own = {
            name: {"gold": (gold + 0.1 * rng.standard_normal(prompts)).tolist()}
            | {each: rng.binomial(10, rate, prompts).__truediv__(10).tolist() for each in PANELS}
            for name, (rate, gold, _) in rates.items()
        }
        models = {name: {} if name == "SFT 2" else {"kl": kl} for name, (_, _, kl) in rates.items()}
        for kind, content in enumerate((own, {"models": models})):
            path = tmp_path / f"{kind}-{seed}.json"
            path.write_text(json.dumps(content))
            paths[kind].append(str(path))
    return paths


RATES = {  # win rate, gold, KL
    "PPO 1": (0.7, 1, 1), "PPO 2": (0.9, 2, 2.0), "SFT 1": (0.3, 0, 0), "SFT 2": (0.5, 0, 0), "base 1": (0.2, 0, 0),
    "base 2": (0.2, 0, 0), "a": (0.5, 1.5, 0.5), "b": (0.5, 2.5, 2.0), "c": (0.5, 1.0, 4.0),
}  # fmt: skip


def figures_config(tmp_path, checkpoints, rates=RATES, **changes):
    drawn, evaluations = planted(tmp_path, rates)
    settings = {
        "votes": drawn, "evaluations": evaluations, "baseline": "SFT 2", "methods": list(METHODS), "panels": list(PANELS),
        "sizes": {size: [checkpoints["gpt2"]] for size in SIZES}, "alike": [("PPO", "SFT")],
        "above": [("SFT", "base"), ("PPO 1", "base 2")], "frontiers": {"DPO": ["c", "b", "a"], "PPO": ["PPO 2"]},
    } | changes  # fmt: skip
    return figures.FiguresConfig(output=str(tmp_path / "figures"), **settings)


def test_the_order_of_planted_curves_is_told(tmp_path, checkpoints):
    found = json.loads(figures.run(figures_config(tmp_path, checkpoints)).read_text())
    held = {claim: own["labelers"]["holds"] for claim, own in found["order"].items()}
    assert held == {
        "PPO 1 ~ SFT 1": "no", "PPO 2 ~ SFT 2": "no", "SFT 1 > base 1": "yes", "SFT 2 > base 2": "yes",
        "PPO 1 > base 2": "yes", "PPO 2 > PPO 1": "yes", "SFT 2 > SFT 1": "yes", "base 2 > base 1": "open",
    }  # fmt: skip
    # DPO goes from 0 over 1.5 at 0.5 nats to 2.5 at 2 nats, PPO straight to 2 at 2 nats: area over 2 nats 3.375 - 2
    assert found["frontiers"]["DPO over PPO"]["mean"] == pytest.approx((0.375 + 1.5 * 2 - 2) / 2, abs=0.05)
    assert found["frontiers"]["DPO over PPO"]["to_kl"] == 2 and found["frontiers"]["DPO over PPO"]["holds"] == "yes"
    assert found["win_rate"]["labelers"]["PPO 2"]["mean"] == pytest.approx(0.9, abs=0.03)
    page = (tmp_path / "figures/report.html").read_text(encoding="utf-8")
    assert (
        "3 of 5 published relations hold (1 of 2 at size 1, 1 of 2 at size 2); contradicted: PPO 1 ~ SFT 1 (+" in page
    )
    assert page.count("<svg") == 3 and "http" not in page.replace("http-equiv", "")
    assert found["sentences"][-1].startswith("Reward over KL: DPO is above PPO: +0.6")


def test_an_estimate_by_hand():
    # prompts' means over two seeds: 0.5, 1, 0: mean 0.5, deviation 0.5, standard error 0.5 / sqrt(3)
    found = figures.estimate(np.array([[0.0, 1, 0], [1, 1, 0]]))
    assert found["mean"] == 0.5 and found["high"] == pytest.approx(0.5 + 1.96 * 0.5 / math.sqrt(3), abs=1e-4)
    assert found["seeds"] == pytest.approx([1 / 3, 2 / 3])


def test_intervals_cover(tmp_path):
    """95 % intervals hold the truth about 95 % of the time when the votes on one prompt are alike."""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(600):
        prompts = rng.beta(2, 2, 100)  # of a prompt: how likely a vote on it is for us, for all seeds and labelers
        found = figures.estimate(rng.binomial(10, np.stack([prompts] * 3)) / 10)
        hits += found["low"] < 0.5 < found["high"]
    assert 0.93 < hits / 600 < 0.97


def test_a_chart_needs_no_single_runs():
    svg = figures.estimate_chart(
        "x", [figures.Estimates("only", [1e4, 1e5], [0.2, 0.4], [(0.1, 0.3), (0.3, 0.5)])], "x", "y", counts=True
    )
    assert "30k" in svg and "40 %" in svg and "legend" not in svg  # one curve needs none


def test_policies_without_votes_are_named(tmp_path, checkpoints):
    with pytest.raises(UserError, match=r"0-0\.json: has no votes on nobody"):
        figures.run(figures_config(tmp_path, checkpoints, frontiers={"DPO": ["nobody"], "PPO": ["PPO 2"]}))


def test_seeds_are_a_matter_of_one_setting(tmp_path):
    names = [stage.name for stage in plan("figures", tmp_path, ["matrix.seed=[5]"])[1]]
    assert "ppo_32_5" in names and "ppo_32_0" not in names and names[-1] == "figures"
    (last,) = (stage for stage in plan("figures", tmp_path, ["matrix.seed=[5, 6]"])[1] if stage.name == "figures")
    assert last.config.votes == [str(tmp_path / f"votes_{seed}/votes.json") for seed in (5, 6)]


@pytest.mark.slow
def test_every_stage_runs(tmp_path):
    run_recipe("figures", tmp_path, TINY)
    found = json.loads((tmp_path / "figures/results.json").read_text())
    assert found["seeds"] == 1 and found["prompts"] == 8 and (tmp_path / "figures/report.html").is_file()

"""Evaluations from config to results.json, on tiny checkpoints."""

import json
import math
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from alignment import cli
from alignment.config.load import load_config
from alignment.data.config import DataConfig
from alignment.data.rows.records import Prompt
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError
from alignment.evaluation import EndpointConfig, JudgeConfig, build_judge, judge_run, ratings_run, read_judgments
from alignment.evaluation import win_rate_run as evaluation
from alignment.evaluation.judge_run import JudgeEvalConfig
from alignment.evaluation.ratings_run import RatingsConfig
from alignment.evaluation.win_rate_run import BestOfConfig, WinRateConfig
from alignment.generation import Generation
from alignment.hotel_world.datasets import generate_rows
from alignment.judging import responses as sampling
from alignment.judging.faults import parent_warnings
from alignment.models.build import build_language_model, build_scalar_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.models.weights_config import WeightsConfig
from alignment.reports.html import format_cell
from alignment.reports.recipe_report import summary_rows
from alignment.reward_model import RewardModel, load_reward_model
from alignment.training.run.directory import lock
from tests.conftest import lines_file, read_lines
from tests.stub_server import serving

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import spread


@pytest.fixture
def config_of(tmp_path, checkpoints, stage):
    """A comparison on one short and one very long prompt, the latter cut to so many tokens."""
    path = tmp_path / "prompts.jsonl"
    lines_file(path, [{"prompt": text} for text in ("Guest:", "hello guest " * 400)])

    def make(max_length: int, **changes) -> WinRateConfig:
        settings = {
            "models": {"one": checkpoints["llama"], "two": checkpoints["gpt2"]},
            "baseline": "one",
            "judge": "reward_model",
            "reward_model": str(stage("reward") / "model"),
            "data": DataConfig(train=str(path), max_length=max_length),
            "output": str(tmp_path / "out"),
            "max_new_tokens": 4,
        }
        return WinRateConfig(**{**settings, **changes})

    return make


def results_of(config):
    """What the evaluation writes."""
    return json.loads(evaluation.run(config).read_text())


def faults_of_judges(results):
    """The warnings that are not about responses cut at the few tokens of these tests."""
    return [warning for warning in results["warnings"] if "max_new_tokens" not in warning]


def test_prompts_longer_than_the_models_are_cut_for_policies_reference_and_judge(config_of):
    results = results_of(config_of(64))
    assert results["models"]["two"]["win_rate"]["n"] == 2
    assert {"kl", "proxy"} <= results["models"]["two"].keys()


def test_without_room_for_the_response_the_way_out_is_said(config_of):
    with pytest.raises(UserError, match=r"1 of 2 .* is .*jsonl:2 .*lower max_new_tokens or shorten the prompts"):
        evaluation.run(config_of(1024))


# --- several seeds --------------------------------------------------------------------------------------------------


def test_a_list_of_checkpoints_is_judged_seed_by_seed_and_told_as_one(config_of, checkpoints, tmp_path, capsys):
    """The figures of each seed are those of an evaluation of its own, and those of `scripts/spread.py` over the two."""
    seeds = {"a": checkpoints["gpt2"], "b": checkpoints["llama"]}
    alone = []
    for run, source in seeds.items():
        models = {"one": checkpoints["llama"], "two": source}
        alone.append(
            results_of(config_of(64, models=models, output=str(tmp_path / run / "evaluation")))["models"]["two"]
        )
        (tmp_path / run / "stages.json").write_text('{"evaluation": {}}')
    config = config_of(64, models={"one": checkpoints["llama"], "two": list(seeds.values())})
    results = results_of(config)
    two = results["models"]["two"]
    rate = two["win_rate"]
    assert list(results["models"]) == ["one", "two"] and set(results["samples"][0]["responses"]) == {"one", "two"}
    assert rate["rates"] == [own["win_rate"]["rate"] for own in alone]
    assert (rate["seeds"], rate["prompts"], rate["n"]) == (2, 2, 4)
    assert [own["kl"] for own in two["seeds"]] == [own["kl"] for own in alone]
    assert two["kl"] == pytest.approx(sum(own["kl"] for own in alone) / 2)
    judged = {row.first_model for row in read_judgments(tmp_path / "out/judgments.jsonl")}
    assert judged == {"one", "two, seed 1", "two, seed 2"}
    assert summary_rows(results)[1]["of each seed, %"] == ", ".join(f"{100 * share:.1f}" for share in rate["rates"])
    joint = spread.seeds_rates([tmp_path / run for run in seeds])["evaluation", "two"]
    assert asdict(joint) == {key: rate[key] for key in asdict(joint)}
    assert evaluation.run(config).exists() and "nothing is sampled" in capsys.readouterr().err


def test_seeds_meet_those_of_the_baseline_in_their_order(config_of, checkpoints):
    """The same checkpoints in the same order say the same on every prompt; in another order they do not."""
    seeds = [checkpoints["gpt2"], checkpoints["llama"]]
    best = {"best": BestOfConfig("two", config_of(64).reward_model, samples=2)}
    config = config_of(64, models={"one": seeds, "two": seeds, "single": seeds[0]}, best_of=best)
    models = results_of(config)["models"]
    assert models["two"]["win_rate"]["ties"] == 4 and models["two"]["win_rate"]["rates"] == [0.5, 0.5]
    assert models["two"]["kl"] == pytest.approx(0, abs=1e-5)
    assert models["single"]["win_rate"]["rates"][0] == 0.5 and models["single"]["seeds"][1]["kl"] != 0
    assert models["best"]["win_rate"]["seeds"] == 2 and "kl" not in models["one"]


def test_people_judge_the_responses_of_every_seed(config_of, checkpoints, tmp_path):
    form = tmp_path / "form.jsonl"
    seeds = [checkpoints["gpt2"], checkpoints["llama"]]
    models = {"one": checkpoints["llama"], "two": seeds}
    config = config_of(64, judge="verdicts", reward_model=None, verdicts=str(form), models=models)
    with pytest.raises(evaluation.FormWritten):
        evaluation.run(config)
    assert len(read_lines(form)) == 2  # the second seed's responses are the baseline's own
    fill_in(form, lambda row: 1)
    rate = results_of(config)["models"]["two"]["win_rate"]
    assert rate["rates"][1] == 0.5 and rate["prompts"] == 2


def test_lists_of_different_lengths_are_refused(config_of, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("output: out\nmodels: {a: [x, y], b: [x]}\nbaseline: a\njudge: longer\ndata: {train: rows.jsonl}\n")
    with pytest.raises(UserError, match=r"mine\.yaml:2: models: .*different lengths"):
        load_config(WinRateConfig, str(path))
    single = load_config(WinRateConfig, str(path), ["models.a=[x]"]).by_checkpoint()
    assert (single.baseline, single.models) == ("a, seed 1", {"a, seed 1": "x", "b, seed 1": "x"})


# --- the reward model as the judge ----------------------------------------------------------------------------------


def test_every_response_is_scored_once_for_mean_score_and_verdicts_alike(config_of, checkpoints, monkeypatch):
    scored = []
    score_ids = RewardModel.score_ids

    def spy(self, documents, *rest):
        scored.extend(map(tuple, documents))
        return score_ids(self, documents, *rest)

    monkeypatch.setattr(RewardModel, "score_ids", spy)
    models = {"one": checkpoints["llama"], "again": checkpoints["llama"], "two": checkpoints["gpt2"]}
    results = results_of(config_of(64, models=models))["models"]
    # Two prompts; the models "one" and "again" give the same responses, so there are four to score.
    assert len(scored) == len(set(scored)) == 4
    assert results["again"]["proxy"] == results["one"]["proxy"] != results["two"]["proxy"]
    assert results["again"]["win_rate"]["ties"] == 2


@pytest.fixture
def foreign(tmp_path):
    """Directories of a language model and a reward model with a tokenizer of their own."""
    other = train_bpe(["hello guest, where is the spa?"] * 20, 280)
    directories = []
    for name, build in (("policy", build_language_model), ("judge", build_scalar_model)):
        torch.manual_seed(0)
        model = build({
            "model_type": "llama", "vocab_size": len(other), "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 320, "eos_token_id": 1,
        })  # fmt: skip
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        directories.append(tmp_path / name)
        directories[-1].mkdir()
        save_model(model, directories[-1])
        save_tokenizer(other, directories[-1])
    return [str(directory) for directory in directories]


@pytest.mark.parametrize("judge", ["own", "foreign"])
def test_a_response_cut_at_its_length_is_judged_without_an_end_token(judge, config_of, foreign, monkeypatch):
    """With the policies' tokenizer the judge reads the very ids that were drawn, else the text."""
    documents, drawn = [], []
    score_ids, decode = RewardModel.score_ids, sampling.decode_responses
    monkeypatch.setattr(
        RewardModel, "score_ids", lambda self, rows, *a: documents.extend(rows) or score_ids(self, rows, *a)
    )
    monkeypatch.setattr(sampling, "decode_responses", lambda *a, **k: drawn.append(decode(*a, **k)) or drawn[-1])
    config = config_of(64) if judge == "own" else config_of(64, reward_model=foreign[1])
    evaluation.run(config)
    ended = [end for answer in drawn for end in answer.ended]
    assert not any(ended) and all(document[-1] != 1 for document in documents)  # 1 is the end token of both tokenizers
    assert len(documents) == len(ended) == 4
    if judge == "own":
        assert [document[-4:] for document in documents] == [tokens for answer in drawn for tokens in answer.token_ids]


def test_there_is_no_kl_between_models_of_different_vocabularies(config_of, foreign, checkpoints, tmp_path, capsys):
    models = {"one": checkpoints["llama"], "two": checkpoints["gpt2"], "other": foreign[0]}
    results = results_of(config_of(64, models=models))["models"]
    assert "kl" in results["two"] and "kl" not in results["other"] and "proxy" in results["other"]
    assert "no KL from one for other: another vocabulary" in capsys.readouterr().err
    with pytest.raises(UserError, match="reference: two has another vocabulary than other"):
        evaluation.run(config_of(64, models=models, reference="two"))


def test_an_evaluation_with_comparisons_measures_every_policy_of_the_same_vocabulary(
    config_of, checkpoints, foreign, tmp_path
):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "Guest:", "chosen": "hello guest", "rejected": "room"}) + "\n")
    models = {"one": checkpoints["llama"], "two": checkpoints["gpt2"], "other": foreign[0]}
    config = config_of(64, models=models, comparisons=DataConfig(train=str(path), max_length=64))
    results = results_of(config)["models"]
    one, two = results["one"]["pairs"], results["two"]["pairs"]
    assert one["margin"] == one["chosen_log_prob_change"] == 0 and one["accuracy"] == 0.5
    for side in ("chosen", "rejected"):
        change = two[f"{side}_log_prob"] - one[f"{side}_log_prob"]
        assert two[f"{side}_log_prob_change"] == pytest.approx(change, abs=1e-9) != 0
    assert "pairs" not in results["other"]


# --- best of n beside the policies ------------------------------------------------------------------------------------


def test_the_best_of_n_is_the_one_that_its_reward_model_scores_highest(config_of, checkpoints, monkeypatch):
    drawn, scored, decode, score_ids = [], [], sampling.decode_responses, RewardModel.score_ids

    def spy(self, documents, *rest):
        scored.append((documents, score_ids(self, documents, *rest)))
        return scored[-1][1]

    monkeypatch.setattr(RewardModel, "score_ids", spy)
    monkeypatch.setattr(
        sampling, "decode_responses", lambda *a, **k: drawn.append((k["rows"], decode(*a, **k))) or drawn[-1][1]
    )
    config = config_of(64)
    assert config.reward_model is not None
    best_of = {"best of 3": BestOfConfig("one", config.reward_model, 3)}
    results = results_of(config_of(64, best_of=best_of))["models"]
    assert [list(rows) for rows, _ in drawn] == [[0, 1], [0, 1], [2, 3, 4, 5, 6, 7]]
    ids = drawn[-1][1].token_ids
    documents, scores = scored[0]  # the three responses to the first prompt, then those to the second
    assert [document[-len(own) :] for document, own in zip(documents, ids, strict=True)] == ids
    best, means = scores.view(2, 3).max(1).values.mean(), scores.mean()
    assert results["best of 3"]["proxy"] == pytest.approx(float(best), abs=1e-5) and best > means
    assert results["best of 3"]["kl"] == pytest.approx(math.log(3) - 2 / 3)
    assert results["best of 3"]["win_rate"]["n"] == 2 and results.keys() == {"one", "two", "best of 3"}


def test_a_wrong_best_of_n_is_refused(config_of, monkeypatch):
    for best_of, changes, words in (
        ({"one": BestOfConfig("two", "r")}, {}, "share the names"),
        ({"best": BestOfConfig("three", "r")}, {}, "policies that are not among the models"),
        ({"best": BestOfConfig("one", "r")}, {"temperature": 0.0}, "a temperature above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            config_of(64, best_of=best_of, **changes)
    monkeypatch.setattr(evaluation, "load_on_best_device", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match="/nowhere/judge: no such model directory"):
        evaluation.run(config_of(64, best_of={"best": BestOfConfig("one", "/nowhere/judge")}))


# --- responses that were sampled before ------------------------------------------------------------------------------


def fill_in(path, verdict):
    rows = read_lines(path)
    lines_file(path, [{**row, "verdict": verdict(row)} for row in rows])


def fill_in_both_orders(path):
    """Every pair of a form in both orders, as a program may fill it in, and the first preferred each time."""
    rows = read_lines(path)
    rows += [{**row, "first": row["second"], "second": row["first"]} for row in rows]
    lines_file(path, [{**row, "verdict": 1.0} for row in rows])


@pytest.fixture
def judged_by_people(config_of, tmp_path):
    """Settings of an evaluation whose form is written, and the form."""
    form = tmp_path / "form.jsonl"
    people = {"judge": "verdicts", "reward_model": None, "verdicts": str(form)}
    with pytest.raises(UserError, match="fill in `verdict`"):
        evaluation.run(config_of(64, **people))
    return people, form


def test_people_judge_the_responses_they_saw_wherever_and_however_the_second_run_is_started(
    judged_by_people, config_of, checkpoints, tmp_path, monkeypatch, capsys
):
    """Seed, type, number of threads, and the places of models and prompts are others: a second draw would differ."""
    people, form = judged_by_people
    shown = read_lines(tmp_path / "out/responses.jsonl")
    theirs = {row["responses"]["two"] for row in shown}
    fill_in(form, lambda row: float(row["first"] in theirs))
    models = {name: str(tmp_path / name) for name in ("one", "two")}
    for copy, family in zip(models.values(), ("llama", "gpt2"), strict=True):
        shutil.copytree(checkpoints[family], copy)
    shutil.copy(config_of(64).data.train, tmp_path / "elsewhere.jsonl")
    monkeypatch.setattr(sampling, "decode_responses", lambda *_, **__: pytest.fail("responses were sampled again"))
    changes = {"data": DataConfig(train=str(tmp_path / "elsewhere.jsonl"), max_length=64), "models": models}
    changes |= {"seed": 7, "weights": WeightsConfig("bfloat16")}
    two = results_of(config_of(64, **people, **changes))["models"]["two"]
    assert (two["win_rate"]["wins"], two["win_rate"]["n"], two["failures"]) == (2, 2, 0)
    assert two["response_tokens"] == 4 and "kl" in two
    told = capsys.readouterr().err
    assert "responses.jsonl: read again" in told and "seed: 0 -> 7" in told


def test_labels_of_several_people_in_a_file_of_their_own_all_count(judged_by_people, config_of, tmp_path, monkeypatch):
    """As the labelling page appends them: names, sides in any order, a repeat with exchanged sides, a torn last line."""
    people, form = judged_by_people
    rows = read_lines(form)
    theirs = {row["responses"]["two"] for row in read_lines(tmp_path / "out/responses.jsonl")}
    labels = []
    for name, row in [("Ann", row) for row in rows] + [("Bob", row) for row in rows] + [("Ann", rows[0])]:
        if name == "Bob" or len(labels) == 4:
            row = {**row, "first": row["second"], "second": row["first"]}
        labels.append({**row, "judge": name, "verdict": float(row["first"] in theirs), "seconds": 2.5, "flags": []})
    path = tmp_path / "labels.jsonl"
    path.write_text(lines_file(path, labels).read_text() + '{"id": "torn')
    threads = torch.get_num_threads()
    torch.set_num_threads(threads % 4 + 1)
    monkeypatch.setattr(sampling, "decode_responses", lambda *_, **__: pytest.fail("responses were sampled again"))
    results = results_of(config_of(64, **{**people, "verdicts": str(path), "seed": 9}))
    torch.set_num_threads(threads)
    two, judging = results["models"]["two"], results["judging"]
    assert (two["win_rate"]["wins"], two["failures"]) == (2, 0)
    assert two["inconsistent"].items() >= {"n": 1, "count": 0}.items()
    assert judging["verdicts"] == {"Ann": 3, "Bob": 2}
    assert judging["agreement"] == 1 and judging["judged_by_several"] == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens: 4 -> 5"),
        ({"top_p": 0.9}, "top_p: 1.0 -> 0.9"),
        ({"judge": "longer", "seed": 1}, "seed: 0 -> 1"),
        ("model", r"models\.two: "),
        ("prompts", "prompts: "),
    ],
)
def test_responses_that_people_judge_are_not_replaced(
    change, words, judged_by_people, config_of, checkpoints, tmp_path
):
    people, form = judged_by_people
    fill_in(form, lambda row: 0.5)
    before = (tmp_path / "out/responses.jsonl").read_bytes()
    if change == "model":
        change = {"models": {"one": checkpoints["llama"], "two": checkpoints["llama"]}}
    if change == "prompts":
        (tmp_path / "others.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "guest"}\n')
        change = {"data": DataConfig(train=str(tmp_path / "others.jsonl"), max_length=64)}
    with pytest.raises(UserError, match=rf"people judge these responses in .*form\.jsonl(?s:.*){words}"):
        evaluation.run(config_of(64, **{**people, **change}))
    assert (tmp_path / "out/responses.jsonl").read_bytes() == before


def test_without_people_the_same_start_reads_the_responses_and_another_one_samples(config_of, monkeypatch, capsys):
    calls, decode = [], sampling.decode_responses
    monkeypatch.setattr(sampling, "decode_responses", lambda *a, **k: calls.append(1) or decode(*a, **k))
    best_of = {"best of 2": BestOfConfig("one", config_of(64).reward_model, 2)}
    first = evaluation.run(config_of(64, best_of=best_of)).read_text()
    assert evaluation.run(config_of(64, best_of=best_of)).read_text() == first and len(calls) == 3
    capsys.readouterr()
    other = evaluation.run(config_of(64, best_of=best_of, seed=1)).read_text()
    assert other != first and len(calls) == 6
    assert "sampled again" in (told := capsys.readouterr().err) and "seed: 0 -> 1" in told


def test_responses_that_were_changed_by_hand_are_not_read(config_of, tmp_path, capsys):
    first = evaluation.run(config_of(64)).read_text()
    path = tmp_path / "out/responses.jsonl"
    before = path.read_text()
    path.write_text(before.replace('"log_probs"', '"log_probs" '))
    assert evaluation.run(config_of(64)).read_text() == first
    assert "sampled again" in capsys.readouterr().err and path.read_text() == before


def test_the_first_start_for_people_is_no_error_and_names_the_next_command(config_of, tmp_path, capsys):
    config, form = config_of(64), tmp_path / "form.jsonl"
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"output: {config.output}\nmodels: {json.dumps(config.models)}\nbaseline: one\njudge: verdicts\n"
        f"verdicts: {form}\ndata: {{train: {config.data.train}, max_length: 64}}\nmax_new_tokens: 4\n"
    )
    assert cli.main(["evaluate", "winrate", str(path), "seed=3"]) == 0
    shown = capsys.readouterr()
    assert f"alignment evaluate winrate {path} seed=3" in shown.out and "error" not in shown.err
    assert cli.main(["evaluate", "winrate", str(path), "seed=3"]) == 2
    assert "0 of 2 verdicts are filled in" in capsys.readouterr().err
    fill_in_both_orders(form)
    assert cli.main(["evaluate", "winrate", str(path), "seed=3"]) == 0
    shown = capsys.readouterr()
    assert "contradict each other on 2" in shown.out and "50.0 % [0.0, 100.0]" in shown.out


def test_a_judge_by_position_is_named_in_results_with_intervals(config_of, tmp_path, capsys):
    form, path = tmp_path / "form.jsonl", tmp_path / "many.jsonl"
    lines_file(path, [{"prompt": f"guest {i}"} for i in range(12)])
    people = {"judge": "verdicts", "reward_model": None, "verdicts": str(form)}
    people["data"] = DataConfig(train=str(path), max_length=64)
    with pytest.raises(UserError, match="fill in"):
        evaluation.run(config_of(64, **people))
    fill_in_both_orders(form)
    results = results_of(config_of(64, **people))
    two = results["models"]["two"]
    assert two["position_bias"].items() >= {"rate": 1.0, "high": 1.0, "n": 24}.items()
    assert two["inconsistent"].items() >= {"count": 12, "rate": 1.0, "high": 1.0}.items()
    assert 0.7 < two["inconsistent"]["low"] < 0.8  # Wilson's of 12 of 12: 0.757
    assert (two["win_rate"]["low"], two["win_rate"]["high"]) == (0.0, 1.0)
    [warning] = faults_of_judges(results)
    assert "12 of 12" in warning and warning in capsys.readouterr().err
    one = summary_rows(results)[1]
    assert one["orders disagree"]["rate"] == 1 and format_cell(one["shown first preferred"]).startswith("100.0 % [86.")


def test_two_starts_in_one_directory_do_not_judge_twice(config_of, tmp_path):
    """[E5b] Both would make the same calls of a service."""
    judge = JudgeEvalConfig(output=str(tmp_path / "out"), labels=["x.jsonl"], judge="longer")
    ratings = RatingsConfig(str(tmp_path / "out"), battles="x.jsonl")
    win_rate = config_of(64, judge="longer", reward_model=None)
    for start, config in ((evaluation.run, win_rate), (judge_run.run, judge), (ratings_run.run, ratings)):
        with lock(Path(config.output)), pytest.raises(UserError, match="in use by another run"):
            start(config)


def test_responses_that_were_cut_are_told_of(config_of, capsys):
    """[D8] Their beginnings are judged."""
    results = results_of(config_of(64, judge="longer", reward_model=None, max_new_tokens=2))
    cut = [name for name, own in results["models"].items() if own["ended_share"] < 0.7]
    warned = [warning.partition(":")[0] for warning in results["warnings"] if "max_new_tokens=2" in warning]
    assert cut and warned == cut
    assert "raise it" in capsys.readouterr().err


def test_the_share_of_failures_that_the_advice_names_is_a_setting(judged_by_people, config_of):
    people, form = judged_by_people
    rows = iter(range(2))
    fill_in(form, lambda row: 1.0 if next(rows) == 0 else None)
    with pytest.raises(UserError, match=r"failed on 1 of 2 items(?s:.*)max_failed_share"):
        evaluation.run(config_of(64, **people))
    two = results_of(config_of(64, **people, max_failed_share=0.5))["models"]["two"]
    assert (two["failures"], two["win_rate"]["n"]) == (1, 1)
    with pytest.raises(ValueError, match="max_failed_share must be at most 1"):
        config_of(64, max_failed_share=1.5)


def test_a_judge_that_a_policy_was_trained_against_is_named(config_of, stage, foreign, checkpoints, tmp_path, capsys):
    reward, models = str(stage("reward") / "model"), {"SFT": str(stage("sft") / "model")}
    models["PPO"] = str(stage("ppo") / "model")
    shutil.copytree(reward, tmp_path / "the same")  # by content, wherever it lies
    best_of = {"best of 2": BestOfConfig("SFT", reward, 2)}
    config = config_of(64, models=models, baseline="SFT", reward_model=str(tmp_path / "the same"), best_of=best_of)
    results = results_of(config)
    [warning] = faults_of_judges(results)
    assert "PPO, best of 2" in warning and "SFT" not in warning
    assert f"warning: {warning}" in capsys.readouterr().err
    other = config_of(64, models=models, baseline="SFT", reward_model=foreign[1], output=str(tmp_path / "other"))
    assert faults_of_judges(results_of(other)) == []


# --- who judges -----------------------------------------------------------------------------------------------------


def test_without_a_judge_the_choice_is_put_in_words_before_anything_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("output: out\nmodels: {a: nowhere/a, b: nowhere/b}\nbaseline: a\ndata: {train: nowhere.jsonl}\n")
    with pytest.raises(UserError, match=r"mine\.yaml:1: .*say who judges: judge=reward_model with reward_model=DIR"):
        load_config(WinRateConfig, str(path))
    assert load_config(WinRateConfig, str(path), ["judge=longer"]).judge == "longer"


def test_the_gold_judge_refuses_prompts_of_another_world_before_any_model_is_loaded(config_of, tmp_path):
    rows = [*generate_rows("prompts_eval", seed=0, count=2), {"prompt": "What about the pool?"}]
    path = tmp_path / "mixed.jsonl"
    lines_file(path, rows)
    models = {"one": "/nowhere/a", "two": "/nowhere/b"}
    config = config_of(256, judge="gold", data=DataConfig(train=str(path)), models=models)
    with pytest.raises(UserError, match=r"mixed\.jsonl:3: judge=gold .* 1 of 3 are none; take judge=reward_model"):
        evaluation.run(config)


# --- contestants of every kind, and judges that are asked call by call ------------------------------------------------


def answer_of(body, count):
    """A chat model that judges by the alphabet where it is asked to judge, and else answers at a length of its own."""
    asked = body["messages"][0]["content"]
    texts = re.findall(r"--- \w+ (?:first|second) begins\n(.*?)\n--- \w+ \w+ ends", asked, re.DOTALL)
    text = ("A" if texts[0] < texts[1] else "B") if texts else f"said to {asked[:9]}"
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}}]})


def test_files_and_services_are_contestants_whose_responses_are_kept_and_who_are_judged_alike(
    config_of, tmp_path, capsys
):
    prompts = [row["prompt"] for row in read_lines(tmp_path / "prompts.jsonl")]
    file = tmp_path / "theirs.jsonl"
    rows = [{"prompt": prompt, "response": f"written {i}"} for i, prompt in enumerate(reversed(prompts))]
    lines_file(file, rows)
    with serving(answer_of) as server:
        service = EndpointConfig(url=server.url, model="stub", retries=0, requests=2)
        settings = {"response_files": {"file": str(file)}, "endpoints": {"api": service}, "baseline": "file"}
        settings |= {"judge": "endpoint", "endpoint": service, "reference": "one", "samples": 2}
        first = results_of(config_of(64, **settings))
        models, shown = first["models"], first["samples"][0]["responses"]
        assert shown["file"]["text"] == "written 1" and shown["api"]["text"] == "said to Guest:"
        assert models["api"]["win_rate"]["wins"] == 2 and "response_tokens" not in models["api"]
        assert "kl" in models["two"] and "proxy" in models["file"] and first["judging"]["calls"] == 12
        asked = len(server.requests)
        assert asked == 2 + 2 * 2 * 3  # the service's own responses, and two orders of three pairs of each prompt
        again = results_of(config_of(64, **settings))
        assert len(server.requests) == asked
        assert {**again, "judging": 0} == {**first, "judging": 0} and again["judging"]["made_now"] == 0
        capsys.readouterr()
        more = {**settings, "models": {**config_of(64).models, "more": config_of(64).models["two"]}}
        evaluation.run(config_of(64, **more))
        assert "sampled now: more" in capsys.readouterr().err and len(server.requests) == asked  # known texts
    file.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match=r"theirs\.jsonl: no response to 1 of 2 prompts, such as .*jsonl:1"):
        evaluation.run(config_of(64, **settings, output=str(tmp_path / "other")))


def test_labels_of_people_on_a_part_of_the_items_give_a_corrected_rate_beside_the_judge_s(config_of, tmp_path):
    """The longer response wins all twelve; of the eight that people have judged, in either order, three."""
    prompts, files, labels = [f"guest {i}" for i in range(12)], {}, tmp_path / "labels.jsonl"
    data = tmp_path / "many.jsonl"
    lines_file(data, [{"prompt": prompt} for prompt in prompts])
    for name, words in (("base", "no"), ("ours", "longer")):
        rows = [{"prompt": prompt, "response": f"{words} {prompt}"} for prompt in prompts]
        files[name] = str(lines_file(tmp_path / f"{name}.jsonl", rows))
    settings = {"models": {}, "response_files": files, "baseline": "base", "judge": "longer", "reward_model": None}
    settings |= {"data": DataConfig(train=str(data), max_length=64), "labels": str(labels)}
    for count in (8, 4):
        rows = [{"id": f"{data}:{i + 1}", "first": f"longer guest {i}", "second": f"no guest {i}", "verdict": float(i < 3)}
                for i in range(count)]  # fmt: skip
        rows[0] |= {"first": rows[0]["second"], "second": rows[0]["first"], "verdict": 0}
        lines_file(labels, rows)
        results = results_of(config_of(64, **settings))
        ours, cells = results["models"]["ours"], summary_rows(results)[1]
        assert ours["win_rate"]["rate"] == 1
        if count == 8:
            assert ours["by_people"]["labels"] == 8 and ours["by_people"]["people"]["rate"] == 3 / 8
            assert cells["corrected by people"] == ours["by_people"]["corrected"]
        else:
            assert ours["by_people"] is None and "corrected by people" not in cells
            assert any("fewer than 5 labels" in warning for warning in results["warnings"])


def test_a_service_that_fails_as_a_contestant_keeps_what_came(config_of, tmp_path):
    fails = [True]
    with serving(lambda b, n: (500, {}, "") if fails[0] and n == 2 else answer_of(b, n)) as server:
        service = EndpointConfig(url=server.url, model="stub", retries=0, requests=1)
        settings = {"endpoints": {"api": service}, "judge": "longer"}
        with pytest.raises(
            UserError, match=r"stub: no answer to 1 of 2 calls: status 500 .* What was answered is kept"
        ):
            evaluation.run(config_of(64, **settings))
        fails[0] = False
        evaluation.run(config_of(64, **settings))
        assert len(server.requests) == 3


def test_half_a_surrogate_pair_of_a_contestant_is_kept_as_a_sign(config_of):
    """[E4] Models of bytes send it; a file could not hold it, at any start."""
    body = '{"choices": [{"message": {"content": "hot \\ud83d tub"}}]}'
    with serving(lambda request, count: (200, {}, body)) as server:
        service = EndpointConfig(url=server.url, model="stub")
        config = config_of(64, endpoints={"api": service}, max_new_tokens=50)
        for _ in range(2):
            found = sampling.endpoint_responses(config, service, [Prompt("Guest:", {}, "row 0")])
            assert found.texts == ["hot \ufffd tub"]
        assert len(server.requests) == 1


def test_the_cost_of_a_contestant_is_foretold_from_the_longest_response(config_of, capsys):
    with serving(answer_of) as server:
        service = EndpointConfig(url=server.url, model="stub", input_price=0.0, output_price=1e6)
        config = config_of(64, endpoints={"api": service}, max_new_tokens=50)
        sampling.endpoint_responses(config, service, [Prompt("Guest:", {}, "row 0"), Prompt("Host:", {}, "row 1")])
    assert "a cost of at most about 100.00" in capsys.readouterr().err


def test_one_of_several_reward_models_may_fail_as_often_as_the_config_allows(config_of):
    config = config_of(64, reward_model=None, reward_models=("one", "other"), max_failed_share=0.5)
    prompts = [Prompt(f"p{i}", {}, f"row {i}") for i in range(4)]
    scorers = {"one": lambda _, texts: [math.nan if text == "b0" else len(text) for text in texts],
               "other": lambda _, texts: list(map(len, texts))}  # fmt: skip
    texts = {"one": [f"a{i}" for i in range(4)], "two": [f"b{i}" for i in range(4)]}
    sides = {name: Generation(own, [], [], []) for name, own in texts.items()}
    judge = build_judge(config, scorers=scorers, hashes=dict.fromkeys(scorers))
    judging, _ = evaluation.judge_responses(config, prompts, sides, judge, scorers)
    by_judge = judging["models"]["two"]["by_judge"]
    assert by_judge["one"]["n"] == 3 and by_judge["other"]["n"] == 4


def test_several_reward_models_judge_by_majority_and_their_spread_is_shown(config_of, foreign):
    one = config_of(64).reward_model
    config = config_of(64, reward_model=None, reward_models=(one, foreign[1]))
    two = results_of(config)["models"]["two"]
    rates = [two["by_judge"][source]["rate"] for source in (one, foreign[1])]
    assert two["win_rate"]["n"] == 2 and two["judge_spread"] == max(rates) - min(rates) and "proxy" not in two
    prompts, texts = [Prompt(text, {}, text) for text in ("Guest:", "hello guest")], ["room", "spa"]
    verdicts = build_judge(JudgeConfig(judge="reward_model", reward_model=one))(prompts, texts, ["guest", "spa"])
    scores = load_reward_model(one).score([("Guest:", "room"), ("Guest:", "guest")]).tolist()
    assert verdicts == [float(scores[0] > scores[1]), 0.5]
    with pytest.raises(ValueError, match="reward_models are two or more different directories"):
        config_of(64, reward_model=None, reward_models=(one, one))


def test_a_wrong_judge_is_told_before_anything_is_sampled(config_of, checkpoints, monkeypatch):
    monkeypatch.setattr(sampling, "decode_responses", lambda *_, **__: pytest.fail("responses were sampled"))
    monkeypatch.delenv("NO_KEY", raising=False)
    service = EndpointConfig(url="http://127.0.0.1:1/v1", model="m", key_variable="NO_KEY")
    for changes, words in (
        ({"judge": "model", "judge_model": checkpoints["gpt2"], "judge_template": "none"}, "judge_template"),
        ({"judge": "model", "judge_model": "/nowhere/judge"}, "/nowhere/judge"),
        ({"judge": "endpoint", "endpoint": service}, "NO_KEY"),
        ({"judge": "longer", "response_files": {"file": "/nowhere.jsonl"}}, "response_files, labels: /nowhere.jsonl"),
    ):
        with pytest.raises(UserError, match=words):
            evaluation.run(config_of(64, **changes))


def test_a_local_model_judges_and_is_named_where_a_policy_comes_from_it(config_of, stage, tmp_path, write_checkpoint):
    judge = write_checkpoint(tmp_path / "judge", "llama", max_position_embeddings=4096)
    config = config_of(64, judge="model", judge_model=judge, max_failed_share=0.0)
    results = results_of(config)
    assert results["judging"]["calls"] == 4 and results["models"]["two"]["win_rate"]["n"] == 2
    rows = read_judgments(tmp_path / "out/judgments.jsonl")
    assert len(rows) == 4 and {row.first_model for row in rows} == {"one", "two"}
    assert all(row.probability is not None and row.judge == f"model {judge}" for row in rows)
    sft, base = str(stage("sft") / "model"), json.loads((stage("sft") / "lineage.json").read_text())["parents"]
    models = {"SFT": sft, "PPO": str(stage("ppo") / "model")}
    config = config_of(64, judge="model", judge_model=next(iter(base)), models=models, baseline="SFT")
    (warning,) = parent_warnings(config, evaluation.check_models(config))
    assert "is the model of SFT, PPO, or one that it was trained from" in warning  # PPO by way of the SFT

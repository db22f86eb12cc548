"""`alignment doctor --run`: each planted failure is found with its numbers, and healthy runs have no finding."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import yaml

from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.rollouts.alarms import Alarms, new_alarms
from alignment.cli import main
from alignment.config.schema import config_keys, packaged_schema
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.reports.diagnosis import (
    OVERFLOW_ADVICE,
    SYMPTOMS,
    Advice,
    Times,
    diagnose,
    report_lines,
    settings_to_try,
)
from alignment.reports.run_log import RunLog, Series, columns, read_run_log
from alignment.training import OptimConfig
from tests.conftest import write_lines

N = 40
RISE = np.linspace(0, 1, N)


def noise(size: float, seed: int) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal(N)


def healthy_ppo() -> dict[str, np.ndarray]:
    """Metrics like those of a run that went well."""
    schedule = 1e-4 * (1 - RISE)
    return {
        "score": 0.3 + RISE + noise(0.1, 1), "kl": 1.5 * RISE + noise(0.1, 2), "kl_k3": 1.5 * RISE + 0.01,
        "approx_kl": 5e-3 * (1 - RISE) ** 3, "clip_fraction": 0.02 * (1 - RISE), "entropy": 0.45 - 0.06 * RISE + noise(0.01, 3),
        "explained_variance": np.minimum(0.85, 3 * RISE) + noise(0.05, 4), "value_loss": 0.2 - 0.15 * RISE + noise(0.005, 5),
        "response_tokens": 21 + noise(1, 6), "ended_share": np.full(N, 0.99), "distinct_share": np.full(N, 1.0),
        "repetition": 0.02 + noise(0.002, 7), "empty_share": np.zeros(N), "grad_norm": np.exp(noise(0.3, 8)),
        "pretrain_loss": 0.55 - 0.02 * RISE + noise(0.02, 9), "first_ratio_error": np.full(N, 1e-6),
        "sampling_error": np.full(N, 9e-6), "learning_rate": schedule, "loss": noise(1e-3, 10),
        "gold_score": 1.2 + 1.5 * RISE + noise(0.1, 11), "importance_weight_mean": np.full(N, 1.0),
        "score/style": 0.5 * RISE + noise(0.1, 12), "score/truth": 0.5 * RISE + noise(0.1, 13),
    }  # fmt: skip


CONFIG = asdict(
    PPOConfig(
        policy="sft", reward_model="reward", data=DataConfig(train="rows.jsonl"), output="out", epochs=2, max_new_tokens=48,
        optim=OptimConfig(learning_rate=1e-4), value_optim=OptimConfig(learning_rate=1e-3),
    )
)  # fmt: skip


def run_of(changes: dict[str, object], samples=(), stage: str = "ppo", **config: object) -> RunLog:
    """A healthy run's log with other columns, settings or samples."""
    metrics = {**(healthy_ppo() if stage == "ppo" else {}), **changes}
    rows = [{"step": i + 1, **{name: float(column[i]) for name, column in metrics.items()}} for i in range(N)]
    return RunLog(stage, {**CONFIG, **config}, *columns(rows), samples)


def test_a_healthy_run_has_no_finding():
    assert diagnose(run_of({})) == []


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_gives_no_finding_of_a_trend(seed):
    """Forty lines of a run that rises, with noise of a third of the whole rise, are not taken for a failure."""
    jitter = np.random.default_rng(seed).standard_normal((2, N)) * 0.33
    steady = {"score": 0.3 + RISE + jitter[0], "kl": 1.5 * RISE + 0.3 * jitter[1]}
    assert diagnose(run_of(steady)) == []


DROP = np.where(RISE > 0.5, 1.0, 0.0)
FAULTS = {  # name: (columns that are planted, the setting that is proposed first)
    "sampler mismatch": ({"sampling_error": 0.3 * DROP + 1e-6}, "weights.dtype"),
    "KL negative": ({"kl": -0.8 * RISE, "kl_k3": 0.3 * RISE}, "kl_estimator"),
    "KL runs away": ({"kl": 40 * RISE**2}, "kl_coef"),
    "score flat": ({"score": 0.5 + noise(0.1, 20)}, "training.batch_size"),
    "score falls": ({"score": 0.5 - RISE + noise(0.1, 21)}, "optim.learning_rate"),
    "updates too large": ({"clip_fraction": 0.1 + 0.5 * DROP}, "optim.learning_rate"),
    "critic lost": ({"explained_variance": noise(0.05, 22)}, "value_optim.learning_rate"),
    "collapse": ({"entropy": 0.45 * (1 - 0.95 * DROP) + noise(0.005, 23)}, "kl_coef"),
    "length hacking": ({"response_tokens": 20 + 27 * RISE + noise(1, 24)}, "missing_end_penalty"),
    "missing ends": ({"ended_share": 1 - 0.8 * RISE}, "missing_end_penalty"),
    "over-optimization": ({"gold_score": 2 - 8 * (RISE - 0.4) ** 2 + noise(0.05, 26)}, "kl_coef"),
    "gradient spikes": ({"grad_norm": 1 + 30.0 * (np.arange(N) % 9 == 8)}, "optim.learning_rate"),
    "not finite": ({"loss": np.where(RISE > 0.9, np.nan, 0.1)}, "optim.learning_rate"),
}  # fmt: skip


@pytest.mark.parametrize("symptom", FAULTS)
def test_a_planted_failure_is_found_and_nothing_else(symptom):
    planted, first = FAULTS[symptom]
    run = run_of(planted)
    findings = diagnose(run)
    assert [found.symptom for found in findings] == [symptom]
    assert findings[0].settings[0].key == first
    assert findings[0].evidence and 1 <= findings[0].steps[0] <= findings[0].steps[1] <= N
    assert next(iter(planted)) in findings[0].evidence


@pytest.mark.parametrize(
    ("symptom", "planted"),
    [
        ("sampler mismatch", {"first_ratio_error": np.full(N, 0.2)}),
        ("sampler mismatch", {"importance_weight_mean": np.full(N, 0.6)}),
        ("collapse", {"distinct_share": 1 - 0.7 * DROP}), ("collapse", {"repetition": 0.02 + 0.5 * DROP}),
        ("updates too large", {"approx_kl": 0.4 * DROP}), ("critic lost", {"explained_variance": noise(0.05, 22) - 1}),
        ("score flat at the reference", {"score": 0.5 + noise(0.1, 30), "kl": noise(1e-3, 31)}),
    ],
)  # fmt: skip
def test_each_sign_of_a_failure_suffices(symptom, planted):
    assert [found.symptom for found in diagnose(run_of(planted))] == [symptom]


@pytest.mark.parametrize(
    ("alarm", "symptom", "bad", "good"),
    [
        ("entropy", "collapse", {"entropy": 0.28}, {"entropy": 0.32}),  # of 1 at the start
        ("repetition", "collapse", {"repetition": 0.21}, {"repetition": 0.19}),
        ("distinct responses", "collapse", {"distinct_share": 0.48}, {"distinct_share": 0.52}),
        ("missing ends", "missing ends", {"ended_share": 0.68}, {"ended_share": 0.72}),
        ("KL negative", "KL negative", {"kl": -0.03, "kl_k3": 0.001}, {"kl": -0.015, "kl_k3": 0.001}),
    ],
)
def test_an_alarm_during_the_run_and_the_diagnosis_after_it_have_one_limit(alarm, symptom, bad, good):
    """From the middle of the run on the metric lies beyond the limit, or just within it."""
    start = {"entropy": 1.0, "repetition": 0.02, "distinct_share": 1.0, "ended_share": 0.99, "kl": 0.1, "kl_k3": 0.1}
    for planted, found in ((bad, True), (good, False)):
        columns = {name: np.where(RISE > 0.5, later, start[name]) for name, later in planted.items()}
        run, alarms = run_of(columns), Alarms()
        lines = [{name: series.values[i] for name, series in run.series.items()} for i in range(N)]
        notes = [
            note for i, line in enumerate(lines) for note in new_alarms(alarms, i + 1, line | {"responses": 512.0})
        ]
        assert [f"({alarm})" in note for note in notes] == [True] * found
        assert [finding.symptom for finding in diagnose(run)] == [symptom] * found


def test_a_reward_that_gives_every_sample_the_same_score_is_named():
    samples = [{"step": i, "prompt": "p", "response": "r" * i, "score": 0.25} for i in range(1, 30)]
    found = diagnose(run_of({"score": np.full(N, 0.25), "gold_score": noise(0.1, 1)}, samples))[0]
    assert found.symptom == "score constant" and "0.25" in found.evidence


def test_scores_that_follow_length_are_found_before_the_limit_is_reached():
    longer = {"response_tokens": 15 + 8 * RISE}  # to 23 of 48
    step = np.random.default_rng(0).permutation(60)
    alike = [{"step": int(i), "prompt": "p", "response": "x" * int(10 + i), "score": 0.0 + i % 7} for i in range(60)]
    pays = [{"step": int(i), "prompt": "p", "response": "x" * int(10 + s), "score": s / 60} for i, s in enumerate(step)]
    assert diagnose(run_of(longer, alike)) == []
    assert [found.symptom for found in diagnose(run_of(longer, pays))] == ["length hacking"]


def test_filtered_samples_differ_by_construction_and_the_weights_decide():
    filtered = {"sampling_error": np.full(N, 3.0)}
    assert diagnose(run_of(filtered, top_p=0.9)) == []
    assert [found.symptom for found in diagnose(run_of(filtered))] == ["sampler mismatch"]


def test_rounding_is_allowed_what_the_precision_of_the_run_has():
    rounded = {"first_ratio_error": np.full(N, 0.01), "sampling_error": np.full(N, 0.2)}
    training = {**CONFIG["training"], "precision": "bf16"}
    assert diagnose(run_of(rounded, training=training)) == []
    assert [found.symptom for found in diagnose(run_of(rounded))] == ["sampler mismatch"]


def test_trends_of_a_short_run_are_not_judged_but_its_invariants_are():
    rows = [{"step": i + 1, "score": 1.0 - i, "kl": 50.0, "first_ratio_error": 0.3} for i in range(5)]
    run = RunLog("ppo", CONFIG, *columns(rows))
    assert [found.symptom for found in diagnose(run)] == ["sampler mismatch"]
    text = "\n".join(report_lines("run", run, []))
    assert "no trend is judged" in text and text.endswith("examined for: sampler mismatch")


FALLING = {"loss": 2 - RISE + noise(0.05, 40), "grad_norm": np.full(N, 1.0)}
LEARNED = FALLING | {"accuracy": 0.5 + 0.3 * RISE, "margin": RISE}
DPO = LEARNED | {"chosen_reward": -0.3 * RISE, "rejected_reward": -0.9 * RISE}
STILL = DPO | {  # 25 updates at a learning rate of 5e-6: margin 0.0006, loss 0.6931 to 0.6928
    "loss": 0.6931 - 3e-4 * RISE, "accuracy": 0.5 + 0.2 * RISE, "margin": 6e-4 * RISE, "chosen_reward": 2e-4 * RISE,
    "rejected_reward": -4e-4 * RISE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "symptom", "metrics"),
    [
        ("sft", "loss flat", FALLING | {"loss": 2 + noise(0.05, 41)}),
        ("sft", "loss rises", FALLING | {"loss": 2 + np.abs(RISE - 0.5)}),
        ("sft", "overfitting", FALLING | {"held_out_loss": 2 + (RISE - 0.5) ** 2}),
        ("reward", "preferences not learned", LEARNED | {"accuracy": 0.5 + noise(0.02, 42), "margin": noise(0.1, 43)}),
        ("reward", "overfitting", LEARNED | {"accuracy": 0.5 + 0.5 * RISE, "held_out_accuracy": np.full(N, 0.6)}),
        ("dpo", "chosen responses become unlikely", DPO | {"chosen_reward": -4 * RISE}),
        ("dpo", "policy did not move", STILL),
        ("dpo", "policy did not move", STILL | {"accuracy": 0.5 + noise(0.02, 44), "margin": noise(1e-4, 45)}),
        ("dpo", "policy did not move", STILL | {"chosen_reward": 1.5 + noise(1e-3, 46)}),  # no reference: not from 0
    ],
)
def test_failures_of_other_stages_are_found_and_healthy_ones_are_not(stage, symptom, metrics):
    assert [found.symptom for found in diagnose(run_of(metrics, stage=stage))] == [symptom]
    healthy = {"sft": FALLING, "reward": LEARNED, "dpo": DPO}[stage]
    assert diagnose(run_of(healthy, stage=stage)) == []


def test_a_policy_whose_rewards_differ_around_the_same_mean_has_moved():
    spread = {"chosen_reward": noise(0.05, 47), "rejected_reward": noise(0.05, 48)}
    assert "policy did not move" not in [found.symptom for found in diagnose(run_of(STILL | spread, stage="dpo"))]


def test_every_key_that_is_ever_proposed_is_one_of_a_stage():
    stages = ("sft", "reward", "dpo", "ppo", "online_dpo", "distill")
    known = {key.name for name in stages for key in config_keys(packaged_schema(name))}
    assert {one.key for symptom in SYMPTOMS for one in symptom.advice} | {one.key for one in OVERFLOW_ADVICE} <= known


def test_only_keys_of_the_run_and_other_values_are_proposed():
    advice = (
        Advice("temperature", 1.0, "same"),
        Advice("no_such_key", 1, "unknown"),
        Advice("kl_coef", Times(2), "twice"),
    )
    found = settings_to_try(run_of({}, temperature=1.0), advice)
    assert [(each.key, each.now, each.value) for each in found] == [("kl_coef", 0.05, 0.1)]


# Statistics


def test_the_first_and_last_windows_and_their_error_are_the_worked_ones():
    series = Series(tuple(range(1, 16)), tuple([0.0] * 5 + [3.0] * 5 + [6.0] * 5))
    spike = Series(tuple(range(1, 14)), (1.0, 1e30, *map(float, range(2, 13))))  # no trace of it stays behind it
    assert spike.windows.tolist()[2:] == list(map(float, range(3, 12)))
    assert (series.width, series.first, series.last) == (3, 0.0, 6.0)
    # differences: twelve 0 and two 3, mean 3/7, variance 18/14 - 9/49 = 54/49; halved: 27/49
    assert series.noise == pytest.approx((27 / 49) ** 0.5)
    assert series.error == pytest.approx((27 / 49) ** 0.5 * (2 / 3) ** 0.5)
    assert series.increases() and not series.decreases()
    assert (series.windows.min(), series.windows.max()) == (0.0, 6.0)


# The command


def write_run(directory, lines: int = N, **changes) -> str:
    directory.mkdir(parents=True)
    metrics = {**healthy_ppo(), **changes}
    rows = [{"step": i + 1, **{name: float(column[i]) for name, column in metrics.items()}} for i in range(lines)]
    write_lines(directory / "metrics.jsonl", rows)
    (directory / "lineage.json").write_text(json.dumps({"stage": "ppo", "parents": []}))
    (directory / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(CONFIG))))
    return str(directory)


def test_the_command_prints_evidence_cause_and_settings_and_ends_with_0(tmp_path, capsys):
    run = write_run(tmp_path / "run", kl=40 * RISE**2)
    assert main(["doctor", "--run", run]) == 0
    printed = capsys.readouterr().out
    assert "1. KL runs away (steps" in printed and "kl_coef=0.1 (now 0.05)" in printed
    assert main(["doctor", "--run", run, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stage"] == "ppo" and report["findings"][0]["symptom"] == "KL runs away"
    assert {"key": "kl_coef", "now": 0.05, "value": 0.1, "why": "twice the penalty"} in report["findings"][0][
        "settings"
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "missing", "not a run's directory"),
        (lambda path: write_run(path / "empty", lines=0), "no update is logged"),
        (lambda path: (write_run(path / "recipe" / "ppo"), path / "recipe")[1], "the runs in it:"),
    ],
)
def test_a_bad_directory_is_the_users_error(tmp_path, capsys, make, words):
    assert main(["doctor", "--run", str(make(tmp_path))]) == 2
    assert words in capsys.readouterr().err


def test_a_damaged_log_is_named_by_line_and_a_torn_last_line_is_not_read(tmp_path):
    run = write_run(tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 41, "sco')
    assert len(read_run_log(run).series["score"].values) == N
    log.write_text('{"score": 1.0}\n' + log.read_text())
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: the line has no step"):
        read_run_log(run)
    log.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_run_log(run)


def test_a_real_short_ppo_run_has_no_finding(stage):
    run = read_run_log(stage("ppo"))
    assert diagnose(run) == [] and {"score", "kl", "first_ratio_error"} <= set(run.series)
    assert all(run.has(key) for key in ("kl_coef", "optim.learning_rate", "training.batch_size"))

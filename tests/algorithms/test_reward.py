"""Reward models: what they learn, and the numbers on the way."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment import load_reward_model
from alignment.algorithms.reward import NormalizeConfig, objective_loss_fn, score_metrics
from alignment.data.batches import Example, StepBatch, collate_pairs
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.losses import bradley_terry_loss
from alignment.models.outputs import ValueOutput
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Ragged
from alignment.reward_model import load_frozen_reward_model
from alignment.reward_model.model import CANARIES, TEXTS, fit_calibration
from alignment.training import OptimConfig, TrainingConfig, shard_rows
from tests.conftest import read_lines, write_lines
from tests.examples import pair_example

WORDS = ["the spa", "a tour", "the bus", "breakfast", "the pool", "parking"]


def planted(path, count, seed):
    """Pairs in which the friendly answer is always preferred; which words surround it says nothing."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        chosen, rejected = (
            f" {rng.choice(WORDS)} is {mood} and {rng.choice(WORDS)} too" for mood in ("lovely", "awful")
        )
        rows.append({"prompt": f"How is {rng.choice(WORDS)}?", "chosen": chosen, "rejected": rejected})
    write_lines(path, rows)
    return str(path)


def test_a_planted_preference_is_learned(checkpoints, make_stage, tmp_path, read_metrics):
    data = DataConfig(
        train=planted(tmp_path / "train.jsonl", 64, 0), evaluation=planted(tmp_path / "held_out.jsonl", 32, 1)
    )
    training, optim = TrainingConfig(batch_size=16, epochs=6), OptimConfig(learning_rate=3e-3)
    run, config = make_stage(
        "reward", checkpoints["llama"], tmp_path / "run", data=data, training=training, optim=optim
    )
    model = load_reward_model(str(run(config)))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["held_out_accuracy"] > 0.9 and last["held_out_loss"] < 0.5
    friendly, rude = model.score(
        [
            ("How is the bus?", " the bus is lovely and a tour too"),
            ("How is the bus?", " the bus is awful and a tour too"),
        ]
    )
    assert friendly > rude


def test_centering_costs_the_square_of_the_sum():
    """Scores 1 and 3, read at the last tokens: 0.01 * 4^2."""
    side = Example.single([1, 5, 2], [False, True, True], "r")
    [batch] = collate_pairs([pair_example(side, side, None, "r")], 100)
    values = torch.full((len(batch.ragged.tokens),), 1e9)
    values[batch.ragged.last] = torch.tensor([1.0, 3.0])
    model = lambda batch, tokens: ValueOutput(values=values[tokens])  # noqa: E731
    plain, centered = (objective_loss_fn(model, "bradley_terry", center_coef=coef)(batch).total for coef in (0.0, 0.01))
    assert_close(centered - plain, torch.tensor(0.16))


def test_margins_of_the_rows_reach_the_loss(ran, checkpoints, tmp_path, read_metrics):
    losses = []
    for margin in (None, 5.0):
        rows = read_lines(planted(tmp_path / "rows.jsonl", 8, 0))
        path = tmp_path / f"{margin}.jsonl"
        write_lines(path, (row | ({"margin": margin} if margin else {}) for row in rows))
        output = tmp_path / f"run{margin}"
        ran("reward", checkpoints["llama"], output, data=DataConfig(train=str(path)))
        losses.append(read_metrics(output)[0]["loss"])
    # softplus(5 - m) for small score differences m
    assert losses[1] == pytest.approx(
        bradley_terry_loss(torch.zeros(1), torch.zeros(1), torch.tensor([5.0])).item(), abs=1.0
    )
    assert losses[1] > losses[0] + 3


TEXT = [("How is the pool?", " It is lovely."), ("How is the bus?", " Late, as ever; do not take it."), "A whole text"]


@pytest.fixture(scope="session")
def normalized(ran, world, checkpoints, tmp_path_factory):
    """A reward model with its scale fitted on the held-out rows."""
    data = DataConfig(train=world["comparisons"], evaluation=world["comparisons_heldout"], max_length=256)
    output = tmp_path_factory.mktemp("normalized")
    return ran("reward", checkpoints["llama"], output, data=data, normalize=NormalizeConfig(samples=12))


# H23: the score is read at the wrong token


def test_h23_the_end_token_inside_a_prompt_does_not_move_the_score(stage):
    reward = load_reward_model(str(stage("reward") / "model"))
    eos = reward.tokenizer.eos_token_id
    document = [5, 6, eos, 7, 8, eos]
    reads = torch.arange(len(document)).float()
    batch = Ragged.build([document, [9, eos]])
    assert batch.last.tolist() == [5, 7] and reads[batch.last[0]] == len(document) - 1
    alone = reward.score_ids([document])
    assert_close(alone, reward.score_ids([[9, eos], document, [4]])[1:2], atol=1e-6, rtol=0)


# H24: the head is lost on save, merge or load


@pytest.mark.parametrize("name", ["reward", "reward lora"])
def test_h24_a_loaded_reward_model_scores_its_canaries_alike(stage, name):
    directory = stage(name) / "model"
    saved = json.loads((directory / CANARIES).read_text())
    assert len(saved["canaries"]) == len(TEXTS) == 8 and saved["loss"] == "bradley_terry"
    scores = load_reward_model(str(directory)).score([(row["prompt"], row["response"]) for row in saved["canaries"]])
    assert_close(scores, torch.tensor([row["scores"][0] for row in saved["canaries"]]), atol=1e-5, rtol=0)
    assert scores.unique().numel() > 4


def spoiled(directory, target, change):
    """A copy of a model's directory whose tensors are changed."""
    shutil.copytree(directory, target)
    [path] = target.glob("*.safetensors")
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return str(target)


def new_head(tensors):
    torch.manual_seed(1)
    return {n: torch.randn_like(x) * x.shape[1] ** -0.5 if "score" in n else x for n, x in tensors.items()}


def other_layer(tensors):
    name = next(name for name in sorted(tensors) if "down_proj" in name or "lora_B" in name)
    return {n: x + 0.3 * torch.randn_like(x) if n == name else x for n, x in tensors.items()}


@pytest.mark.parametrize("name", ["reward", "reward lora"])
@pytest.mark.parametrize("change", [new_head, other_layer])
def test_h24_another_head_or_weight_is_an_error_at_load(stage, tmp_path, name, change):
    if (stage(name) / "model" / "adapter_config.json").exists():
        base = json.loads((stage(name) / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
        target = stage(name) / f"spoiled-{change.__name__}"  # beside the model: the base's path is relative
        assert (stage(name) / "model" / base).is_dir()
    else:
        target = tmp_path / "model"
    directory = spoiled(stage(name) / "model", target, change)
    for load in (load_reward_model, lambda path: load_frozen_reward_model(path, SharedWeights())):
        with pytest.raises(UserError, match=r"scored it with .* its head, weights, base model or tokenizer"):
            load(directory)


def test_h24_damaged_canaries_are_named(stage, tmp_path):
    shutil.copytree(stage("reward") / "model", tmp_path / "model")
    (tmp_path / "model" / CANARIES).write_text('{"canaries": 3}')
    with pytest.raises(UserError, match=r"canaries\.json: not the scores"):
        load_reward_model(str(tmp_path / "model"))


# H25: the scale of scores and of new heads


def test_h25_the_gain_and_bias_of_the_worked_numbers():
    """Mean -1.25 and deviation 0.8 give gain 1.25 and bias 1.5625."""
    raw = torch.tensor([-1.25 - 0.8, -1.25 + 0.8], dtype=torch.float64).repeat(8)
    calibration = fit_calibration(raw, "samples")
    assert (calibration.gain, calibration.bias) == pytest.approx((1.25, 1.5625), abs=1e-9)
    scores = calibration.apply(raw)
    assert scores.mean().item() == pytest.approx(0, abs=1e-6)
    assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    with pytest.raises(UserError, match="no scale follows"):
        fit_calibration(torch.ones(4), "samples")


def test_h25_scores_have_mean_0_and_deviation_1_on_the_samples(normalized, world):
    lines = Path(world["comparisons_heldout"]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(lines[number]) for number in (0, 1, 2, 4, 5, 6)]  # 12 responses, of rows evenly over all 8
    reward = load_reward_model(str(normalized))
    texts = [(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")]
    scores = reward.score(texts)
    assert (scores.mean().item(), scores.std(correction=0).item()) == pytest.approx((0, 1), abs=1e-4)
    raw = reward.members_of_ids([one.ids for one in reward.encode(texts)]).squeeze(1)
    assert_close(scores, reward.calibration.gain * raw + reward.calibration.bias)


@torch.no_grad()
def test_h25_transformers_logits_stay_raw(normalized):
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(normalized)
    reward = load_reward_model(str(normalized))
    ids = [list(one.ids) for one in reward.encode(TEXT)]
    raw = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in ids])
    assert_close(reward.members_of_ids(ids).squeeze(1), raw, atol=1e-5, rtol=1e-5)
    assert reward.calibration.fitted and not torch.allclose(reward.score_ids(ids), raw, atol=0.05)


def test_h25_ppo_scales_such_scores_no_second_time(normalized, ran, stage, tmp_path, read_metrics, monkeypatch):
    from alignment.algorithms.ppo import ppo

    states = []
    build = ppo.build_state
    monkeypatch.setattr(ppo, "build_state", lambda *args: states.append(build(*args)) or states[0])
    ran("ppo", str(stage("sft") / "model"), tmp_path / "run", reward_model=str(normalized), normalize_scores=True)
    normalizer = states[0].normalizer
    assert normalizer.fitted and (normalizer.scale, normalizer.shift) == (1.0, 0.0)


# H26: ties, duplicates and padding of ranks


def test_h26_four_margins():
    """Margins 0.7, -0.3, 0, 3.1 cost 0.498688 in the mean; accuracy (1 + 0 + 1/2 + 1) / 4 with one tie."""
    side = lambda row: Example.single([1, 5, 2], [False, True, True], str(row))  # noqa: E731
    [batch] = collate_pairs([pair_example(side(row), side(row), None, str(row)) for row in range(4)], 100)
    values = torch.zeros(len(batch.ragged.tokens))
    values[batch.ragged.last] = torch.tensor([0.7, 0.0, 0.2, 3.1, 0.0, 0.3, 0.2, 0.0])
    result = objective_loss_fn(lambda batch, tokens: ValueOutput(values[tokens]), "bradley_terry")(batch)
    assert result.total.item() / 4 == pytest.approx(0.498688, abs=1e-6)
    assert (result.metrics["accuracy"].item() / 4, result.metrics["ties"].item()) == (0.625, 1.0)


def test_h26_nine_rows_on_two_ranks_give_the_numbers_of_one():
    """No row is repeated to fill a rank: 5 and 4 rows, and the sums over both are those over nine."""
    side = lambda row, what: Example.single([1, 3 + row, what], [False, True, True], f"r{row}")  # noqa: E731
    rows = [pair_example(side(row, 4), side(row, 5), None, f"r{row}") for row in range(9)]
    scores = torch.randn(40, generator=torch.Generator().manual_seed(0))

    def sums(batches):
        def model(batch, tokens):
            return ValueOutput((scores[batch.tokens] * batch.tokens.roll(1).float())[tokens])

        loss_fn = objective_loss_fn(model, "bradley_terry", center_coef=0.01)
        found = [(batch.weight, loss_fn(batch)) for batch in batches]
        return torch.tensor([[w, float(r.total), float(r.metrics["accuracy"])] for w, r in found]).sum(0)

    def collate(part):
        return collate_pairs(part, 1000)

    one = sums(shard_rows(rows, collate))
    two = sums(shard_rows(rows, collate, 0, 2)) + sums(shard_rows(rows, collate, 1, 2))
    assert one[0] == 9
    assert_close(one, two)


def test_h26_ties_count_half_among_steps_also_for_each_source():
    scores, labels = torch.tensor([0.0, 0.0, 2.0, -1.0]), torch.tensor([True, False, False, False])
    measured = score_metrics(scores, StepBatch(Ragged.build([[1, 2]]), labels, labels, labels))
    assert measured.accuracy.tolist() == [0.5, 0.5, 0.0, 1.0]
    assert (measured.sums["accuracy"].item(), measured.sums["ties"].item()) == (2.0, 2.0)

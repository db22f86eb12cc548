"""Hazards of reward models, by their numbers: what scores, saved models and metrics must not do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.algorithms.reward import NormalizeConfig, objective_loss_fn, score_metrics
from alignment.data.batches import Example, StepBatch, collate_pairs
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.models.outputs import ValueOutput
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Ragged
from alignment.reward_model import load_frozen_reward_model, load_reward_model
from alignment.reward_model.model import CANARIES, TEXTS, fit_calibration
from alignment.training.terms import shard_rows
from tests.examples import pair_example

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


def test_h23_the_loss_reads_the_last_token_alone():
    """Whatever the values at other tokens are, the loss of a pair is that of the two last ones."""
    side = lambda length: Example.single([1] * length, [False] + [True] * (length - 1), "r")  # noqa: E731
    [batch] = collate_pairs([pair_example(side(3), side(7), None, "r")], 100)
    losses = []
    for elsewhere in (0.0, 1e9, float("nan")):
        values = torch.full((10,), elsewhere)
        values[torch.tensor([2, 9])] = torch.tensor([1.0, 0.5])
        losses.append(
            objective_loss_fn(lambda batch, tokens, values=values: ValueOutput(values[tokens]), "bradley_terry")(
                batch
            ).total
        )
    assert losses[0] == losses[1] == losses[2] and losses[0].item() == pytest.approx(0.474077, abs=1e-6)


# H24: the head is lost on save, merge or load


@pytest.mark.parametrize("name", ["reward", "reward lora"])
def test_h24_a_loaded_reward_model_scores_its_canaries_as_the_trained_one_did(stage, name):
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


def test_h25_saved_scores_have_mean_0_and_deviation_1_on_the_reference_samples(normalized, world):
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

"""Reward models from rankings, ties, steps, ensembles and encoders: each learns a planted preference and loads again."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment import load_reward_model
from alignment.adapters import LoRASpec
from alignment.algorithms.reward import EnsembleConfig, bootstrap_counts, objective_loss_fn
from alignment.commands.export import export_model
from alignment.data.batches import Example, collate_pairs, collate_rankings
from alignment.data.config import DataConfig
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_wordpiece
from alignment.errors import UserError
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import save_model
from alignment.models.outputs import ValueOutput
from alignment.models.shared_weights import SharedWeights
from alignment.reward_model import load_frozen_reward_model
from alignment.training import OptimConfig, TrainingConfig
from tests.conftest import read_lines, write_lines
from tests.examples import pair_example, ranked_example

WORDS = ["pool", "bus", "spa", "tour", "bar", "view"]
MOODS = ["awful", "poor", "fair", "good", "lovely"]  # a known reward: the place in this list, summed over a response
QUICK = {"training": TrainingConfig(batch_size=16, epochs=8), "optim": OptimConfig(learning_rate=3e-3)}


def response(rng, count=2):
    """A response and its reward, linear in its words."""
    moods = [rng.randrange(len(MOODS)) for _ in range(count)]
    return " " + " and ".join(f"the {rng.choice(WORDS)} is {MOODS[mood]}" for mood in moods), sum(moods)


def rankings(path, count, seed, size=4):
    """Rows of 2 to `size` ranked responses, with ties where rewards are equal."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        found = dict(response(rng) for _ in range(rng.randint(2, size)))
        if len(found) > 1 and len(set(found.values())) > 1:
            rows.append(
                {"prompt": f"How is the {rng.choice(WORDS)}?", "responses": list(found), "scores": list(found.values())}
            )
    return write_lines(path, rows)


def pairs(path, count, seed):
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        (one, high), (two, low) = response(rng), response(rng)
        if high > low:
            rows.append({"prompt": f"How is the {rng.choice(WORDS)}?", "chosen": one, "rejected": two})
    return write_lines(path, rows)


def data_of(make, tmp_path, count=96):
    return DataConfig(train=make(tmp_path / "train.jsonl", count, 0), evaluation=make(tmp_path / "held.jsonl", 32, 1))


@pytest.mark.parametrize("loss", ["ranking", "plackett_luce", "rao_kupper"])
def test_a_known_reward_is_recovered_from_rankings(loss, checkpoints, make_stage, tmp_path, read_metrics):
    run, config = make_stage(
        "reward", checkpoints["llama"], tmp_path / "run", data=data_of(rankings, tmp_path), loss=loss, **QUICK,
    )  # fmt: skip
    reward = load_reward_model(str(run(config)))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["held_out_accuracy"] > 0.85 and last["held_out_top1"] > 0.6 and last["held_out_margin"] > 0
    rng = random.Random(7)
    texts = [response(rng) for _ in range(60)]
    scores = reward.score([("How is the bus?", text) for text, _ in texts])
    rewards = torch.tensor([float(value) for _, value in texts])
    assert torch.corrcoef(torch.stack([scores, rewards]))[0, 1] > 0.8


def test_pairs_cost_the_same_as_comparisons_and_as_rankings_of_two(tmp_path):
    side = lambda *ids: Example.single([1, *ids], [False] + [True] * len(ids), "r")  # noqa: E731
    rows = [(side(3, 4), side(5)), (side(6), side(7, 8, 9)), (side(4), side(4, 4))]
    values = torch.randn(20, generator=torch.Generator().manual_seed(0))
    model = lambda batch, tokens: ValueOutput(values[batch.tokens[tokens]])  # noqa: E731
    [two] = collate_pairs([pair_example(a, b, 0.5, "r") for a, b in rows], 100)
    [group] = collate_rankings([ranked_example((b, a), (1, 0), "r", margin=0.5) for a, b in rows], 100)
    found = [
        objective_loss_fn(model, loss, center_coef=0.1)(batch)
        for loss, batch in (("bradley_terry", two), ("ranking", group))
    ]
    assert_close(found[0].total, found[1].total)
    assert two.weight == group.weight == 3
    for name in ("accuracy", "ties", "margin"):
        total, number = found[1].means[name]
        assert_close(total / number, found[0].metrics[name] / 3)


def test_a_prompt_counts_once_however_groups_are_cut():
    """InstructGPT's mean over prompts: sums over micro-batches of any cut divide by the same weight."""
    rng = random.Random(0)
    rows = [
        ranked_example(
            tuple(Example.single([1, rng.randrange(40), place + 2], [False, True, True], f"r{row}") for place in range(size)),
            tuple(rng.sample(range(size), size)), f"r{row}",
        )
        for row, size in enumerate((2, 5, 9, 3, 4, 2))
    ]  # fmt: skip
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for loss in ("ranking", "plackett_luce", "rao_kupper"):
        loss_fn = objective_loss_fn(lambda batch, tokens: ValueOutput(values[batch.tokens[tokens]] * 3), loss)
        sums = []
        for tokens in (10**6, 40, 1):
            batches = collate_rankings(rows, tokens)
            found = [loss_fn(batch) for batch in batches]
            assert sum(batch.weight for batch in batches) == 6
            sums.append(torch.stack([torch.stack([each.total, each.means["top1"][0]]) for each in found]).sum(0))
        assert_close(sums[0], sums[1])
        assert_close(sums[0], sums[2])


def test_rows_whose_responses_all_tie_are_left_out_where_they_say_nothing(checkpoints, ran, tmp_path, capsys):
    rows = read_lines(rankings(tmp_path / "r.jsonl", 20, 0))
    rows[3]["scores"] = [1] * len(rows[3]["responses"])
    path = write_lines(tmp_path / "tied.jsonl", rows)
    for loss, kept in (("ranking", 19), ("rao_kupper", 20)):
        ran(
            "reward", checkpoints["llama"], tmp_path / loss, data=DataConfig(train=path), loss=loss,
            training=TrainingConfig(batch_size=8, max_steps=1),
        )  # fmt: skip
        assert f"{kept} of 20 rows kept" in capsys.readouterr().err


# Ensembles


@pytest.mark.parametrize("kind", ["heads", "adapters"])
def test_an_ensemble_scores_by_mean_lowest_or_mean_less_spread(kind, checkpoints, make_stage, tmp_path, read_metrics):
    more = {"adapter": LoRASpec(rank=4, alpha=16.0)} if kind == "adapters" else {}
    ensemble = EnsembleConfig(members=3, kind=kind, bootstrap=True)
    run, config = make_stage(
        "reward", checkpoints["llama"], tmp_path / "run", data=data_of(pairs, tmp_path), ensemble=ensemble, **more,
        training=TrainingConfig(batch_size=16, epochs=4), optim=OptimConfig(learning_rate=5e-3),
    )  # fmt: skip
    directory = str(run(config))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["held_out_accuracy"] > 0.75 and last["held_out_spread"] > 0
    reward = load_reward_model(directory)
    rng = random.Random(3)
    known = [("How is the bus?", response(rng)[0]) for _ in range(30)]
    members = reward.score_members(known)
    assert members.shape == (30, 3)
    assert_close(reward.score(known), members.mean(1))
    assert_close(load_reward_model(directory, combine="min").score(known), members.amin(1))
    lower = load_frozen_reward_model(directory, SharedWeights(), combine="lower", std_coef=2.0)
    assert_close(lower.score(known), members.mean(1) - 2 * members.std(1, correction=0), atol=1e-5, rtol=1e-5)


def test_an_ensemble_of_heads_opens_in_transformers_with_a_label_for_each(checkpoints, ran, tmp_path):
    import transformers

    directory = ran(
        "reward", checkpoints["llama"], tmp_path / "run", ensemble=EnsembleConfig(members=3),
        training=TrainingConfig(batch_size=8, max_steps=1),
    )  # fmt: skip
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    reward = load_reward_model(str(directory))
    ids = [list(one.ids) for one in reward.encode([("How are you?", " Well."), "A text"])]
    with torch.no_grad():
        logits = torch.cat([theirs(torch.tensor([row])).logits for row in ids])
    assert theirs.config.num_labels == 3 and logits[0].unique().numel() == 3
    assert_close(reward.members_of_ids(ids), logits, atol=1e-5, rtol=1e-5)


def test_bootstrap_counts_are_poisson_and_fixed_by_seed_member_and_row():
    rows = [f"rows.jsonl:{number}" for number in range(4000)]
    counts = bootstrap_counts(rows, 0, 3)
    assert_close(counts, bootstrap_counts(rows[::-1], 0, 3).flip(0))
    assert (counts != bootstrap_counts(rows, 1, 3)).any() and (counts[:, 0] != counts[:, 1]).any()
    assert counts.mean().item() == pytest.approx(1, abs=0.05) and counts.var().item() == pytest.approx(1, abs=0.1)
    assert (counts == 0).float().mean().item() == pytest.approx(0.3679, abs=0.02)


# Steps


def test_a_process_reward_model_learns_step_labels(checkpoints, make_stage, tmp_path, read_metrics):
    def steps(path, count, seed):
        rng, rows = random.Random(seed), []
        for _ in range(count):
            moods = [rng.choice(["awful", "lovely"]) for _ in range(rng.randint(1, 4))]
            rows.append(
                {
                    "prompt": "Describe the hotel.",
                    "completions": [f"the {rng.choice(WORDS)} is {mood}" for mood in moods],
                    "labels": [mood == "lovely" for mood in moods],
                }
            )
        return write_lines(path, rows)

    run, config = make_stage(
        "reward", checkpoints["llama"], tmp_path / "run", data=data_of(steps, tmp_path), loss="steps", **QUICK
    )
    reward = load_reward_model(str(run(config)))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["held_out_accuracy"] > 0.9
    texts = ["the pool is lovely", "the bus is awful", "the spa is lovely"]
    right = reward.score_steps("Describe the hotel.", texts)
    assert right.shape == (3,) and right[0] > 0.5 > right[1]
    assert_close(reward.score_steps("Describe the hotel.", texts, document="min"), right.min())
    assert_close(reward.score_steps("Describe the hotel.", texts, document="product"), right.prod())
    for steps in ([], texts * 100):  # no step, and more than the model's positions hold
        with pytest.raises(
            UserError, match="have no score: there must be a step, and all of them must fit into the 320"
        ):
            reward.score_steps("Describe the hotel.", steps)


def test_scores_of_steps_need_a_model_trained_on_steps(stage):
    with pytest.raises(
        UserError, match="need a decoder trained with loss=steps; this model is trained with loss=bradley"
    ):
        load_reward_model(str(stage("reward") / "model")).score_steps("p", ["a"])


# Encoders

ENCODERS = {
    "bert": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "roberta": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "deberta-v2": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "electra": {
        "hidden_size": 32, "embedding_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    },
    "albert": {
        "hidden_size": 32, "embedding_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    },
    "modernbert": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "cls_token_id": 2,
        "sep_token_id": 3,
    },
    "longformer": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "attention_window": 8,
    },
    "big_bird": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "block_size": 1,
        "num_random_blocks": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """`encoder("bert")` -> directory of a tiny one with a WordPiece tokenizer of the rows' words."""
    words = " ".join([*WORDS, *MOODS, "how is the", "and", "?"])
    tokenizer = train_wordpiece([words] * 4, 120)

    def make(family):
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = {
            "model_type": family, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
            **ENCODERS[family],
        }  # fmt: skip
        save_model(build_model(config), folder)
        save_tokenizer(tokenizer, folder)
        return str(folder)

    return make


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_trained_by_the_same_verb_and_opens_in_transformers(family, encoder, ran, tmp_path, read_metrics):
    import transformers

    data = replace(data_of(pairs, tmp_path), max_length=64)
    directory = ran(
        "reward", encoder(family), tmp_path / "run", data=data, optim=OptimConfig(learning_rate=3e-3),
        training=TrainingConfig(batch_size=16, epochs=8 if family == "bert" else 1),
    )  # fmt: skip
    if family == "bert":
        assert read_metrics(tmp_path / "run")[-1]["held_out_accuracy"] > 0.85
    reward = load_reward_model(str(directory))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    texts = [("how is the bus ?", "the bus is lovely"), ("how is the bar ?", "the bar is awful and the view is poor")]
    with torch.no_grad():
        expected = torch.stack([theirs(**reward.tokenizer(*pair, return_tensors="pt")).logits[0, 0] for pair in texts])
    assert_close(reward.score(texts), expected, atol=1e-5, rtol=1e-4)
    assert_close(reward.score(texts), torch.cat([reward.score([text]) for text in texts]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", ["lora", "heads", "ranking"])
def test_an_encoder_takes_adapters_ensembles_and_rankings(settings, encoder, make_stage, tmp_path, read_metrics):
    make = rankings if settings == "ranking" else pairs
    more = {
        "lora": {"adapter": LoRASpec(rank=4, alpha=16.0)},
        "heads": {"ensemble": EnsembleConfig(members=2, bootstrap=True)},
        "ranking": {"loss": "ranking"},
    }[settings]
    data = replace(data_of(make, tmp_path), max_length=64)
    run, config = make_stage("reward", encoder("bert"), tmp_path / "run", data=data, **QUICK, **more)
    reward = load_reward_model(str(run(config)))
    assert read_metrics(tmp_path / "run")[-1]["held_out_accuracy"] > 0.7
    good, bad = reward.score([("how is the bus ?", "the bus is lovely"), ("how is the bus ?", "the bus is awful")])
    assert good > bad
    texts = ["the bus is lovely", ("how is the bar ?", "poor")]
    assert reward.score_members(texts).shape == (2, 2 if settings == "heads" else 1)
    exported = export_model(str(tmp_path / "run" / "model"), None, str(tmp_path / "exported"))
    assert (exported / "canaries.json").is_file()
    assert_close(load_reward_model(str(exported)).score_members(texts), reward.score_members(texts))


def test_long_rows_of_an_encoder_lose_the_prompts_beginning(encoder, ran, tmp_path, capsys):
    rng = random.Random(0)
    rows = [
        {"prompt": "how is the " + "bus " * 60, "chosen": response(rng)[0] + " a", "rejected": response(rng)[0] + " b"}
        for _ in range(8)
    ]
    data = DataConfig(train=write_lines(tmp_path / "long.jsonl", rows), max_length=40, max_cut_share=1.0)
    ran("reward", encoder("bert"), tmp_path / "run", data=data, training=TrainingConfig(batch_size=8, max_steps=1))
    assert "cut 8: prompt longer than fits" in capsys.readouterr().err


def test_what_an_encoder_cannot_learn_is_refused_early(encoder, make_stage, tmp_path):
    policy = encoder("bert")
    Path(policy, "model.safetensors").write_bytes(b"not read")
    run, config = make_stage("reward", policy, tmp_path / "a", loss="steps")
    with pytest.raises(
        UserError, match="this model is an encoder, and a reward model of this loss starts from a decoder"
    ):
        run(config)
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "chosen": "a b", "rejected": "c d"}]
    data = DataConfig(train=write_lines(tmp_path / "chat.jsonl", rows))
    run, config = make_stage("reward", policy, tmp_path / "b", data=data)
    with pytest.raises(UserError, match=r"chat\.jsonl:1: the prompt is a list of messages, and an encoder reads texts"):
        run(config)

"""Plans of reward runs: encoders, ensembles of heads and adapters, K responses and steps, against counts by hand."""

import json

import pytest

from alignment.adapters import LoRASpec
from alignment.algorithms.reward import EnsembleConfig, RewardConfig
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.planning.layout import Device, Layout
from alignment.planning.plan import make_plan
from alignment.training import TrainingConfig

CPU = Device(False, None, "cpu", 1.0)
WIDTH, INNER, LAYERS, TOKENS, RANK = 64, 128, 2, 512, 4
# A layer: query and output, key and value of 2 of 4 heads, gate, up and down, 2 norms; then the table and the last norm.
TRUNK = LAYERS * (2 * WIDTH**2 + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER + 2 * WIDTH) + TOKENS * WIDTH + WIDTH
LORA = LAYERS * RANK * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))  # both factors of every linear layer


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Directories with nothing but the config.json of a Llama and of a BERT."""
    llama = {
        "model_type": "llama", "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    bert = {
        "model_type": "bert", "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    found = {}
    for name, config in (("llama", llama), ("bert", bert)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = str(folder)
    return found


def plan_of(start, layout=None, **changes):
    config = RewardConfig(
        policy=start, data=DataConfig("nowhere.jsonl", max_length=64), output="out",
        training=TrainingConfig(batch_size=4, micro_batch_tokens=512, max_steps=3), **changes,
    )  # fmt: skip
    return make_plan(config, layout or Layout(), CPU)


def activations(plan):
    return sum(size for name, size in plan.peak.parts.items() if name.startswith("activations"))


@pytest.mark.parametrize("members", [1, 3])
def test_an_ensemble_of_heads_is_one_trunk_with_a_row_for_each(starts, members):
    ensemble = None if members == 1 else EnsembleConfig(members=members)
    [role] = plan_of(starts["llama"], ensemble=ensemble).roles
    assert (role.parameters, role.trained) == (TRUNK + members * WIDTH,) * 2


def test_an_ensemble_of_adapters_holds_the_base_once_and_runs_it_for_each(starts):
    one = plan_of(starts["llama"], adapter=LoRASpec(rank=RANK))
    three = plan_of(starts["llama"], adapter=LoRASpec(rank=RANK), ensemble=EnsembleConfig(members=3, kind="adapters"))
    assert one.roles[0].trained == LORA + WIDTH and three.roles[0].trained == 3 * (LORA + WIDTH)
    assert three.roles[0].parameters == TRUNK + 3 * (LORA + WIDTH)
    assert 2.5 < three.length.operations / one.length.operations < 3.5
    assert activations(three) > 2 * activations(one)
    with pytest.raises(UserError, match=r"take ensemble\.kind=heads, or another launch file"):
        plan_of(
            starts["llama"], Layout("fsdp2", 2, 2), adapter=LoRASpec(rank=RANK),
            ensemble=EnsembleConfig(members=3, kind="adapters"),
        )  # fmt: skip


@pytest.mark.parametrize("loss", ["ranking", "plackett_luce", "rao_kupper"])
def test_a_row_of_k_responses_is_as_long_as_they_are(starts, loss):
    pairs, groups = plan_of(starts["llama"]), plan_of(starts["llama"], loss=loss)
    assert groups.length.tokens == 2 * pairs.length.tokens == 3 * 4 * 4 * 64
    assert activations(groups) == pytest.approx(activations(pairs), rel=0.2)  # micro-batches of as many tokens


def test_a_row_of_steps_is_one_response(starts):
    assert plan_of(starts["llama"], loss="steps").length.tokens == 3 * 4 * 64
    with pytest.raises(UserError, match="an encoder learns no scores of steps"):
        plan_of(starts["bert"], loss="steps")


@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=RANK)])
def test_an_encoder_counts_as_its_sequence_classifier(starts, adapter):
    import transformers

    ensemble = EnsembleConfig(members=2)
    plan = plan_of(starts["bert"], adapter=adapter, ensemble=ensemble, loss="ranking")
    config = transformers.AutoConfig.from_pretrained(starts["bert"], num_labels=2)
    whole = sum(p.numel() for p in transformers.BertForSequenceClassification(config).parameters())
    [role] = plan.roles
    if adapter is None:
        assert (role.parameters, role.trained) == (whole, whole)
    else:
        assert role.parameters - role.trained < whole and role.trained < whole / 4

"""Stages refuse models of another architecture in words, before any weight is read."""

import json

import pytest
import torch
from safetensors.torch import save_file

from alignment import load_reward_model
from alignment.data.config import DataConfig
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.errors import UserError
from alignment.evaluation import reward_accuracy
from alignment.models.build import build_model
from alignment.models.huggingface.checkpoint import save_model
from tests.conftest import read_lines

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 2},
    "bert": SMALL | {"max_position_embeddings": 320},
    "pegasus": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    "mpnet": SMALL,
}
KINDS = {"t5": "encoder-decoder", "bert": "encoder", "pegasus": "encoder-decoder", "mpnet": "encoder"}
FOREIGN = ("pegasus", "mpnet")


@pytest.fixture
def directory(tmp_path, tokenizer):
    """`directory(family, task)` -> a model of it with the world's tokenizer; of a foreign one no weight but one it does not have."""

    def write(family, task="language"):
        config = {"model_type": family, "vocab_size": len(tokenizer), "pad_token_id": 2, **CONFIGS[family]}
        folder = tmp_path / family
        folder.mkdir()
        if family in FOREIGN:
            from transformers import AutoConfig

            AutoConfig.for_model(**config).save_pretrained(folder)
            save_file({"unknown": torch.zeros(1)}, folder / "model.safetensors")
        else:
            save_model(build_model(config, task), folder)
        save_tokenizer(tokenizer, folder)
        return str(folder)

    return write


REFUSED = [
    (kind, family)
    for kind in ("sft", "dpo", "reward")
    for family in CONFIGS
    if (family in FOREIGN if kind == "reward" else KINDS[family] == "encoder")
]


@pytest.mark.parametrize(("kind", "family"), REFUSED)
def test_what_a_stage_cannot_train_is_refused_before_its_weights_are_read(
    kind, family, directory, make_stage, tmp_path
):
    policy = directory(family)
    if family not in FOREIGN:
        (tmp_path / family / "model.safetensors").write_bytes(b"not read")
    run, config = make_stage(kind, policy, tmp_path / "run")
    with pytest.raises(UserError, match=rf"{family}: this model is an {KINDS[family]}, and a .* starts? from"):
        run(config)


def test_an_encoder_is_no_critic(directory, stage, make_stage, tmp_path):
    judge = directory("bert", "scalar")
    run, config = make_stage("ppo", str(stage("sft") / "model"), tmp_path / "run", reward_model=judge)
    with pytest.raises(UserError, match=r"bert: this model is an encoder, and a value model .* set value_model=policy"):
        run(config)


def test_an_encoder_is_evaluated_as_it_reads_pairs_of_texts(directory, world, tmp_path):
    judge = directory("bert", "scalar")
    data = DataConfig(train=world["comparisons_heldout"], max_length=256)
    results = reward_accuracy.run(reward_accuracy.RewardEvalConfig(judge, data, str(tmp_path / "out"), bins=5))
    found, card = json.loads(results.read_text()), json.loads((tmp_path / "out" / "card.json").read_text())
    rows = read_lines(world["comparisons_heldout"])
    model = load_reward_model(judge)
    scores = {side: model.score([(row["prompt"], row[side]) for row in rows]) for side in ("chosen", "rejected")}
    assert found["margin"] == pytest.approx(float((scores["chosen"] - scores["rejected"]).mean()), abs=1e-5)
    assert found["score"]["chosen"] == pytest.approx(float(scores["chosen"].mean()), abs=1e-5)
    assert card["model"]["architecture"] == "encoder"
    assert card["robustness"]["forms"]["padded left"]["largest"] < 1e-4
    assert card["robustness"]["forms"]["bfloat16"]["largest"] > 0

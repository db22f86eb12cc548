"""Dropout where policy and reference are compared token by token: an adapter's is refused, a model's own is named."""

import json

import pytest

from alignment.adapters import LoRASpec
from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.ppo.ppo import PPOConfig
from alignment.data.config import DataConfig
from alignment.training import TrainingConfig


@pytest.mark.parametrize(("config", "stage"), [(DPOConfig, "DPO"), (PPOConfig, "PPO")])
def test_an_adapters_dropout_is_refused(config, stage):
    more = {} if config is DPOConfig else {"reward_model": "r"}
    with pytest.raises(ValueError, match=rf"adapter\.dropout must be 0 in {stage}, got 0\.1"):
        config(policy="p", data=DataConfig(train="t"), output="o", adapter=LoRASpec(dropout=0.1), **more)


def test_a_models_own_dropout_is_said_to_be_off(write_checkpoint, stage, ran, tmp_path):
    few = TrainingConfig(batch_size=4, max_steps=1)
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "summary_first_dropout": 0.1}
    policy = write_checkpoint(tmp_path / "policy", "gpt2", **rates)
    more = {"dpo": {}, "ppo": {"reward_model": str(stage("reward gpt2") / "model"), "epochs": 1, "minibatches": 1}}
    for kind in more:
        ran(kind, policy, tmp_path / kind, training=few, **more[kind])
        notes = json.loads((tmp_path / kind / "lineage.json").read_text())["notes"]
        [note] = [note for note in notes if note.startswith("dropout: off")]
        assert note.endswith("has resid_pdrop=0.1")

"""A run that is stopped and started again ends exactly as one that was not (I12)."""

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.adapters import LoRASpec
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.rewards import LengthSpec, RewardSpec
from alignment.training import TrainingConfig
from tests.stopping import run_stopped

TIMES = ("second", "mfu")  # names of what differs from run to run
LORA = LoRASpec(rank=2, dropout=0.1)
JUDGE = "alignment.evaluation.judges:longer_judge"


@pytest.fixture
def changes(stage, world):
    """What each kind of run is made of beside the defaults: all the state there is."""
    text = DataConfig(train=world["pretrain"], max_length=128)
    everything = {
        "pretrain": text,
        "pretrain_coef": 0.5,
        "pretrain_batch_size": 4,
        "kl_target": 0.1,
        "kl_horizon": 50.0,
    }
    reward_model = str(stage("reward") / "model")
    return {
        "sft": {"training": TrainingConfig(batch_size=8, epochs=2)},
        "sft LoRA": {"training": TrainingConfig(batch_size=8, epochs=2), "adapter": LORA},
        "reward LoRA": {"training": TrainingConfig(batch_size=8, epochs=2), "adapter": LORA},
        "dpo": {"training": TrainingConfig(batch_size=8, epochs=2)},
        "ppo": {"training": TrainingConfig(batch_size=8, max_steps=4), "reward_model": reward_model, **everything},
        "ppo behind": {
            "training": TrainingConfig(batch_size=8, max_steps=4),
            "reward_model": reward_model,
            "rollouts_behind": 1,
            "top_p": 0.9,
        },
        "ppo LoRA": {
            "training": TrainingConfig(batch_size=8, max_steps=4),
            "reward_model": reward_model,
            "adapter": LoRASpec(rank=2),
        },
        "online_dpo": {
            "training": TrainingConfig(batch_size=8, max_steps=4),
            "judge": JUDGE,
            "loss": "bco",
            "beta": 2.0,
        },
        "online_dpo LoRA": {
            "training": TrainingConfig(batch_size=8, max_steps=4),
            "reward_model": reward_model,
            "responses_per_prompt": 3,
            "adapter": LoRASpec(rank=2),
        },
        "online_dpo rewards": {
            "training": TrainingConfig(batch_size=8, max_steps=4),
            "rewards": [
                RewardSpec(reward_model, normalize="running", clip=(-1.0, 1.0)),
                RewardSpec(length=LengthSpec(max=4)),
            ],
            "loss": "odpo",
        },
    }


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        "sft",
        "sft LoRA",
        "reward LoRA",
        "dpo",
        "ppo",
        "ppo behind",
        "ppo LoRA",
        "online_dpo",
        "online_dpo LoRA",
        "online_dpo rewards",
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(name, stop, changes, stage, make_stage, tmp_path, read_metrics):
    kind, policy = name.split()[0], str(stage("sft") / "model")
    run, config = make_stage(kind, policy, tmp_path / "whole", **changes[name])
    whole = run(config)
    run, config = make_stage(kind, policy, tmp_path / "parts", **changes[name])
    exit_code = run_stopped(run, config, stop)
    assert exit_code == 143
    assert len(read_metrics(tmp_path / "parts")) == stop and not (tmp_path / "parts" / "model").exists()
    parts = run(config)
    file = "adapter_model.safetensors" if "LoRA" in name else "model.safetensors"
    assert_close(load_file(parts / file), load_file(whole / file), rtol=0, atol=0)
    lines = [
        [{k: v for k, v in line.items() if not any(name in k for name in TIMES)} for line in read_metrics(o.parent)]
        for o in (whole, parts)
    ]
    assert lines[0] == lines[1] and len(lines[0]) > stop


def test_other_settings_are_no_resume(stage, make_stage, tmp_path):
    """The learning rate of the second command is not silently ignored."""
    policy = str(stage("sft") / "model")
    training = TrainingConfig(batch_size=8, max_steps=2, save_every_steps=1)
    run, config = make_stage("sft", policy, tmp_path, training=training)
    run(config)
    run, config = make_stage("sft", policy, tmp_path, training=training, adapter=LORA)
    with pytest.raises(UserError, match="adapter"):
        run(config)

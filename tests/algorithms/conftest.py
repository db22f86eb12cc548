"""PPO from the SFT policy and the reward model: as a run, and as its parts before the first iteration."""

import pytest

from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.training import Run


@pytest.fixture
def ppo(stage, make_stage, tmp_path):
    """`ppo(**config changes)` -> its run function and config."""

    def make(output="ppo", policy="sft", reward_model="reward", **changes):
        reward_model = changes.pop("reward_directory", None) or str(stage(reward_model) / "model")
        return make_stage("ppo", str(stage(policy) / "model"), tmp_path / output, reward_model=reward_model, **changes)

    return make


@pytest.fixture
def built(stage, make_stage, tmp_path):
    """`built(**config changes)` -> config, data and state, from the SFT policy or another one."""

    def build(policy=None, name="run", **changes):
        policy = policy or str(stage("sft") / "model")
        _, config = make_stage("ppo", policy, tmp_path / name, reward_model=str(stage("reward") / "model"), **changes)
        with Run(config.output, {}, stage="ppo") as run:
            data = read_data(config, run)
            return config, data, build_state(config, data)

    return build

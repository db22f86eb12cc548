"""Settings that a stage refuses in words when its config is made: out of range, without effect, or against each other."""

import math
import re
from dataclasses import replace

import pytest

from alignment.adapters import LoRASpec
from alignment.algorithms.best_of_n import BestOfNConfig
from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.online_dpo import OnlineDPOConfig
from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.ppo.config import HeldOutConfig
from alignment.algorithms.reward import EnsembleConfig, RewardConfig
from alignment.algorithms.sft import SamplesConfig, SFTConfig
from alignment.data.config import DataConfig
from alignment.rewards import LengthSpec, RewardSpec
from alignment.training import TrainingConfig

ROWS = DataConfig(train="t")
HELD_OUT = DataConfig(train="t", evaluation="e")
STREAMED = DataConfig(train="t", streaming=True)
COMMON = {"policy": "p", "data": ROWS, "output": "o"}
MORE = {
    PPOConfig: COMMON | {"reward_model": "r"},
    OnlineDPOConfig: COMMON | {"judge": "gold"},
    BestOfNConfig: COMMON | {"reward_model": "r"},
    HeldOutConfig: {},
    SamplesConfig: {},
}
JUDGE = HeldOutConfig(rewards=[RewardSpec(length=LengthSpec(target=3))])
KEPT = {key: TrainingConfig(evaluate_every_steps=5, keep_best=key) for key in ("held_out_score", "held_out_loss")}
ONE, TWO = RewardSpec(regex="a", name="n"), RewardSpec(regex="b", name="n")

REFUSED = {
    SFTConfig: [
        ({"label_smoothing": 1.0}, "label_smoothing must be below 1"), ({"z_loss": -1.0}, "z_loss must be at least 0"),
        ({"neftune_alpha": 0.0}, "neftune_alpha must be above 0"), ({"neftune_alpha": math.nan}, "neftune_alpha must be"),
    ],
    SamplesConfig: [({"prompts": 0}, "must be"), ({"max_new_tokens": 0}, "must be"), ({"temperature": -1.0}, "must be")],
    RewardConfig: [
        ({"theta": 1.0}, "theta must be above 1"),
        ({"theta": 3.0}, "theta goes with loss=rao_kupper; loss=bradley_terry has none"),
        ({"ensemble": EnsembleConfig(kind="adapters")}, "needs `adapter`"),
        ({"loss": "steps", "center_coef": 0.1}, "center_coef holds scores of whole responses"),
    ],
    DPOConfig: [
        ({"beta": 0.0}, "beta"), ({"label_smoothing": 0.5}, "label_smoothing"), ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"f_alpha": 0.3}, "f_alpha"), ({"adapter": LoRASpec(dropout=0.1)}, "adapter.dropout must be 0 in DPO, got 0.1"),
        ({"loss": "ipo", "gamma": 1.0}, "gamma is a parameter of simpo"), ({"loss": "sigmoyd"}, "'sigmoyd' is unknown"),
        ({"loss": {"kto": 1.0, "ipo": 1.0}}, "different rows"), ({"loss": "simpo", "reference": "m"}, "simpo needs none"),
        ({"loss": "kto", "reference_log_probs": "cache"}, "cannot be computed beforehand"),
        ({"loss": "nca_pair", "f_divergence": "js"}, "needs the rewards"),
        ({"loss": "exo_pair", "label_smoothing": 0.0}, "label_smoothing"),
        ({"data": STREAMED, "reference_log_probs": "cache"}, "cache computes them for all rows before"),
        ({"data": STREAMED, "loss": "odpo"}, "odpo"),
    ],
    PPOConfig: [
        ({"temperature": 0.0}, "temperature"), ({"max_new_tokens": 0}, "max_new_tokens"), ({"epochs": 0}, "epochs"),
        ({"minibatches": 0}, "minibatches"), ({"clip_range": 0.0}, "clip_range"), ({"kl_horizon": 0.0}, "kl_horizon"),
        ({"value_clip_range": -0.1}, "value_clip_range"), ({"gamma": 1.1}, "gamma"), ({"gae_lambda": -0.1}, "gae_lambda"),
        ({"pretrain_coef": -1.0}, "pretrain_coef"), ({"pretrain_coef": 0.5}, "pretrain_coef"), ({"minibatches": 33}, "minibatches"),
        ({"importance_cap": 0.0}, "importance_cap"), ({"rollouts_behind": 2}, "rollouts_behind"), ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"), ({"adapter": LoRASpec(dropout=0.1)}, "adapter.dropout must be 0 in PPO, got 0.1"),
        ({"pretrain": HELD_OUT, "pretrain_coef": 0.5}, "pretrain.evaluation is not read"),
        *[({"ratio": "sequence", "advantages": name, "responses_per_prompt": 2}, "ratio sequence")
          for name in ("gae", "reinforce++", "remax")],
        ({"data": HELD_OUT}, "data.evaluation is not read"),
        ({"training": KEPT["held_out_score"]}, "training.keep_best has no effect"),
        ({"held_out": JUDGE}, "held_out needs prompts: set data.evaluation"),
        ({"held_out": replace(JUDGE, kl_budget=1.0), "data": HELD_OUT}, "held_out.kl_budget ends the run beyond the budget"),
        (
            {"held_out": JUDGE, "data": DataConfig(train="t", evaluation_share=0.1), "training": KEPT["held_out_loss"]},
            "there are held_out_win_rate and held_out_score",
        ),
        (
            {"training": TrainingConfig(ema_decay=0.9), "held_out": JUDGE, "data": HELD_OUT},
            "training.ema_decay has no effect",
        ),
    ],
    HeldOutConfig: [
        ({}, "say what is rewarded"), ({"reward_model": "r", "kl_budget": 0.0}, "kl_budget"),
        ({"reward_model": "r", "seed": -1}, "seed"),
    ],
    OnlineDPOConfig: [
        ({"judge": "reward_model"}, "judge=reward_model with reward_model=DIR"), ({"judge": "god"}, "'god' is unknown"),
        ({"reward_model": "x"}, "gold reads no reward_model"), ({"loss": "kto"}, "other rows than the pairs"),
        ({"responses_per_prompt": 1}, "responses_per_prompt must be at least 2"), ({"beta": 0.0}, "beta must be above 0"),
        ({"loss": "simpo", "reference": "x"}, "simpo needs none"), ({"gamma": 1.0}, "gamma is a parameter of simpo"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"missing_end_penalty": -1.0}, "missing_end_penalty must be at least 0"),
        ({"minibatches": 64, "training": TrainingConfig(batch_size=8)}, "minibatches (64) cannot exceed"),
        ({"data": HELD_OUT}, "data.evaluation is not read"), ({"metrics": ["gold"]}, "metrics ['gold'] are unknown"),
        ({"training": TrainingConfig(ema_decay=0.9)}, "training.ema_decay has no effect"),
        ({"judge": "reward_model", "reward_model": "x", "rewards": [ONE]}, "both cannot be given"),
        ({"rewards": [ONE]}, "judge gold reads no"), ({"judge": "m:f", "rewards": [ONE]}, "judge m:f reads no"),
        ({"judge": "reward_model", "rewards": [ONE, TWO]}, "two entries are named 'n'"),
    ],
    BestOfNConfig: [
        ({"reward_model": None}, "rewards "), ({"temperature": 0.0}, "temperature "), ({"keep": 9}, "keep "),
        ({"keep": 0}, "keep "), ({"threshold": math.nan}, "threshold "), ({"write": []}, "write "), ({"top_p": 0.0}, "top_p "),
        ({"write": ["comparisons"], "responses_per_prompt": 1}, "write "), ({"responses_per_prompt": 0}, "responses_per_prompt "),
        ({"data": DataConfig(train="x", evaluation_share=0.1)}, "data "),
        ({"data": DataConfig(train="x", mixing="proportional")}, "without data.mixing;"),
    ],
}  # fmt: skip
CASES = [(config, settings, why) for config, rows in REFUSED.items() for settings, why in rows]


@pytest.mark.parametrize(("config", "settings", "why"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_a_setting_is_refused_with_its_reason(config, settings, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        config(**{**MORE.get(config, COMMON), **settings})

"""PPO without its loop: configs, rollouts and states for tests that take single steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.algorithms.ppo.state import PPOState
from alignment.algorithms.rollouts.rollout import Rollout
from alignment.data.batches import Example
from alignment.data.config import DataConfig
from alignment.training import Run


def state_of(config: PPOConfig) -> tuple[PPOState, Sequence[Example]]:
    """State and first prompts of a config, built as a run builds them."""
    with Run(config.output, {}, stage="ppo") as directory:
        data = read_data(config, directory)
        return build_state(config, data), data.prompts.rows_at(0)


@torch.no_grad()
def exact_kl(
    policy: nn.Module,
    reference: nn.Module,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    temperature=1.0,
) -> list[float]:
    """KL(policy || reference) of each response's tokens, written out over the vocabulary, one response at a time."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        p, q = (
            (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).double().log_softmax(-1)
            for model in (policy, reference)
        )
        found.append(float((p.exp() * (p - q)).sum()))
    return found


def move(model: nn.Module, size: float = 0.02) -> None:
    """Add noise to the weights of a model, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def config_of(**settings: Any) -> PPOConfig:
    """A config of names alone, for what reads its settings and loads nothing."""
    return PPOConfig(policy="p", reward_model="r", data=DataConfig(train="t"), output="o", **settings)


def rollout_of(lengths: Sequence[int], **changes: Any) -> Rollout:
    """Responses of these lengths that ended, with score 1 and all else 0, but for `changes`."""
    rows = len(lengths)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    zero = torch.zeros(mask.shape)
    fields = {
        "prompts": [[1]] * rows, "responses": [[5] * length for length in lengths], "numbers": list(range(rows)),
        "mask": mask, "log_probs": zero, "sampled_log_probs": zero, "reference_log_probs": zero, "values": zero,
        "scores": torch.ones(rows), "ended": torch.ones(rows, dtype=torch.bool),
    }  # fmt: skip
    return Rollout(**(fields | changes))

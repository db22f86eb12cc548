"""The state of a PPO run without its loop, for tests that take single steps."""

from collections.abc import Sequence

import torch
from torch import nn

from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.ppo.setup import build_state, read_data
from alignment.algorithms.ppo.state import PPOState
from alignment.data.batches import Example
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

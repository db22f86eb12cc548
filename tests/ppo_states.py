"""The state of a PPO run without its loop, for tests that take single steps."""

from collections.abc import Sequence

from alignment.algorithms.ppo import PPOConfig
from alignment.algorithms.ppo.setup import PPOState, build_state, read_data
from alignment.data.examples import PromptExample
from alignment.training import Run


def state_of(config: PPOConfig) -> tuple[PPOState, Sequence[PromptExample]]:
    """State and first prompts of a config, built as a run builds them."""
    with Run(config.output, {}, stage="ppo") as directory:
        data = read_data(config, directory)
        return build_state(config, data), data.prompts.rows_at(0)

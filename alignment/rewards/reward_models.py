"""Reward models as judges of sampled responses: by their very ids where tokenizers agree, else by texts."""

from collections.abc import Sequence

from torch import Tensor

from alignment.data.examples import PromptExample
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.generation import response_text
from alignment.reward_model import RewardModel
from alignment.rewards.combine import Scorer


def response_scorer(reward_model: RewardModel, tokenizer: Tokenizer, micro_batch_tokens: int) -> Scorer:
    """Scores of responses: by their very ids where the tokenizers agree, else by the records' prompts and the texts.

    A reward model with a tokenizer or chat template of its own reads each prompt, text or messages, through that
    template, and its own end token after a response that ended.

    Args:
        tokenizer: the policy's, of which the responses' ids are.
    """
    if reward_model.shares_token_ids(tokenizer):
        return lambda prompts, responses, ended: reward_model.score_ids(
            [[*prompt.ids, *ids] for prompt, ids in zip(prompts, responses, strict=True)], micro_batch_tokens
        )

    def score(prompts: Sequence[PromptExample], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        pairs = [
            (prompt.prompt, response_text(tokenizer, ids, end))
            for prompt, ids, end in zip(prompts, responses, ended, strict=True)
        ]
        return reward_model.score(pairs, micro_batch_tokens, ended)

    return score

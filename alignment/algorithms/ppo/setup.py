"""The models and the state of a PPO run: built once, stored and restored. What is done with them is in ppo.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms.policies import Policy, load_policy, load_value_model, reference_of
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.rollout import Scorer
from alignment.algorithms.runs import check_rows, read_examples
from alignment.data.batches import collate
from alignment.data.rows.records import Prompt
from alignment.data.stream import Stream
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenize import PromptExample, encode_prompts
from alignment.errors import UserError
from alignment.generation import response_text
from alignment.loading import describe_stop_tokens, load_tokenizer, same_vocabulary
from alignment.losses import AdaptiveKL, FixedKL
from alignment.models.classifiers import SequenceClassifier
from alignment.models.lengths import check_lengths
from alignment.ragged import Ragged
from alignment.reward_model import RewardModel, load_reward_model
from alignment.training import Engine, Run, load_run_state, note_endless_warmup, save_run_state, shard_rows


@dataclass
class ScoreNormalizer:
    """Makes scores mean 0 and deviation 1 on the first samples: gain * score + bias.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (there on samples of the reference, as here).
    """

    wanted: bool = True
    gain: float = 1.0
    bias: float = 0.0
    fitted: bool = False

    def fit_once(self, scores: Tensor, add: Callable[[Tensor], Tensor]) -> None:
        """Fit on `scores` [B] of all ranks the first time; later calls change nothing."""
        if self.fitted or not self.wanted:
            return
        scores = scores.double()
        count, total = add(torch.stack([torch.ones_like(scores).sum(), scores.sum()])).tolist()
        mean = total / count
        deviation = (add(((scores - mean) ** 2).sum()).item() / count) ** 0.5
        if deviation == 0:
            raise UserError(
                "the reward model gives every sampled response the same score, so PPO has nothing to learn from; "
                "check the reward model with `alignment evaluate reward`, or set normalize_scores=false"
            )
        self.gain, self.bias, self.fitted = 1 / deviation, -mean / deviation, True


@dataclass(frozen=True)
class PPOData:
    """Prompts and the pretraining mix as streams, with the tokenizer that made them."""

    tokenizer: Any
    prompts: Stream
    iterations: int
    texts: Stream | None


@dataclass
class Parts:
    """Everything an iteration touches.

    Attributes:
        policy, value: the engines of policy and critic.
        reference: called as `reference(batch=..., temperature=...)`, without gradients.
        score: the reward model over prompts and responses.
        stop_ids: tokens that end a response.
        controller: gives the KL coefficient as `.coef`.
        tokenizer: decodes prompts and responses.
        start: how the policy was loaded, for saving it.
        pretraining: update number -> micro-batches of this rank; None without a pretraining mix.
        updates: minibatch updates taken so far.
    """

    policy: Engine
    value: Engine
    reference: Callable[..., Any]
    score: Scorer
    stop_ids: Sequence[int]
    controller: AdaptiveKL | FixedKL
    tokenizer: Any
    start: Policy
    normalizer: ScoreNormalizer = field(default_factory=ScoreNormalizer)
    pretraining: Callable[[int], list[Ragged]] | None = None
    updates: int = 0


def read_data(config: PPOConfig, run: Run) -> PPOData:
    """Read and tokenize prompts and pretraining text.

    Raises:
        UserError: bad rows, all at once.
    """
    tokenizer = load_tokenizer(config.policy)
    run.note(describe_stop_tokens(config.policy, tokenizer))
    prompts = read_examples(config.data, "prompts", tokenizer, run)
    texts = None
    if config.pretrain is not None and config.pretrain_coef > 0:
        examples = read_examples(config.pretrain, "text", tokenizer, run)
        texts = Stream(examples, config.pretrain_batch_size, config.training.seed + 1)
    # Batches run across the ends of epochs: a smaller last one could not be cut into the same minibatches.
    stream = Stream(prompts, config.training.batch_size, config.training.seed)
    return PPOData(tokenizer, stream, config.training.steps(len(prompts)), texts)


def build_parts(config: PPOConfig, data: PPOData) -> Parts:
    """Load the four networks and put the optimizers on two of them."""
    training = config.training
    total = data.iterations * config.epochs * config.minibatches
    start = load_policy(config.policy, config.adapter, data.tokenizer, config.output)
    critic = load_critic(config, data.tokenizer)
    for model in (start.model, critic.model):
        check_rows(model, data.prompts.rows, config.data.max_length, config.max_new_tokens)
    if data.texts is not None and config.pretrain is not None:
        check_rows(start.model, data.texts.rows, config.pretrain.max_length)
    # Without dropout, or the first ratio would not be 1.
    policy = Engine(start.model.eval(), config.optim, training, total_steps=total)
    value = Engine(critic.model.eval(), config.value_optim or config.optim, training, total_steps=total)
    if training.batch_size < policy.process_group.size:
        raise UserError(
            f"training.batch_size {training.batch_size} gives some of the {policy.process_group.size} processes no prompt to "
            "respond to; raise it, or start fewer processes"
        )
    reward_model = load_reward_model(config.reward_model, device=policy.process_group.device)
    check_judged(data.prompts.rows, reward_model, data.tokenizer, config)
    return Parts(
        policy=policy,
        value=value,
        reference=reference_of(start, config.reference, policy),
        score=response_scorer(reward_model, data.tokenizer, training.micro_batch_tokens),
        stop_ids=sorted(stop_token_ids(data.tokenizer)),
        controller=FixedKL(config.kl_coef)
        if config.kl_target is None
        else AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon),
        normalizer=ScoreNormalizer(wanted=config.normalize_scores),
        pretraining=None if data.texts is None else partial(_texts_of, data.texts, policy, training.micro_batch_tokens),
        tokenizer=data.tokenizer,
        start=start,
    )


def load_critic(config: PPOConfig, tokenizer: Any) -> Policy:
    """The critic: the trunk of the reward model or of the policy with one number per token on top."""
    if config.critic == "policy":
        return load_value_model(config.policy, config.adapter, tokenizer, None, head="zero")
    own = load_tokenizer(config.reward_model)
    if not same_vocabulary(tokenizer, own):
        raise UserError(
            f"{config.reward_model}: the reward model's tokenizer differs from the policy's, so it cannot become the "
            "critic; set critic=policy"
        )
    head = "zero" if config.normalize_scores else None
    return load_value_model(config.reward_model, config.adapter, own, None, head=head)


def response_scorer(reward_model: RewardModel, tokenizer: Any, micro_batch_tokens: int) -> Scorer:
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


def check_judged(
    prompts: Sequence[PromptExample], reward_model: RewardModel, tokenizer: Any, config: PPOConfig
) -> None:
    """Refuse prompts that the reward model cannot read, or that one with a tokenizer of its own would see otherwise.

    Raises:
        UserError: prompts whose beginning was cut off, that the reward model's template refuses, or too long for it.
    """
    if reward_model.shares_token_ids(tokenizer):
        return check_rows(reward_model.model, prompts, config.data.max_length, config.max_new_tokens)
    cut = [prompt.row_id for prompt in prompts if prompt.cut]
    if cut:
        raise UserError(
            f"{config.reward_model}: the reward model has a tokenizer or chat template of its own and reads whole prompts, "
            f"while the policy sees {len(cut)} of {len(prompts)} without their beginning ({', '.join(cut[:3])}); raise "
            f"data.max_length (it is {config.data.max_length}), or leave the long prompts out"
        )
    if isinstance(reward_model.model, SequenceClassifier):
        messages = [prompt.row_id for prompt in prompts if not isinstance(prompt.prompt, str)]
        if messages:
            raise UserError(
                f"{config.reward_model}: the reward model is an encoder and reads texts, and {len(messages)} of "
                f"{len(prompts)} prompts are messages ({', '.join(messages[:3])}); take a decoder as reward model, or "
                "prompts as texts"
            )
        return
    ids = encode_prompts(
        reward_model.tokenizer, [Prompt(prompt.prompt, prompt.extra, prompt.row_id) for prompt in prompts]
    )
    lengths = [(prompt.row_id, len(tokens)) for prompt, tokens in zip(prompts, ids, strict=True)]
    check_lengths(reward_model.model, lengths, "leave these prompts out, or take another reward model", new_tokens=1)


def restore(parts: Parts, config: PPOConfig, run: Run) -> int:
    """Put back the newest checkpoint's state, if there is one; return the iteration to go on with."""
    engines = {"policy": parts.policy, "value": parts.value}
    state = load_run_state(run, engines, config.training)
    note_endless_warmup(run, engines)
    if state is None:
        return 0
    parts.updates = state["updates"]
    parts.controller.coef = state["kl_coef"]
    parts.normalizer = ScoreNormalizer(**state["normalizer"])
    return state["step"]


def store(parts: Parts, config: PPOConfig, run: Run, step: int) -> None:
    """Save a checkpoint where one is due after `step` iterations."""
    state = {
        "updates": parts.updates,
        "kl_coef": parts.controller.coef,
        "normalizer": vars(parts.normalizer),
    }
    save_run_state(run, {"policy": parts.policy, "value": parts.value}, config.training, step, state)


def _texts_of(texts: Stream, engine: Engine, micro_batch_tokens: int, update: int) -> list[Ragged]:
    """This rank's share of the texts of one update."""
    pack = partial(collate, micro_batch_tokens=micro_batch_tokens)
    return shard_rows(texts.rows_at(update), pack, engine.process_group.rank, engine.process_group.size)

"""Data and policy of a run that learns from its own samples, and where the weights lie while it samples."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from alignment.algorithms.policies import Policy, load_policy
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.rollouts.state import SamplingState
from alignment.algorithms.runs import check_rows, read_split
from alignment.algorithms.scoring import RewardSource
from alignment.data.batches import Example
from alignment.data.stream import Stream, stream_of
from alignment.data.table import column_of
from alignment.data.tokenizers.tokenizer import Tokenizer, known_tokens
from alignment.errors import UserError
from alignment.loading import Checkpoint, describe_stop_tokens, load_tokenizer
from alignment.models.external.models import ExternalModel
from alignment.models.native_model import NativeModel
from alignment.models.shared_weights import SharedWeights
from alignment.models.weight_bytes import written
from alignment.training import Engine, Run
from alignment.training.distributed import ProcessGroup

USABLE = 0.9  # share of the free memory that is planned with; the allocator loses the rest between blocks of odd sizes


@dataclass(frozen=True)
class RolloutData:
    """Checkpoint and tokenizer of the policy, prompts and PPO's pretraining mix as streams, held-out prompts."""

    start: Checkpoint
    tokenizer: Tokenizer
    prompts: Stream
    iterations: int
    texts: Stream | None = None
    held_out: Sequence[Example] = ()

    def prompts_of(self, step: int) -> Sequence[Example]:
        """The prompts of iteration `step`, from 0; none after the last one."""
        return self.prompts.rows_at(step) if step < self.iterations else ()


def read_rollout_data(config: SamplingSettings, run: Run) -> RolloutData:
    """Read and tokenize prompts, and those that are held out."""
    start = Checkpoint(config.policy)
    tokenizer = load_tokenizer(start, config.chat_template)
    training = config.training
    run.note(describe_stop_tokens(start, tokenizer))
    prompts, held_out = read_split(config, "prompts", tokenizer, run)
    # Batches run across the ends of epochs: a smaller last one could not be cut into the same minibatches.
    stream = stream_of(config.data, prompts, batch_size=training.batch_size, seed=training.seed)
    return RolloutData(start, tokenizer, stream, training.steps(stream.epoch_length), held_out=held_out)


# The policy and its rewards


def source_of(config: SamplingSettings, **changes: Any) -> RewardSource:
    """The rewards of a stage that samples, with changes."""
    given: dict[str, Any] = {
        "reward_model": config.reward_model,
        "rewards": config.rewards,
        "data": config.data,
        "max_new_tokens": config.max_new_tokens,
        "micro_batch_tokens": config.training.tokens_per_forward,
    }
    return RewardSource(**(given | changes))


def load_start(config: SamplingSettings, data: RolloutData, bases: SharedWeights) -> Policy:
    """The policy to train, which can read all prompts, and draws no id without a token."""
    start = load_policy(data.start, config.adapter, data.tokenizer, config.output, bases=bases)
    start.model.known_tokens = known_tokens(data.tokenizer)
    check_prompts(start, config, data)
    return start


def check_prompts(start: Policy, config: SamplingSettings, data: RolloutData) -> None:
    """Refuse prompts that do not fit a network's positions with their responses."""
    for rows in (data.prompts.rows, data.held_out):
        if len(rows):
            check_rows(start.model, rows, config.data.max_length, config.max_new_tokens)


def policy_engine(start: Policy, config: SamplingSettings, iterations: int) -> Engine:
    """The policy's engine; without dropout, or the first ratio would not be 1."""
    total = iterations * config.epochs * config.minibatches
    engine = Engine(start.model.eval(), config.optim, config.training, total_steps=total)
    size = engine.process_group.size
    batch_size = config.training.batch_size
    if batch_size < size:
        raise UserError(
            f"training.batch_size {batch_size} gives some of the {size} processes no prompt to respond to; raise it, "
            "or start fewer processes"
        )
    return engine


# Weights of the sampling policy: whole on every device, or sharded


def choose_rollout_weights(
    config: SamplingSettings, prompts: Sequence[Example], state: SamplingState, run: Run
) -> Literal["gathered", "sharded"]:
    """`config.rollout_weights`, with `auto` decided by the free memory; noted in the run. A collective operation.

    Gathered weights stand beside the cache and logits of the samples and the optimizer's state, which the first update
    creates. Every rank must have room for them: the one with the least free memory decides.
    """
    group = state.process_group
    choice = config.rollout_weights
    whole = state.policy.backend.whole_bytes()
    if whole == 0:
        if choice == "sharded":
            run.note(
                f"rollout_weights: sharded has no effect, because {group.kind} keeps the policy whole on each process"
            )
        return "gathered"
    models = [engine.backend.unwrapped for engine in state.engines.values()]
    trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    # AdamW's two moments, sharded as the weights are; ZeRO-3 keeps an empty tensor and the number in `ds_numel`
    moments = 2 * 4 * sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained) // group.size
    other = group.largest(sampling_bytes(config, prompts, state) + moments)
    free = -group.largest(-free_bytes(group))
    figures = (
        f"the whole policy takes {written(whole)} on each device, cache, logits and optimizer state {written(other)}, "
        f"and {written(free)} are free"
    )
    if choice == "gathered" and whole > free:
        raise UserError(f"rollout_weights=gathered does not fit: {figures}; set it to sharded, or to auto")
    if choice == "auto":
        choice = "gathered" if whole + other <= USABLE * free else "sharded"
    run.note(f"rollout_weights: {choice} ({'as set' if choice == config.rollout_weights else 'auto'}): {figures}")
    if config.cuda_graphs and choice == "sharded":
        run.note("cuda_graphs: has no effect, because a step with sharded weights cannot be captured")
    return choice


def sampling_bytes(config: SamplingSettings, prompts: Sequence[Example], state: SamplingState) -> int:
    """Bytes of the cache and of the logits of one batch of samples on one device."""
    model = state.policy.backend.unwrapped
    if isinstance(model, NativeModel):
        cached = sum(2 * layer.attention.key_value_heads * layer.attention.head_dim for layer in model.spec.layers)
    else:
        assert isinstance(model, ExternalModel)
        shape = model.inner.config.get_text_config()  # at most as many heads as queries have
        cached = 2 * shape.num_hidden_layers * shape.hidden_size
    responses = config.training.batch_size * config.responses_per_prompt
    rows = min(config.micro_rollout_batch_size, -(-responses // state.process_group.size))
    tokens = int(column_of(prompts, "longest").max()) + config.max_new_tokens
    element = 2 if config.training.precision == "bf16" else 4
    logits = 3 * 4 * model.spec.vocabulary  # float32: the logits, their log-softmax and its cumulative sum
    return rows * (tokens * cached * element + logits)


def free_bytes(group: ProcessGroup) -> int:
    """Free memory of this process's device; processes that share one machine's memory get equal parts of it."""
    if group.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(group.device)
        return free + torch.cuda.memory_reserved(group.device) - torch.cuda.memory_allocated(group.device)
    import psutil

    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

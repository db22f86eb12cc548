"""Data and networks of a run that learns from its own samples, and where the policy's weights lie while it samples."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from alignment.adapters.files import read_members
from alignment.adapters.specs import PrefixSpec, PromptSpec
from alignment.algorithms.policies import Policy, Role, load_policy, load_value_model, reference_of
from alignment.algorithms.ppo.config import PPOConfig, SamplingSettings
from alignment.algorithms.ppo.metrics import load_metrics
from alignment.algorithms.ppo.servers import ServerSampler
from alignment.algorithms.ppo.state import (
    AdaptiveKL,
    FixedKL,
    HeldOut,
    NextRollout,
    PPOState,
    SamplingState,
    ScoreNormalizer,
)
from alignment.algorithms.runs import check_rows, read_examples, read_split
from alignment.algorithms.scoring import RewardSource
from alignment.data.batches import Example, collate
from alignment.data.stream import Stream, stream_of
from alignment.data.table import column_of
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer, known_tokens
from alignment.errors import UserError
from alignment.loading import describe_stop_tokens, find_directory, load_tokenizer, same_vocabulary
from alignment.models.external.models import ExternalModel
from alignment.models.native_model import NativeModel
from alignment.models.new_weights import attach_value_head
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.models.weight_bytes import written
from alignment.ragged import Batch
from alignment.reward_model.model import read_calibration
from alignment.training import Engine, Run, shard_rows
from alignment.training.distributed import ProcessGroup, shares_weights

USABLE = 0.9  # share of the free memory that is planned with; the allocator loses the rest between blocks of odd sizes


@dataclass(frozen=True)
class RolloutData:
    """Prompts and PPO's pretraining mix as streams, with the tokenizer that made them, and the held-out prompts."""

    tokenizer: Tokenizer
    prompts: Stream
    iterations: int
    texts: Stream | None = None
    held_out: Sequence[Example] = ()

    def prompts_of(self, step: int) -> Sequence[Example]:
        """The prompts of iteration `step`, from 0; none after the last one."""
        return self.prompts.rows_at(step) if step < self.iterations else ()


def read_data(config: SamplingSettings, run: Run) -> RolloutData:
    """Read and tokenize prompts and, for PPO, pretraining text."""
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    training = config.training
    run.note(describe_stop_tokens(config.policy, tokenizer))
    prompts, held_out = read_split(config, "prompts", tokenizer, run)
    # Batches run across the ends of epochs: a smaller last one could not be cut into the same minibatches.
    stream = stream_of(config.data, prompts, batch_size=training.batch_size, seed=training.seed)
    data = RolloutData(tokenizer, stream, training.steps(stream.epoch_length), held_out=held_out)
    if not isinstance(config, PPOConfig) or config.pretrain is None or config.pretrain_coef == 0:
        return data
    texts = read_examples(config.pretrain, "text", tokenizer, run)
    size = config.pretrain_batch_size
    seed = training.seed + 1
    return replace(data, texts=stream_of(config.pretrain, texts, batch_size=size, seed=seed))


# Networks


def build_state(config: PPOConfig, data: RolloutData) -> PPOState:
    """Load the networks, make engines of the two that train, and start the controllers."""
    metrics = load_metrics(config.metrics)
    source = source_of(config)
    texts = source.prepare(data.prompts.rows)
    bases = SharedWeights(config.weights)
    policy, value, start = build_engines(config, data, bases if shares_weights() else bases.unshared())
    group = policy.process_group
    judges = source.load(data.prompts.rows, data.tokenizer, bases, group.device)
    held_out, held_out_roles = build_held_out(config, data, bases, group)
    reference = reference_of(start, config.reference, policy, bases=bases)
    trained = {"policy": policy} if value is None else {"policy": policy, "value model": value}
    networks = [*(engine.backend.unwrapped for engine in trained.values()), reference.model]
    roles = [Role(name, engine.backend.unwrapped, engine) for name, engine in trained.items()]
    kl_coef = config.kl_coef
    return PPOState(
        policy=policy,
        value=value,
        reference=reference,
        score=source.score_function(data.tokenizer, texts, judges, group.sum),
        stop_ids=sorted(stop_token_ids(data.tokenizer)),
        start=start,
        metrics=metrics,
        roles=[*roles, *source.roles(judges), *held_out_roles, reference.role],
        # No note here: most rollouts have one response per prompt.
        share_prompts=prompt_sharing(networks, wanted=config.training.share_prompts, note=lambda line: None),
        kl=FixedKL(kl_coef) if config.kl_target is None else AdaptiveKL(kl_coef, config.kl_target, config.kl_horizon),
        normalizer=ScoreNormalizer(
            enabled=config.normalize_scores and not config.rewards,
            fitted=any(judge.calibration.fitted for judge in judges.values()),
        ),
        pretraining=None if data.texts is None else partial(local_texts, config, data.texts, group),
        held_out=held_out,
        ahead=NextRollout(data.prompts_of) if config.rollouts_behind else None,
        servers=config.servers and ServerSampler(config.servers, policy, start),
        cuda_graphs=config.cuda_graphs,
        shared_value=config.shares_trunk,
    )


def source_of(config: SamplingSettings, **changes: Any) -> RewardSource:
    """The rewards of a stage that samples, with changes."""
    given: dict[str, Any] = {
        "reward_model": config.reward_model,
        "rewards": config.rewards,
        "data": config.data,
        "max_new_tokens": config.max_new_tokens,
        "micro_batch_tokens": config.training.tokens_per_forward,
    }
    if isinstance(config, PPOConfig):
        given |= {"reward_combine": config.reward_combine, "reward_std_coef": config.reward_std_coef}
    return RewardSource(**(given | changes))


def build_held_out(
    config: PPOConfig, data: RolloutData, bases: SharedWeights, group: ProcessGroup
) -> tuple[HeldOut | None, list[Role]]:
    """The held-out prompts with their judge, and its reward models; None and none without them."""
    if (held_out := config.held_out) is None:
        return None, []
    prompts = data.held_out
    if len(prompts) < group.size:
        raise UserError(f"data.evaluation has {len(prompts)} prompts for {group.size} processes; hold more of them out")
    source = source_of(
        config,
        reward_model=held_out.reward_model,
        rewards=[replace(spec, normalize="none", clip=None) for spec in held_out.rewards],
        reward_combine=held_out.reward_combine,
        reward_std_coef=held_out.reward_std_coef,
    )
    texts = source.prepare(prompts)
    judges = source.load(prompts, data.tokenizer, bases, group.device)
    score = source.score_function(data.tokenizer, texts, judges, group.sum)
    sampling = replace(config.sampling, seed=held_out.seed)
    return HeldOut(prompts, score, sampling, held_out.kl_budget), source.roles(judges, "held-out reward model")


def note_distant_start(config: PPOConfig, run: Run) -> None:
    """Note that a prefix or a soft prompt makes the policy begin away from its reference."""
    if config.reference is None and isinstance(config.adapter, PrefixSpec | PromptSpec):
        run.note(
            "adapter: a prefix or prompt changes the responses before it has learned anything, and the reference is "
            "the policy without it: kl begins above 0, and kl_target and held_out.kl_budget count that distance"
        )


def build_engines(config: PPOConfig, data: RolloutData, bases: SharedWeights) -> tuple[Engine, Engine | None, Policy]:
    """The engines of policy and value model (None without a network of its own), and the policy as it was loaded."""
    start = load_start(config, data, bases)
    value_start = None
    if config.has_value_model and not config.shares_trunk:
        value_start = start_value_model(config, data.tokenizer, bases)
        check_prompts(value_start, config, data)
    if data.texts is not None and config.pretrain is not None:
        check_rows(start.model, data.texts.rows, config.pretrain.max_length)
    if config.shares_trunk:
        attach_value_head(start.model)
    policy = policy_engine(start, config, max(1, data.iterations - config.value_warmup_steps))
    if value_start is None:
        return policy, None, start
    total = data.iterations * config.epochs * config.minibatches
    optim = config.value_optim or config.optim
    return policy, Engine(value_start.model.eval(), optim, config.training, total_steps=total), start


def load_start(config: SamplingSettings, data: RolloutData, bases: SharedWeights) -> Policy:
    """The policy to train, which can read all prompts, and draws no id without a token."""
    start = load_policy(config.policy, config.adapter, data.tokenizer, config.output, bases=bases)
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


def start_value_model(config: PPOConfig, tokenizer: Tokenizer, bases: SharedWeights | None = None) -> Policy:
    """The value model to train: the trunk of the reward model or of the policy, with one number per token on top."""
    if config.value_model == "policy":
        return load_value_model(config.policy, config.adapter, tokenizer, None, head="zero", bases=bases)
    source = config.reward_models[0]
    reward_model = find_directory(source)
    reward_tokenizer = load_tokenizer(source)
    if read_members(reward_model) is not None or not same_vocabulary(tokenizer, reward_tokenizer):
        raise UserError(
            f"{source}: an ensemble of adapters, or a reward model whose tokenizer differs from the policy's, cannot "
            "become the value model; set value_model=policy"
        )
    # A head of its own where scores are shaped, here or in the reward model's files: its weights give raw scores.
    head = "zero" if config.rewards or config.normalize_scores or read_calibration(reward_model).fitted else None
    return load_value_model(source, config.adapter, reward_tokenizer, None, head=head, bases=bases)


def local_texts(config: PPOConfig, texts: Stream, group: ProcessGroup, update: int) -> list[Batch]:
    """This rank's micro-batches of the texts of one update."""
    to_batches = partial(collate, micro_batch_tokens=config.training.tokens_per_forward)
    return shard_rows(texts.rows_at(update), to_batches, group.rank, group.size)


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

"""Data and networks of a run of PPO, and where the policy's weights lie while it samples."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import nn

from alignment.adapters.files import read_members
from alignment.adapters.specs import PrefixSpec, PromptSpec
from alignment.algorithms.memory_notes import Role
from alignment.algorithms.policies import Policy, load_policy, load_value_model, reference_of
from alignment.algorithms.ppo.config import PPOConfig, SamplingSettings
from alignment.algorithms.ppo.metrics import load_metrics
from alignment.algorithms.ppo.state import (
    AdaptiveKL,
    FixedKL,
    HeldOut,
    PPOState,
    SampledAhead,
    SamplingState,
    ScoreNormalizer,
)
from alignment.algorithms.runs import RowsConfig, check_rows, read_examples, read_split
from alignment.algorithms.scoring import Scoring, load_judges, prepare_scoring, roles_of, score_function
from alignment.data.batches import collate
from alignment.data.examples import Example
from alignment.data.stream import Stream, stream_of
from alignment.data.table import lengths_of
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import describe_stop_tokens, find_directory, load_tokenizer, same_vocabulary
from alignment.models.external.models import ExternalModel
from alignment.models.native_model import NativeModel
from alignment.models.new_weights import attach_value_head
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Batch
from alignment.reward_model import RewardModel
from alignment.reward_model.calibration import read_calibration
from alignment.training import Engine, Run, TrainingConfig, shard_rows
from alignment.training.distributed import ProcessGroup, shares_weights

USABLE = 0.9  # share of the free memory that is planned with; the allocator loses the rest between blocks of odd sizes


class PromptsConfig(RowsConfig, Protocol):
    """The settings of a stage that samples responses to prompts."""

    @property
    def policy(self) -> str: ...

    @property
    def training(self) -> TrainingConfig: ...


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


def read_data(config: PPOConfig, run: Run) -> RolloutData:
    """Read and tokenize prompts and pretraining text.

    Raises:
        UserError: bad rows, all at once.
    """
    data = read_prompt_stream(config, run)
    if config.pretrain is None or config.pretrain_coef == 0:
        return data
    examples = read_examples(config.pretrain, "text", data.tokenizer, run)
    seed = config.training.seed + 1
    return replace(data, texts=stream_of(config.pretrain, examples, batch_size=config.pretrain_batch_size, seed=seed))


def read_prompt_stream(config: PromptsConfig, run: Run) -> RolloutData:
    """Read and tokenize prompts.

    Raises:
        UserError: bad rows, all at once.
    """
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    run.note(describe_stop_tokens(config.policy, tokenizer))
    prompts, held_out = read_split(config, "prompts", tokenizer, run)
    # Batches run across the ends of epochs: a smaller last one could not be cut into the same minibatches.
    stream = stream_of(config.data, prompts, batch_size=config.training.batch_size, seed=config.training.seed)
    return RolloutData(tokenizer, stream, config.training.steps(stream.epoch_length), held_out=held_out)


def build_state(config: PPOConfig, data: RolloutData) -> PPOState:
    """Load the networks, make engines of the two that train, and start the controllers.

    Raises:
        UserError: an unknown metric, before any network is loaded; bad checkpoints; prompts that do not fit a network.
    """
    metrics = load_metrics(config.metrics)
    texts = prepare_scoring(config, data.prompts.rows)
    bases = SharedWeights(config.weights)
    policy, value, start = build_engines(config, data, bases if shares_weights() else bases.unshared())
    micro_batch_tokens = config.training.tokens_per_forward
    judges = load_judges(config, data.prompts.rows, data.tokenizer, bases, policy.process_group.device)
    held_out, held_out_judges = build_held_out(config, data, bases, policy.process_group)
    reference = reference_of(start, config.reference, policy, bases=bases)
    roles = [
        Role("policy", policy.backend.unwrapped, policy),
        *([] if value is None else [Role("value model", value.backend.unwrapped, value)]),
        *roles_of(judges, config),
        *[Role(f"held-out reward model {name}", judge.model) for name, judge in held_out_judges.items()],
        reference.role,
    ]  # fmt: skip
    networks = [policy.backend.unwrapped, None if value is None else value.backend.unwrapped, reference.model]
    # No note here: most rollouts have one response per prompt.
    share_prompts = prompt_sharing(networks, wanted=config.training.share_prompts, note=lambda line: None)
    return PPOState(
        policy=policy,
        value=value,
        roles=roles,
        reference=reference,
        score=score_function(config, data.tokenizer, texts, judges, policy.process_group),
        stop_ids=sorted(stop_token_ids(data.tokenizer)),
        kl=FixedKL(config.kl_coef)
        if config.kl_target is None
        else AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon),
        start=start,
        normalizer=ScoreNormalizer(
            enabled=config.normalize_scores and not config.rewards,
            fitted=any(judge.calibration.fitted for judge in judges.values()),
        ),
        pretraining=None if data.texts is None else partial(local_texts, data.texts, policy, micro_batch_tokens),
        metrics=metrics,
        share_prompts=share_prompts,
        held_out=held_out,
        ahead=SampledAhead(data.prompts_of) if config.rollouts_behind else None,
        shared_value=config.shares_trunk,
    )


def build_held_out(
    config: PPOConfig, data: RolloutData, bases: SharedWeights, group: ProcessGroup
) -> tuple[HeldOut | None, dict[str, RewardModel]]:
    """The held-out prompts with their judge, and its reward models by the name of their entry; None and none without them.

    Raises:
        UserError: fewer prompts than processes; a bad checkpoint, or prompts that a judge cannot read.
    """
    if config.held_out is None:
        return None, {}
    prompts, held_out = data.held_out, config.held_out
    if len(prompts) < group.size:
        raise UserError(f"data.evaluation has {len(prompts)} prompts for {group.size} processes; hold more of them out")
    settings = Scoring(
        reward_model=held_out.reward_model,
        rewards=[replace(spec, normalize="none", clip=None) for spec in held_out.rewards],
        reward_combine=held_out.reward_combine,
        reward_std_coef=held_out.reward_std_coef,
        data=config.data,
        max_new_tokens=config.max_new_tokens,
        training=config.training,
    )
    texts = prepare_scoring(settings, prompts)
    judges = load_judges(settings, prompts, data.tokenizer, bases, group.device)
    score = score_function(settings, data.tokenizer, texts, judges, group)
    return HeldOut(prompts, score, replace(config.sampling, seed=held_out.seed), held_out.kl_budget), judges


def note_distant_start(config: PPOConfig, run: Run) -> None:
    """Note that a prefix or a soft prompt makes the policy begin away from its reference, and the settings that count that."""
    if config.reference is not None or not isinstance(config.adapter, PrefixSpec | PromptSpec):
        return
    budget = None if config.held_out is None else config.held_out.kl_budget
    limits = {"kl_target": config.kl_target, "held_out.kl_budget": budget}
    counted = " and ".join(name for name, limit in limits.items() if limit is not None)
    run.note(
        "adapter: a prefix or prompt changes the responses before it has learned anything, and the reference is the policy "
        "without it: kl begins above 0" + (f", and {counted} counts that distance" if counted else "")
    )


def build_engines(config: PPOConfig, data: RolloutData, bases: SharedWeights) -> tuple[Engine, Engine | None, Policy]:
    """The engines of policy and value model (None without a network of its own), and the policy as it was loaded."""
    training = config.training
    per_iteration = config.epochs * config.minibatches
    start = load_policy(config.policy, config.adapter, data.tokenizer, config.output, bases=bases)
    value_start = start_value_model(config, data.tokenizer, bases) if config.has_own_value_model else None
    for model in [start.model] if value_start is None else [start.model, value_start.model]:
        check_rows(model, data.prompts.rows, config.data.max_length, config.max_new_tokens)
        if data.held_out:
            check_rows(model, data.held_out, config.data.max_length, config.max_new_tokens)
    if data.texts is not None and config.pretrain is not None:
        check_rows(start.model, data.texts.rows, config.pretrain.max_length)
    if config.shares_trunk:
        attach_value_head(start.model)
    # Without dropout, or the first ratio would not be 1.
    learns = max(1, data.iterations - config.value_warmup_steps)
    policy = Engine(start.model.eval(), config.optim, training, total_steps=learns * per_iteration)
    optim, total = config.value_optim or config.optim, data.iterations * per_iteration
    value = None if value_start is None else Engine(value_start.model.eval(), optim, training, total_steps=total)
    require_prompts(training, policy.process_group)
    return policy, value, start


def require_prompts(training: TrainingConfig, group: ProcessGroup) -> None:
    """Refuse an iteration with fewer prompts than processes.

    Raises:
        UserError: in words.
    """
    if training.batch_size < group.size:
        raise UserError(
            f"training.batch_size {training.batch_size} gives some of the {group.size} processes no prompt to "
            "respond to; raise it, or start fewer processes"
        )


def start_value_model(config: PPOConfig, tokenizer: Tokenizer, bases: SharedWeights | None = None) -> Policy:
    """The value model to train: the trunk of the reward model or of the policy, with one number per token on top."""
    if config.value_model == "policy":
        return load_value_model(config.policy, config.adapter, tokenizer, None, head="zero", bases=bases)
    source = config.reward_models[0]
    reward_model = find_directory(source)
    if read_members(reward_model) is not None:
        raise UserError(
            f"{source}: an ensemble of adapters has no one network to become the value model; set value_model=policy"
        )
    own = load_tokenizer(source)
    if not same_vocabulary(tokenizer, own):
        raise UserError(
            f"{source}: the reward model's tokenizer differs from the policy's, so it cannot become the "
            "value model; set value_model=policy"
        )
    # A head of its own where scores are shaped, here or in the reward model's files: its weights give raw scores.
    head = "zero" if config.rewards or config.normalize_scores or read_calibration(reward_model).fitted else None
    return load_value_model(source, config.adapter, own, None, head=head, bases=bases)


def local_texts(texts: Stream, engine: Engine, micro_batch_tokens: int, update: int) -> list[Batch]:
    """This rank's micro-batches of the texts of one update."""
    to_batches = partial(collate, micro_batch_tokens=micro_batch_tokens)
    return shard_rows(texts.rows_at(update), to_batches, engine.process_group.rank, engine.process_group.size)


# Weights of the sampling policy: whole on every device, or sharded


def choose_rollout_weights(
    config: SamplingSettings, prompts: Sequence[Example], state: SamplingState, run: Run
) -> Literal["gathered", "sharded"]:
    """`config.rollout_weights`, with `auto` decided by the free memory; noted in the run. A collective operation.

    Gathered weights stand beside the cache and logits of the samples and the optimizer's state, which the first update
    creates. Every rank must have room for them: the one with the least free memory decides.

    Raises:
        UserError: `gathered` was asked for and does not fit.
    """
    group, choice = state.process_group, config.rollout_weights
    whole = state.policy.backend.whole_bytes()
    if whole == 0:
        if choice == "sharded":
            run.note(
                f"rollout_weights: sharded has no effect, because {group.kind} keeps the policy whole on each process"
            )
        return "gathered"
    trained = sum(trainable_elements(engine.backend.unwrapped) for engine in state.engines.values())
    moments = 2 * 4 * trained // group.size  # of AdamW, sharded as the weights are
    other = group.largest(sampling_bytes(config, prompts, state) + moments)
    free = -group.largest(-free_bytes(group))
    figures = (
        f"the whole policy takes {_gigabytes(whole)} on each device, cache, logits and optimizer state "
        f"{_gigabytes(other)}, and {_gigabytes(free)} are free"
    )
    if choice == "gathered" and whole > free:
        raise UserError(f"rollout_weights=gathered does not fit: {figures}; set it to sharded, or to auto")
    if choice == "auto":
        choice = "gathered" if whole + other <= USABLE * free else "sharded"
    run.note(f"rollout_weights: {choice} ({'as set' if choice == config.rollout_weights else 'auto'}): {figures}")
    return choice


def sampling_bytes(config: SamplingSettings, prompts: Sequence[Example], state: SamplingState) -> int:
    """Bytes of the cache and of the logits of one batch of samples on one device."""
    model, group = state.policy.backend.unwrapped, state.process_group
    assert isinstance(model, NativeModel | ExternalModel)
    responses = config.training.batch_size * config.responses_per_prompt
    rows = min(config.micro_rollout_batch_size, -(-responses // group.size))
    tokens = int(lengths_of(prompts).max()) + config.max_new_tokens
    element = 2 if config.training.precision == "bf16" else 4
    logits = 3 * 4 * model.spec.vocabulary  # float32: the logits, their log-softmax and its cumulative sum
    return rows * (tokens * cached_numbers(model) * element + logits)


def cached_numbers(model: NativeModel | ExternalModel) -> int:
    """Numbers that the cache holds of one token, over all layers."""
    if isinstance(model, NativeModel):
        layers = [layer.attention for layer in model.spec.layers]
        return sum(2 * attention.key_value_heads * attention.head_dim for attention in layers)
    config = model.inner.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_dim


def trainable_elements(model: nn.Module) -> int:
    """Elements of the trainable weights over all ranks; ZeRO-3 keeps an empty tensor and the number in `ds_numel`."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters() if parameter.requires_grad
    )


def free_bytes(group: ProcessGroup) -> int:
    """Free memory of this process's device; processes that share one machine's memory get equal parts of it."""
    if group.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(group.device)
        return free + torch.cuda.memory_reserved(group.device) - torch.cuda.memory_allocated(group.device)
    import psutil

    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e7 else f"{count / 1e6:.3g} MB"

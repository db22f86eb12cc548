"""Data, networks and state of a run of PPO."""

from dataclasses import replace
from functools import partial

from alignment.adapters.files import read_members
from alignment.adapters.specs import PrefixSpec, PromptSpec
from alignment.algorithms.policies import Policy, Role, load_value_model, reference_of
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.state import AdaptiveKL, FixedKL, PPOState, ScoreNormalizer
from alignment.algorithms.rollouts.metrics import load_metrics
from alignment.algorithms.rollouts.servers import ServerSampler
from alignment.algorithms.rollouts.setup import (
    RolloutData,
    check_prompts,
    load_start,
    policy_engine,
    read_rollout_data,
    source_of,
)
from alignment.algorithms.rollouts.state import HeldOut, NextRollout
from alignment.algorithms.runs import check_rows, read_examples
from alignment.data.batches import collate
from alignment.data.stream import Stream, stream_of
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import Checkpoint, load_tokenizer, same_vocabulary
from alignment.models.new_weights import attach_value_head
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Batch
from alignment.reward_model.model import read_calibration
from alignment.training import Engine, Run, shard_rows
from alignment.training.distributed import ProcessGroup, shares_weights


def read_data(config: PPOConfig, run: Run) -> RolloutData:
    """Read and tokenize prompts, those that are held out, and text of the pretraining mix."""
    data = read_rollout_data(config, run)
    if config.pretrain is None or config.pretrain_coef == 0:
        return data
    texts = read_examples(config.pretrain, "text", data.tokenizer, run)
    size = config.pretrain_batch_size
    seed = config.training.seed + 1
    return replace(data, texts=stream_of(config.pretrain, texts, batch_size=size, seed=seed))


def build_state(config: PPOConfig, data: RolloutData) -> PPOState:
    """Load the networks, make engines of the two that train, and start the controllers."""
    metrics = load_metrics(config.metrics)
    source = source_of(config, reward_combine=config.reward_combine, reward_std_coef=config.reward_std_coef)
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


def warn_nonzero_initial_kl(config: PPOConfig, run: Run) -> None:
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


def start_value_model(config: PPOConfig, tokenizer: Tokenizer, bases: SharedWeights | None = None) -> Policy:
    """The value model to train: the trunk of the reward model or of the policy, with one number per token on top."""
    if config.value_model == "policy":
        return load_value_model(Checkpoint(config.policy), config.adapter, tokenizer, None, head="zero", bases=bases)
    source = config.reward_models[0]
    reward_model = Checkpoint(source)
    reward_tokenizer = load_tokenizer(reward_model)
    if read_members(reward_model.directory) is not None or not same_vocabulary(tokenizer, reward_tokenizer):
        raise UserError(
            f"{source}: an ensemble of adapters, or a reward model whose tokenizer differs from the policy's, cannot "
            "become the value model; set value_model=policy"
        )
    # A head of its own where scores are shaped, here or in the reward model's files: its weights give raw scores.
    head = (
        "zero" if config.rewards or config.normalize_scores or read_calibration(reward_model.directory).fitted else None
    )
    return load_value_model(reward_model, config.adapter, reward_tokenizer, None, head=head, bases=bases)


def local_texts(config: PPOConfig, texts: Stream, group: ProcessGroup, update: int) -> list[Batch]:
    """This rank's micro-batches of the texts of one update."""
    to_batches = partial(collate, micro_batch_tokens=config.training.tokens_per_forward)
    return shard_rows(texts.rows_at(update), to_batches, group.rank, group.size)

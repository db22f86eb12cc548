"""Data, networks and state of a PPO run."""

from collections.abc import Callable, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Literal

from alignment.adapters.files import read_members
from alignment.adapters.specs import PrefixSpec, PromptSpec
from alignment.algorithms.memory_notes import Role
from alignment.algorithms.policies import Policy, Reference, load_policy, load_value_model, reference_of
from alignment.algorithms.ppo.alarms import Alarms
from alignment.algorithms.ppo.config import METRICS, PPOConfig
from alignment.algorithms.ppo.controllers import AdaptiveKL, FixedKL, ScoreNormalizer
from alignment.algorithms.ppo.held_out import HeldOut
from alignment.algorithms.ppo.samples import SampledAhead
from alignment.algorithms.runs import check_rows, read_examples, read_split
from alignment.algorithms.scoring import (
    Scoring,
    load_judges,
    load_statistics,
    prepare_scoring,
    roles_of,
    save_statistics,
    score_function,
)
from alignment.data.batches import collate
from alignment.data.examples import PromptExample
from alignment.data.mixture import RowOrder, stream_of
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import describe_stop_tokens, find_directory, load_tokenizer, same_vocabulary
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.models.value_head import attach_value_head
from alignment.ragged import Batch, Sharing
from alignment.reward_model import RewardModel
from alignment.reward_model.calibration import read_calibration
from alignment.rewards.combine import ScoreFunction
from alignment.rewards.functions import import_own
from alignment.training import (
    Engine,
    Run,
    TrainingConfig,
    load_run_state,
    note_endless_warmup,
    save_run_state,
    shard_rows,
)
from alignment.training.distributed import ProcessGroup, shares_weights
from alignment.training.result import Result

LOGGED_KEYS = {  # of every PPO run's log; a metric of the config may not have one of these names
    "advantage_mean", "advantage_std", "approx_kl", "best_held_out_score", "best_held_out_win_rate", "best_step",
    "clip_fraction", "distinct_share", "empty_share", "ended_share", "entropy", "explained_variance",
    "first_ratio_error", "grad_norm", "held_out_kl", "held_out_score", "held_out_unscored_share", "held_out_win_rate",
    "importance_clipped_share", "importance_weight_max", "importance_weight_mean", "kl", "kl_coef", "kl_k2", "kl_k3",
    "kl_loss", "learning_rate", "loss", "mfu", "mfu_forward", "mfu_policy", "mfu_sampling", "mfu_value", "policy_loss",
    "pretrain_loss", "repetition", "response_tokens", "response_tokens_max", "response_tokens_min",
    "response_tokens_std", "return_mean", "return_std", "sampling_error", "sampling_kl", "score", "score_std",
    "seconds_forward", "seconds_held_out", "seconds_policy", "seconds_rollout", "seconds_sampling", "seconds_scoring",
    "seconds_update", "seconds_value", "step", "tokens", "tokens_per_second", "unscored_share", "updates",
    "value_grad_norm", "value_loss", "value_mean",
}  # fmt: skip

MetricFn = Callable[[Sequence[str], Sequence[str]], Sequence[float]]  # prompts, responses -> one number for each


@dataclass(frozen=True)
class PPOData:
    """Prompts and the pretraining mix as streams, with the tokenizer that made them, and the held-out prompts."""

    tokenizer: Tokenizer
    prompts: RowOrder
    iterations: int
    texts: RowOrder | None
    held_out: Sequence[PromptExample] = ()

    def prompts_of(self, step: int) -> Sequence[PromptExample]:
        """The prompts of iteration `step`, from 0; none after the last one."""
        return self.prompts.rows_at(step) if step < self.iterations else ()


@dataclass
class SamplingState:
    """What an iteration of sampling, scoring and learning reads and changes.

    Attributes:
        policy: its engine.
        score: a judge of prompts and responses, token ids: gives their scores [B] (not a number: could not judge), or
            `Scores` with the parts of several rewards. PPO's is called once for each rollout, by every rank.
        stop_ids: tokens that end a response.
        start: the policy as it was loaded, for saving it, with its tokenizer.
        metrics: what to log of prompts and responses, by name.
        rollout_weights: how the policy's weights lie while it samples.
        roles: the networks, for what is said of their memory.
        share_prompts: whether a prompt with several responses is computed once for all of them.
    """

    policy: Engine
    _: KW_ONLY
    score: ScoreFunction
    stop_ids: Sequence[int]
    start: Policy
    metrics: dict[str, MetricFn] = field(default_factory=dict)
    rollout_weights: Literal["gathered", "sharded"] = "gathered"
    roles: Sequence[Role] = ()
    share_prompts: Sharing = False

    @property
    def engines(self) -> list[Engine]:
        """The engines that train."""
        return [self.policy]

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that train together."""
        return self.policy.process_group


@dataclass(kw_only=True)
class PPOState(SamplingState):
    """Everything that an iteration reads and changes.

    Attributes:
        value: the engine of the value model; None with a value head on the policy's trunk, or without one.
        reference: log-probabilities without gradients.
        kl: the controller of the KL penalty, its coefficient as `.coef`.
        normalizer: gives the scores mean 0 and deviation 1.
        pretraining: update number -> micro-batches of this rank; None without a pretraining mix.
        num_updates: minibatch updates taken so far.
        held_out: prompts that are scored during the run, and their judge; None: there are none.
        alarms: of collapse, over the metrics of the run.
        ahead: responses that are sampled one iteration ahead (`rollouts_behind`); None: each iteration samples its own.
        shared_value: whether the policy has a value head on its trunk.
    """

    value: Engine | None
    reference: Reference
    kl: AdaptiveKL | FixedKL
    normalizer: ScoreNormalizer = field(default_factory=ScoreNormalizer)
    pretraining: Callable[[int], list[Batch]] | None = None
    num_updates: int = 0
    held_out: HeldOut | None = None
    alarms: Alarms = field(default_factory=Alarms)
    ahead: SampledAhead | None = None
    shared_value: bool = False

    @property
    def engines(self) -> list[Engine]:
        """The engines of policy and value model."""
        return list(self.by_role.values())

    @property
    def by_role(self) -> dict[str, Engine]:
        """The engines by the names of their checkpoints."""
        return {"policy": self.policy} if self.value is None else {"policy": self.policy, "value": self.value}


def read_data(config: PPOConfig, run: Run) -> PPOData:
    """Read and tokenize prompts and pretraining text.

    Raises:
        UserError: bad rows, all at once.
    """
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    run.note(describe_stop_tokens(config.policy, tokenizer))
    prompts, held_out = read_split(config, "prompts", tokenizer, run)
    texts = None
    if config.pretrain is not None and config.pretrain_coef > 0:
        examples = read_examples(config.pretrain, "text", tokenizer, run)
        texts = stream_of(
            config.pretrain, examples, batch_size=config.pretrain_batch_size, seed=config.training.seed + 1
        )
    # Batches run across the ends of epochs: a smaller last one could not be cut into the same minibatches.
    stream = stream_of(config.data, prompts, batch_size=config.training.batch_size, seed=config.training.seed)
    return PPOData(tokenizer, stream, config.training.steps(stream.epoch_length), texts, held_out)


def build_state(config: PPOConfig, data: PPOData) -> PPOState:
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
    # Nobody is told where prompts are not shared: few rollouts have several responses to one.
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
    config: PPOConfig, data: PPOData, bases: SharedWeights, group: ProcessGroup
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
    """Note that a prefix or a soft prompt makes the policy begin away from its reference, and which settings count that."""
    if config.reference is not None or not isinstance(config.adapter, PrefixSpec | PromptSpec):
        return
    budget = None if config.held_out is None else config.held_out.kl_budget
    limits = {"kl_target": config.kl_target, "held_out.kl_budget": budget}
    counted = " and ".join(name for name, limit in limits.items() if limit is not None)
    run.note(
        "adapter: a prefix or prompt changes the responses before it has learned anything, and the reference is the policy "
        "without it: kl begins above 0" + (f", and {counted} counts that distance" if counted else "")
    )


def load_metrics(names: Sequence[str], taken: Set[str] = frozenset(LOGGED_KEYS)) -> dict[str, MetricFn]:
    """The functions that a config's `metrics` names, by the name of the function, under which it is logged.

    Args:
        names: of the config.
        taken: the stage's own metrics.

    Raises:
        UserError: a name that is neither in METRICS nor module:function, a module or function that is missing, or a
            function named like another one or like a metric of the stage's own.
    """
    found: dict[str, MetricFn] = {}
    for name in names:
        module, _, function = METRICS.get(name, name).partition(":")
        try:
            metric = getattr(import_own(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"metrics: {name!r} was not found ({error}); known: {', '.join(METRICS)}") from error
        if function in found or function in taken:
            raise UserError(
                f"metrics: {name!r} would be logged as {function!r}, as another metric is; rename the function or leave it out"
            )
        found[function] = metric
    return found


def build_engines(config: PPOConfig, data: PPOData, bases: SharedWeights) -> tuple[Engine, Engine | None, Policy]:
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


def load_ppo_state(state: PPOState, config: PPOConfig, run: Run, result: Result) -> int:
    """Put back the newest checkpoint's state, if there is one; return the number of iterations done."""
    saved = load_run_state(run, state.by_role, config.training)
    result.restore(saved)
    note_endless_warmup(run, state.by_role)
    if saved is None:
        return 0
    state.num_updates = saved["num_updates"]
    state.kl.coef = saved["kl_coef"]
    state.normalizer = ScoreNormalizer(**saved["normalizer"])
    state.alarms.restore(saved["alarms"])
    if state.held_out is not None:
        state.held_out.restore(saved["held_out"])
    if state.ahead is not None:
        state.ahead.restore(saved.get("ahead"), saved["step"], state.process_group)
    load_statistics(state.score, saved.get("rewards"))
    return saved["step"]


def save_ppo_state(state: PPOState, config: PPOConfig, run: Run, result: Result, step: int) -> None:
    """Save a checkpoint where one is due after `step` iterations."""
    saved: dict[str, object] = {
        "num_updates": state.num_updates,
        "kl_coef": state.kl.coef,
        "normalizer": vars(state.normalizer),
    }
    saved |= result.state() | {"alarms": state.alarms.state()}
    if state.held_out is not None:
        saved["held_out"] = state.held_out.state()
    if state.ahead is not None:
        saved["ahead"] = state.ahead.state(state.process_group)
    saved |= save_statistics(state.score)
    save_run_state(run, state.by_role, config.training, step, saved)


def local_texts(texts: RowOrder, engine: Engine, micro_batch_tokens: int, update: int) -> list[Batch]:
    """This rank's micro-batches of the texts of one update."""
    to_batches = partial(collate, micro_batch_tokens=micro_batch_tokens)
    return shard_rows(texts.rows_at(update), to_batches, engine.process_group.rank, engine.process_group.size)

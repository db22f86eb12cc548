"""Data, networks and state of an online DPO run."""

from dataclasses import KW_ONLY, dataclass
from functools import partial

from alignment.algorithms.dpo.dpo import dpo_loss_fn
from alignment.algorithms.dpo.global_inputs import PreferenceUpdates
from alignment.algorithms.memory_notes import Role
from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.online_dpo.judges import gold_scorer, load_pair_judge, pair_scorer, require_hotel_prompts
from alignment.algorithms.policies import Reference, load_policy, reference_of
from alignment.algorithms.ppo.setup import SamplingState, load_metrics, require_prompts
from alignment.algorithms.runs import check_rows, read_examples, sources_of
from alignment.algorithms.scoring import (
    Scoring,
    load_judges,
    load_statistics,
    prepare_scoring,
    roles_of,
    save_statistics,
    score_function,
)
from alignment.data.batches import collate_pairs
from alignment.data.mixture import RowOrder, stream_of
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.loading import describe_stop_tokens, load_tokenizer
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Sharing
from alignment.rewards.combine import ScoreFunction
from alignment.rewards.specs import as_given_alone
from alignment.training import Engine, Run, load_run_state, note_endless_warmup, save_run_state
from alignment.training.distributed import shares_weights

SIDES = tuple(
    f"{side}_{name}" for side in ("chosen", "rejected") for name in ("log_prob", "log_prob_change", "reward", "score")
)
LOGGED_KEYS = {  # of every run's log; a metric of the config may not have one of these names
    "accuracy", "distinct_share", "ended_share", "grad_norm", "kl", "kl_k3", "learning_rate", "length_difference", "loss",
    "margin", "margin_chosen_longer", "margin_chosen_shorter", "margin_length_correlation", "margin_length_share",
    "margin_similar_length", "pairs", "response_tokens", "score", "score_margin", "score_ties", "seconds_sampling",
    "seconds_scoring", "seconds_update", "sft_loss", "step", "ties", "tokens", "tokens_per_second", "unjudged",
    "unscored_share", *SIDES,
}  # fmt: skip


@dataclass(frozen=True)
class OnlineDPOData:
    """Prompts as a stream, with the tokenizer that made them."""

    tokenizer: Tokenizer
    prompts: RowOrder
    iterations: int


@dataclass
class OnlineDPOState(SamplingState):
    """Everything that an iteration reads and changes; `score` gets K responses to each prompt side by side.

    Attributes:
        reference: log-probabilities without gradients; None where no loss needs them.
        updates: learns from pairs.
    """

    reference: Reference | None
    _: KW_ONLY
    updates: PreferenceUpdates


def read_online_data(config: OnlineDPOConfig, run: Run) -> OnlineDPOData:
    """Read and tokenize prompts.

    Raises:
        UserError: bad rows, all at once; prompts that the gold reward cannot score.
    """
    tokenizer = load_tokenizer(config.policy, config.chat_template)
    run.note(describe_stop_tokens(config.policy, tokenizer))
    prompts = read_examples(config.data, "prompts", tokenizer, run, chat_template=config.chat_template)
    if config.judge == "gold":
        require_hotel_prompts(prompts)
    # Batches run across the ends of epochs, so that all of them have the same size.
    stream = stream_of(config.data, prompts, batch_size=config.training.batch_size, seed=config.training.seed)
    return OnlineDPOData(tokenizer, stream, config.training.steps(stream.epoch_length))


def build_online_state(config: OnlineDPOConfig, data: OnlineDPOData, run: Run) -> OnlineDPOState:
    """Load policy, reference and judge, and make the engine that trains.

    Raises:
        UserError: an unknown metric or judge, or a reward that cannot be given, before any network is loaded; bad
            checkpoints; prompts that do not fit.
    """
    metrics, training = load_metrics(config.metrics, LOGGED_KEYS), config.training
    scoring, judge = scoring_of(config), load_pair_judge(config.judge) if ":" in config.judge else None
    texts = prepare_scoring(scoring, data.prompts.rows)
    bases = SharedWeights(config.weights, shared=shares_weights())
    start = load_policy(config.policy, config.adapter, data.tokenizer, config.output, bases=bases)
    check_rows(start.model, data.prompts.rows, config.data.max_length, config.max_new_tokens)
    total = data.iterations * config.epochs * config.minibatches
    policy = Engine(start.model.eval(), config.optim, training, total_steps=total)
    require_prompts(training, policy.process_group)
    models = load_judges(scoring, data.prompts.rows, data.tokenizer, bases, policy.process_group.device)
    roles = [Role("policy", policy.backend.unwrapped, policy), *roles_of(models, scoring)]
    if judge is not None:
        score: ScoreFunction = pair_scorer(judge, data.tokenizer, config.responses_per_prompt)
    elif config.judge == "gold":
        score = gold_scorer(data.tokenizer)
    else:
        score = score_function(scoring, data.tokenizer, texts, models, policy.process_group)
    reference = reference_of(start, config.reference, policy, bases=bases) if config.refers else None
    if reference is not None:
        roles.append(reference.role)
    networks = [policy.backend.unwrapped, None if reference is None else reference.model]
    sharing = prompt_sharing(networks, wanted=training.share_prompts, note=run.note)
    return OnlineDPOState(
        policy, reference,
        score=score,
        updates=updates_of(config, policy, reference, sharing),
        stop_ids=sorted(stop_token_ids(data.tokenizer)),
        start=start,
        metrics=metrics,
        roles=roles,
        share_prompts=sharing,
    )  # fmt: skip


def scoring_of(config: OnlineDPOConfig) -> Scoring:
    """What scores the responses; nothing with a judge that reads no rewards."""
    return Scoring(
        reward_model=config.reward_model,
        rewards=as_given_alone(config.rewards),
        data=config.data,
        max_new_tokens=config.max_new_tokens,
        training=config.training,
    )


def load_online_state(state: OnlineDPOState, config: OnlineDPOConfig, run: Run) -> int:
    """Put back the newest checkpoint's state, if there is one; return the number of iterations done."""
    saved = load_run_state(run, state.policy, config.training)
    note_endless_warmup(run, state.policy)
    state.updates.restore(None if saved is None else saved.get("updates"))
    if saved is None:
        return 0
    load_statistics(state.score, saved.get("rewards"))
    return saved["step"]


def save_online_state(state: OnlineDPOState, config: OnlineDPOConfig, run: Run, step: int) -> None:
    """Save a checkpoint where one is due after `step` iterations."""
    saved = {"updates": state.updates.state(), **save_statistics(state.score)}
    save_run_state(run, state.policy, config.training, step, saved)


def updates_of(
    config: OnlineDPOConfig, policy: Engine, reference: Reference | None, sharing: Sharing
) -> PreferenceUpdates:
    """Updates of the policy on pairs, which ask the reference about each batch at temperature 1."""
    return PreferenceUpdates(
        policy,
        config,
        dpo_loss_fn(policy.model, reference, config, sources_of(config.data)),
        reference,
        partial(collate_pairs, micro_batch_tokens=config.training.tokens_per_forward, share_prompts=sharing),
    )

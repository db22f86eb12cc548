"""Data, networks and state of an online DPO run."""

from dataclasses import KW_ONLY, dataclass
from functools import partial

from alignment.algorithms.dpo.dpo import dpo_loss_fn
from alignment.algorithms.dpo.global_inputs import PreferenceUpdates
from alignment.algorithms.memory_notes import Role
from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.online_dpo.judges import gold_scorer, load_pair_judge, pair_scorer, require_hotel_prompts
from alignment.algorithms.policies import Reference, load_policy, reference_of
from alignment.algorithms.ppo.metrics import LOGGED_KEYS, load_metrics
from alignment.algorithms.ppo.setup import RolloutData, read_prompt_stream, require_prompts
from alignment.algorithms.ppo.state import SamplingState, Saved
from alignment.algorithms.runs import check_rows, sources_of
from alignment.algorithms.scoring import Scoring, load_judges, prepare_scoring, roles_of, score_function
from alignment.data.batches import collate_pairs
from alignment.data.text.chat import stop_token_ids
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Sharing
from alignment.rewards.combine import ScoreFunction
from alignment.rewards.specs import as_given_alone
from alignment.training import Engine, Run
from alignment.training.distributed import shares_weights

PAIR_KEYS = {  # of every run's log, beside those of PPO; a metric of the config may not have one of these names
    "accuracy", "length_difference", "margin", "margin_chosen_longer", "margin_chosen_shorter", "margin_length_correlation",
    "margin_length_share", "margin_similar_length", "pairs", "score_margin", "score_ties", "sft_loss", "ties", "unjudged",
    *(f"{side}_{name}" for side in ("chosen", "rejected") for name in ("log_prob", "log_prob_change", "reward", "score")),
}  # fmt: skip


@dataclass
class OnlineDPOState(SamplingState):
    """Everything that an iteration reads and changes; `score` gets K responses to each prompt side by side.

    Attributes:
        updates: learns from pairs.
    """

    _: KW_ONLY
    updates: PreferenceUpdates

    def saved(self) -> dict[str, object]:
        return super().saved() | {"updates": self.updates.state()}

    def restore(self, saved: Saved) -> None:
        super().restore(saved)
        self.updates.restore(saved.get("updates"))


def read_online_data(config: OnlineDPOConfig, run: Run) -> RolloutData:
    """Read and tokenize prompts.

    Raises:
        UserError: bad rows, all at once; prompts that the gold reward cannot score.
    """
    data = read_prompt_stream(config, run)
    if config.judge == "gold":
        require_hotel_prompts(data.prompts.rows)
    return data


def build_online_state(config: OnlineDPOConfig, data: RolloutData, run: Run) -> OnlineDPOState:
    """Load policy, reference and judge, and make the engine that trains.

    Raises:
        UserError: an unknown metric or judge, or a reward that cannot be given, before any network is loaded; bad
            checkpoints; prompts that do not fit.
    """
    metrics, training = load_metrics(config.metrics, LOGGED_KEYS | PAIR_KEYS), config.training
    scoring = Scoring(
        reward_model=config.reward_model,
        rewards=as_given_alone(config.rewards),
        data=config.data,
        max_new_tokens=config.max_new_tokens,
        training=training,
    )
    judge = load_pair_judge(config.judge) if ":" in config.judge else None
    texts = prepare_scoring(scoring, data.prompts.rows)
    bases = SharedWeights(config.weights, shared=shares_weights())
    start = load_policy(config.policy, config.adapter, data.tokenizer, config.output, bases=bases)
    check_rows(start.model, data.prompts.rows, config.data.max_length, config.max_new_tokens)
    total = data.iterations * config.epochs * config.minibatches
    policy = Engine(start.model.eval(), config.optim, training, total_steps=total)
    require_prompts(training, policy.process_group)
    models = load_judges(scoring, data.prompts.rows, data.tokenizer, bases, policy.process_group.device)
    if judge is not None:
        score: ScoreFunction = pair_scorer(judge, data.tokenizer, config.responses_per_prompt)
    elif config.judge == "gold":
        score = gold_scorer(data.tokenizer)
    else:
        score = score_function(scoring, data.tokenizer, texts, models, policy.process_group)
    reference = reference_of(start, config.reference, policy, bases=bases) if config.refers else None
    networks = [policy.backend.unwrapped, reference and reference.model]
    sharing = prompt_sharing(networks, wanted=training.share_prompts, note=run.note)
    return OnlineDPOState(
        policy,
        reference=reference,
        score=score,
        updates=updates_of(config, policy, reference, sharing),
        stop_ids=sorted(stop_token_ids(data.tokenizer)),
        start=start,
        metrics=metrics,
        roles=[
            Role("policy", policy.backend.unwrapped, policy),
            *roles_of(models, scoring),
            *([] if reference is None else [reference.role]),
        ],
        share_prompts=sharing,
        logged_samples=config.responses_per_prompt,
    )


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

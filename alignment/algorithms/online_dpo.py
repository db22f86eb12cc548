"""Online DPO: a policy learns from pairs of its own responses, which a reward model or a judge has ranked.

The rollout is PPO's, updates and losses are those of DPO's family. An iteration: sample, judge, make pairs, learn from
them.

Left out: no value model, no responses of other models, no losses of single responses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from alignment.algorithms.dpo.config import PreferenceConfig
from alignment.algorithms.dpo.dpo import dpo_loss_fn
from alignment.algorithms.dpo.global_inputs import PreferenceUpdates
from alignment.algorithms.dpo.responses import note_end
from alignment.algorithms.policies import Reference, Role, reference_of
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.rollouts.loop import update_on_rollouts
from alignment.algorithms.rollouts.metrics import load_metrics, sample_metrics
from alignment.algorithms.rollouts.rollout import Rollout, collect
from alignment.algorithms.rollouts.servers import ServerSampler
from alignment.algorithms.rollouts.setup import RolloutData, load_start, policy_engine, read_rollout_data, source_of
from alignment.algorithms.rollouts.state import SamplingState, Saved
from alignment.algorithms.runs import open_run, sources_of
from alignment.data.batches import Example, collate_pairs
from alignment.data.rows.records import Prompt
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation import response_text
from alignment.hotel_world.gold import gold_score
from alignment.hotel_world.grammar import is_prompt
from alignment.losses.preference_table import LOSSES
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Sharing
from alignment.rewards.combine import MOST_UNSCORED, Scorer
from alignment.rewards.functions import function_files, load_own
from alignment.rewards.specs import check_rewards, reward_models_of, unnormalized_if_single
from alignment.settings import NonNegativeFloat, Rule, refusal
from alignment.training import Engine, Run
from alignment.training.distributed import ProcessGroup, shares_weights

# Prompts, responses shown first, responses shown second -> verdict for the one shown first; None: could not judge.
PairJudge = Callable[[Sequence[Prompt], Sequence[str], Sequence[str]], Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(SamplingSettings, PreferenceConfig):
    """Settings of one run of online DPO: the keys of `PreferenceConfig` and `SamplingSettings`, and its own.

    `training.max_steps` or `training.epochs` count iterations over the prompts. The loss is one of pairs, or several
    with their weights; odpo's margins are differences of scores. The loss takes log-probabilities at temperature 1,
    whatever the temperature of the samples.

    Attributes:
        data: prompts. None are held out: what is learnt is compared by `alignment evaluate winrate`.
        judge: the judge of which response is better. reward_model (given as `reward_model`, or as `rewards`), gold (the
            true reward of the hotel data set, for its prompts only), or module:function, which is given prompts,
            responses shown first and responses shown second, and gives for each the verdict for the one shown first: 1,
            0.5, 0, or None where it cannot say. Each two responses to a prompt are shown to it in both orders.
        rewards: see `SamplingSettings`; a single entry that does not say `normalize` is not normalized, and a response
            without a score is in no pair.
        responses_per_prompt: responses sampled to each prompt, at least 2; the best and the worst become a pair.
        tie_margin: largest difference of two scores that is a tie; a prompt whose best and worst response tie gives no
            pair. With a judge of pairs, scores are shares of comparisons won.
    """

    judge: str = "reward_model"
    responses_per_prompt: Annotated[int, Interval(ge=2)] = 2
    tie_margin: NonNegativeFloat = 0.0

    RULES = (
        Rule(
            "judge",
            lambda c: c.judge not in ("reward_model", "gold") and ":" not in c.judge,
            "{self.judge!r} is unknown; there are reward_model, gold and module:function",
        ),
        Rule(
            "judge",
            lambda c: c.judge == "reward_model" and c.reward_model is None and not c.rewards,
            "must be said: judge=reward_model with reward_model=DIR or a list `rewards` of entries, "
            "judge=module:function, or judge=gold for prompts of the generated hotel world alone",
        ),
        Rule(
            "rewards",
            lambda c: (c.reward_model is not None or c.rewards) and refusal(check_rewards, c.reward_model, c.rewards),
        ),
        Rule(
            "judge",
            lambda c: c.judge != "reward_model" and (c.reward_model is not None or c.rewards),
            "{self.judge} reads no reward_model and no rewards; leave them out, or set judge=reward_model",
        ),
        Rule(
            "loss",
            lambda c: [loss.name for loss in c.losses if loss.spec.rows != "comparisons"],
            "{found} learns from other rows than the pairs that online DPO makes; take one of "
            + ", ".join(name for name, spec in LOSSES.items() if spec.rows == "comparisons"),
        ),
        Rule(
            "data.evaluation",
            lambda c: c.data.evaluates,
            "is not read, nor evaluation_share: online_dpo evaluates nothing while it trains; leave it out, and "
            "compare the results on held-out prompts with `alignment evaluate winrate`",
        ),
        Rule(
            "training.keep_best",
            lambda c: c.training.best_metric is not None,
            "has no effect, nor early_stopping: online DPO evaluates nothing while it runs; leave it out",
        ),
    )

    @property
    def holds_reference(self) -> bool:
        """True where the reference is asked during the updates, as a network or as the policy with its adapter off."""
        return self.refers

    @property
    def judging_models(self) -> list[str]:
        """Directories of the reward models, in the order of `rewards`."""
        return reward_models_of(self.reward_model, self.rewards)


@dataclass
class OnlineDPOState(SamplingState):
    """Everything that an iteration reads and changes; `score` gets K responses to each prompt side by side."""

    _: KW_ONLY
    updates: PreferenceUpdates  # learns from pairs

    def saved(self) -> dict[str, object]:
        return super().saved() | {"updates": self.updates.state()}

    def restore(self, saved: Saved) -> None:
        super().restore(saved)
        self.updates.restore(saved.get("updates"))


def run(config: OnlineDPOConfig) -> Path:
    """Train a policy by online DPO and return its directory, `output/model`.

    Each iteration samples `responses_per_prompt` responses to each of `training.batch_size` prompts, makes a pair of
    the best and the worst one of each prompt, and takes `epochs` passes over the pairs in `minibatches` updates each.

    Raises:
        UserError: bad data or checkpoints, before any training.

    Source: Guo et al. 2024, arXiv:2402.04792, algorithm 1 (their K is 2); losses by the papers named beside them.
    """
    parents = [config.policy, *config.judging_models, config.reference]
    with open_run(config, "online_dpo", parents, files=function_files(config.rewards, config.judge)) as run:
        if not run.finished:
            data = read_rollout_data(config, run)
            state = build_online_state(config, data, run)
            update_on_rollouts(run, config, data, state, sample_and_update)
            note_end(run)
        return run.output / "model"


def sample_and_update(
    state: OnlineDPOState, config: OnlineDPOConfig, prompts: Sequence[Example], step: int
) -> tuple[dict[str, float], Rollout]:
    """One iteration: sample, score, make pairs, learn from them."""
    rollout = collect(state, config, prompts, step)  # K responses to each prompt, their scores and reference log-probs
    pairs, metrics = make_pairs(rollout, config, state.process_group)
    return metrics | sample_metrics(rollout, state) | update_policy(state.updates, config, pairs, step), rollout


def build_online_state(config: OnlineDPOConfig, data: RolloutData, run: Run) -> OnlineDPOState:
    """Load policy, reference and judge, and make the engine that trains."""
    metrics = load_metrics(config.metrics)
    prompts = data.prompts.rows
    tokenizer = data.tokenizer
    if config.judge == "gold":
        require_hotel_prompts(prompts)
    judge = load_own(config.judge, "judge:") if ":" in config.judge else None
    source = source_of(config, rewards=unnormalized_if_single(config.rewards))
    texts = source.prepare(prompts)
    bases = SharedWeights(config.weights, shared=shares_weights())
    start = load_start(config, data, bases)
    policy = policy_engine(start, config, data.iterations)
    models = source.load(prompts, tokenizer, bases, policy.process_group.device)
    if judge is not None:
        score = pair_scorer(judge, tokenizer, config.responses_per_prompt)
    elif config.judge == "gold":
        score = gold_scorer(tokenizer)
    else:
        score = source.score_function(tokenizer, texts, models, policy.process_group.sum)
    reference = reference_of(start, config.reference, policy, bases=bases) if config.refers else None
    networks = [policy.backend.unwrapped, reference and reference.model]
    sharing = prompt_sharing(networks, wanted=config.training.share_prompts, note=run.note)
    roles = [Role("policy", policy.backend.unwrapped, policy), *source.roles(models)]
    return OnlineDPOState(
        policy,
        reference=reference,
        score=score,
        updates=updates_of(config, policy, reference, sharing),
        stop_ids=sorted(stop_token_ids(tokenizer)),
        start=start,
        metrics=metrics,
        roles=roles if reference is None else [*roles, reference.role],
        share_prompts=sharing,
        logged_samples=config.responses_per_prompt,
        servers=config.servers and ServerSampler(config.servers, policy, start),
        cuda_graphs=config.cuda_graphs,
    )


def updates_of(
    config: OnlineDPOConfig, policy: Engine, reference: Reference | None, sharing: Sharing
) -> PreferenceUpdates:
    """Updates of the policy on pairs, which ask the reference about each batch at temperature 1."""
    loss_fn = dpo_loss_fn(policy.model, reference, config, sources_of(config.data))
    collate = partial(collate_pairs, micro_batch_tokens=config.training.tokens_per_forward, share_prompts=sharing)
    return PreferenceUpdates(policy, config, loss_fn, reference, collate)


def max_and_min(scores: Tensor, tie_margin: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best and the worst of K responses to each prompt; among equal ones the first."""
    missing = scores.isnan()
    unjudged = (~missing).sum(1) < 2
    high = scores.masked_fill(missing, -math.inf)
    low = scores.masked_fill(missing, math.inf)
    tied = high.amax(1) - low.amin(1) <= tie_margin
    return high.argmax(1), low.argmin(1), tied & ~unjudged, unjudged


def make_pairs(
    rollout: Rollout, config: OnlineDPOConfig, group: ProcessGroup
) -> tuple[list[Example], dict[str, float]]:
    """The best and worst response of each prompt as pairs, of all ranks in the order of the prompts, and their metrics.

    Prompts whose responses tie, or of which fewer than two have a score, give no pair; `score_ties` and `unjudged` are
    their shares. Scores in metrics are those before the penalty of a missing end and, of several rewards, before they
    are shaped; a pair's margin is the difference of scores as they are compared.
    """
    count = config.responses_per_prompt
    shaped = rollout.scores if rollout.shaped_scores is None else rollout.shaped_scores
    compared = shaped - config.missing_end_penalty * rollout.score_deviation * (~rollout.ended).float()
    best, worst, tied, unjudged = max_and_min(compared.view(-1, count), config.tie_margin)

    pairs = []
    scores = []
    for prompt, usable in enumerate((~tied & ~unjudged).tolist()):
        chosen, rejected = (prompt * count + int(side[prompt]) for side in (best, worst))
        if usable and rollout.responses[chosen] != rollout.responses[rejected]:
            lead = float(compared[chosen] - compared[rejected])
            row = rollout.rows[chosen]
            responses = [rollout.responses[chosen], rollout.responses[rejected]]
            pair = Example.answered(rollout.prompts[chosen], responses, row.row_id, row.source, margin=lead)
            pairs.append((rollout.numbers[chosen], pair))
            scores.append([float(rollout.scores[chosen]), float(rollout.scores[rejected])])
    sums = [len(tied), float(unjudged.sum()), len(pairs), *np.sum(scores or [[0.0, 0.0]], axis=0).tolist()]
    prompts, failed, pair_count, chosen, rejected = group.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    if failed > (MOST_UNSCORED * prompts if ":" in config.judge else prompts - 1):  # rewards have bounds of their own
        raise UserError(
            f"judge: {'rewards' if config.rewards else config.judge} could not judge the responses to {failed:.0f} of "
            f"{prompts:.0f} prompts (None, or not a number), which are too many to learn from the others; check the "
            "judge"
        )
    metrics = {
        "pairs": pair_count,
        "score_ties": (prompts - failed - pair_count) / prompts,
        "unjudged": failed / prompts,
    }
    if pair_count:
        metrics |= {
            "chosen_score": chosen / pair_count,
            "rejected_score": rejected / pair_count,
            "score_margin": (chosen - rejected) / pair_count,
        }
    everyone = sorted((pair for part in group.gather_objects(pairs) for pair in part), key=lambda pair: pair[0])
    return [pair for _, pair in everyone], metrics


def update_policy(
    updates: PreferenceUpdates, config: OnlineDPOConfig, pairs: Sequence[Example], step: int
) -> dict[str, float]:
    """Epochs of minibatch updates on the pairs of all ranks; the mean of each metric over the updates that have it.

    Without pairs nothing is learned and there are no metrics.
    """
    history: list[dict[str, float]] = []
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.training.seed, step, epoch]).permutation(len(pairs))
        for rows in np.array_split(order, min(config.minibatches, max(1, len(pairs)))):
            if len(rows):
                history.append(updates.update(step, [pairs[row] for row in rows]))
    names = dict.fromkeys(name for metrics in history for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in history if name in metrics])) for name in names}


# Who scores the responses: a reward model, the hotel data set's gold reward, or a judge of pairs


def require_hotel_prompts(prompts: Sequence[Example]) -> None:
    """Refuse prompts that the gold reward cannot score."""
    others = [prompt.row_id for prompt in prompts if not is_prompt(prompt.prompt)]
    if others:
        raise UserError(
            f"{others[0]}: judge=gold judges only prompts of the generated hotel world, and {len(others)} of "
            f"{len(prompts)} are none; take judge=reward_model with reward_model=DIR, or judge=module:function"
        )


def gold_scorer(tokenizer: Tokenizer) -> Scorer:
    """Scores by the true reward of the hotel data set."""

    def score(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        texts = [response_text(tokenizer, ids, end) for ids, end in zip(responses, ended, strict=True)]
        return torch.tensor(gold_score([str(prompt.prompt) for prompt in prompts], texts))

    return score


def pair_scorer(judge: PairJudge, tokenizer: Tokenizer, responses_per_prompt: int) -> Scorer:
    """Scores that are shares of comparisons won: each two responses to a prompt are judged in both orders.

    A prompt of which some comparison was not judged has no scores (not a number). Equal texts tie without being judged.
    """

    def score(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
        texts = [response_text(tokenizer, ids, end) for ids, end in zip(responses, ended, strict=True)]
        starts = range(0, len(texts), responses_per_prompt)
        shown = [
            (start + one, start + other)
            for start in starts
            for i, j in combinations(range(responses_per_prompt), 2)
            for one, other in ((i, j), (j, i))
        ]
        records = [Prompt(prompt.prompt, prompt.extra, prompt.row_id) for prompt in prompts]
        different = [(one, other) for one, other in shown if texts[one] != texts[other]]
        verdicts = judged(judge, records, texts, different)
        won = torch.zeros(len(texts))
        for one, other in shown:
            verdict = verdicts.get((one, other), 0.5)
            won[one] += float("nan") if verdict is None else verdict
            won[other] += float("nan") if verdict is None else 1 - verdict
        shares = won.view(-1, responses_per_prompt) / (2 * (responses_per_prompt - 1))
        return shares.masked_fill(shares.isnan().any(1, keepdim=True), float("nan")).view(-1)

    return score


def judged(
    judge: PairJudge, prompts: Sequence[Prompt], texts: Sequence[str], shown: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float | None]:
    """The judge's verdict on each comparison, for the response shown first."""
    if not shown:
        return {}
    ones = [one for one, _ in shown]
    others = [other for _, other in shown]
    verdicts = list(judge([prompts[i] for i in ones], [texts[i] for i in ones], [texts[i] for i in others]))
    wrong = [verdict for verdict in verdicts if verdict is not None and not 0 <= verdict <= 1]
    if len(verdicts) != len(shown) or wrong:
        answer = f"{len(verdicts)} verdicts on {len(shown)} comparisons" if not wrong else f"the verdict {wrong[0]!r}"
        raise UserError(
            f"judge: it gave {answer}; for each comparison it must give 1, 0.5 or 0 for the response shown first, or "
            "None"
        )
    return dict(zip(shown, verdicts, strict=True))

"""Online DPO: PPO's rollout and DPO's update. The run and its iteration: sample, judge, make pairs, learn from them.

Left out: no value model, no responses of other models, no losses of single responses.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment.algorithms.dpo.dpo import dpo_loss_fn
from alignment.algorithms.dpo.kin import PreferenceUpdates
from alignment.algorithms.dpo.responses import note_end
from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.online_dpo.judges import gold_scorer, pair_scorer, require_hotel_prompts
from alignment.algorithms.policies import Reference, Role, reference_of
from alignment.algorithms.ppo.loop import update_on_rollouts
from alignment.algorithms.ppo.metrics import load_metrics, sample_metrics
from alignment.algorithms.ppo.rollout import Rollout, collect
from alignment.algorithms.ppo.setup import RolloutData, load_start, policy_engine, read_data, source_of
from alignment.algorithms.ppo.state import SamplingState, Saved
from alignment.algorithms.runs import open_run, sources_of
from alignment.data.batches import Example, collate_pairs, join_examples
from alignment.data.text.chat import stop_token_ids
from alignment.errors import UserError
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Sharing
from alignment.rewards.combine import MOST_UNSCORED
from alignment.rewards.functions import function_files, load_own
from alignment.rewards.specs import unnormalized_if_single
from alignment.training import Engine, Run
from alignment.training.distributed import ProcessGroup, shares_weights


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

    Each iteration samples `responses_per_prompt` responses to each of `training.batch_size` prompts, makes a pair of the
    best and the worst one of each prompt, and takes `epochs` passes over the pairs in `minibatches` updates each.

    Raises:
        UserError: bad data or checkpoints, before any training.

    Source: Guo et al. 2024, arXiv:2402.04792, algorithm 1 (their K is 2); losses by the papers named beside them.
    """
    parents = [config.policy, *config.judging_models, config.reference]
    with open_run(config, "online_dpo", parents, files=function_files(config.rewards, config.judge)) as run:
        if not run.finished:
            data = read_data(config, run)
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
    metrics, prompts, tokenizer = load_metrics(config.metrics), data.prompts.rows, data.tokenizer
    if config.judge == "gold":
        require_hotel_prompts(prompts)
    judge = load_own(config.judge, "judge:") if ":" in config.judge else None
    source = source_of(config, rewards=unnormalized_if_single(config.rewards))
    texts, bases = source.prepare(prompts), SharedWeights(config.weights, shared=shares_weights())
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
    high, low = scores.masked_fill(missing, -math.inf), scores.masked_fill(missing, math.inf)
    tied = high.amax(1) - low.amin(1) <= tie_margin
    return high.argmax(1), low.argmin(1), tied & ~unjudged, unjudged


def make_pairs(
    rollout: Rollout, config: OnlineDPOConfig, group: ProcessGroup
) -> tuple[list[Example], dict[str, float]]:
    """The best and worst response of each prompt as pairs, of all ranks in the order of the prompts, and their metrics.

    Prompts whose responses tie, or of which fewer than two have a score, give no pair; `score_ties` and `unjudged` are their
    shares. Scores in metrics are those before the penalty of a missing end and, of several rewards, before they are
    shaped; a pair's margin is the difference of scores as they are compared.
    """
    count = config.responses_per_prompt
    shaped = rollout.scores if rollout.shaped_scores is None else rollout.shaped_scores
    compared = shaped - config.missing_end_penalty * rollout.score_deviation * (~rollout.ended).float()
    best, worst, tied, unjudged = max_and_min(compared.view(-1, count), config.tie_margin)

    def example(i: int) -> Example:
        prompt, response, row = rollout.prompts[i], rollout.responses[i], rollout.rows[i]
        mask = [False] * len(prompt) + [True] * len(response)
        return Example.single([*prompt, *response], mask, row.row_id, row.source)

    pairs, scores = [], []
    for prompt, usable in enumerate((~tied & ~unjudged).tolist()):
        chosen, rejected = (prompt * count + int(side[prompt]) for side in (best, worst))
        if usable and rollout.responses[chosen] != rollout.responses[rejected]:
            lead = float(compared[chosen] - compared[rejected])
            pair = join_examples([example(chosen), example(rejected)], margin=lead)
            pairs.append((rollout.numbers[chosen], pair))
            scores.append([float(rollout.scores[chosen]), float(rollout.scores[rejected])])
    sums = [len(tied), float(unjudged.sum()), len(pairs), *np.sum(scores or [[0.0, 0.0]], axis=0).tolist()]
    prompts, failed, number, chosen, rejected = group.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    if failed > (MOST_UNSCORED * prompts if ":" in config.judge else prompts - 1):  # rewards have bounds of their own
        raise UserError(
            f"judge: {'rewards' if config.rewards else config.judge} could not judge the responses to {failed:.0f} of "
            f"{prompts:.0f} prompts (None, or not a number), which are too many to learn from the others; check the judge"
        )
    metrics = {"pairs": number, "score_ties": (prompts - failed - number) / prompts, "unjudged": failed / prompts}
    if number:
        metrics |= {"chosen_score": chosen / number, "rejected_score": rejected / number}
        metrics |= {"score_margin": (chosen - rejected) / number}
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

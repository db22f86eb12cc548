"""Direct preference optimization (DPO) and its kin: a policy learns from preferences, without a reward model.

The losses are in a table, alignment/losses/preference_table.py; what an update takes beside them is in preference_updates.py.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from alignment.algorithms.dpo_config import DPOConfig, require_margins
from alignment.algorithms.memory_notes import Role, note_memory
from alignment.algorithms.policies import LogProbModel, load_policy, note_dropout_off, reference_of, save_policy
from alignment.algorithms.preference_losses import (
    ALONE,
    GlobalInputs,
    PreferenceLossFn,
    WeightedLoss,
    by_prompt,
    response_log_probs,
    with_sft,
)
from alignment.algorithms.preference_metrics import (
    desirability_metrics,
    notes_of,
    pair_metrics,
    ranking_metrics,
    read_metrics,
)
from alignment.algorithms.preference_updates import PreferenceUpdates, demonstrations, mismatched_rows
from alignment.algorithms.reference_cache import cached_reference
from alignment.algorithms.runs import check_rows, open_run, prepare_training, read_examples, read_split, sources_of
from alignment.data.batches import (
    PairBatch,
    RankedBatch,
    UnpairedBatch,
    collate_labeled,
    collate_pairs,
    collate_rankings,
)
from alignment.data.tokenizers.tokenizer import bos_id
from alignment.loading import load_tokenizer
from alignment.losses.preference_table import Rows
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights, refuse_trained
from alignment.training import LossSum, Run, TrainingConfig, fit
from alignment.training.distributed import shares_weights
from alignment.training.loop import Collate
from alignment.training.source_metrics import ONE_SOURCE, Sources


def run(config: DPOConfig) -> Path:
    """Train a policy on preferences and return its directory, `output/model`.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; the papers of the other losses are named beside them.
    """
    with open_run(config, "dpo", parents=[config.policy, config.reference]) as run:
        tokenizer = load_tokenizer(config.policy, config.chat_template)
        train, held_out = read_split(config.data, config.rows, tokenizer, run)
        texts = [] if config.sft is None else read_examples(config.sft, "demonstrations", tokenizer, run)
        require_margins(config.losses, train, held_out)
        bases = SharedWeights(config.weights, shared=shares_weights())
        policy = load_policy(config.policy, config.adapter, tokenizer, config.output, bases=bases)
        for rows in (train, held_out, texts):
            check_rows(policy.model, rows, config.data.max_length)
        note_dropout_off(policy, run)
        engine, stream = prepare_training(policy.model.eval(), config, train, run)
        reference = None
        if config.reference_log_probs == "cache":
            stream, held_out = cached_reference(config, policy, engine, stream, held_out, run=run)
        elif config.refers:
            reference = reference_of(policy, config.reference, engine, bases=bases)
        roles = [Role("policy", engine.backend.unwrapped, engine)]
        if config.refers:
            cached = Role("reference", None, remark="its log-probabilities, computed beforehand")
            roles.append(cached if reference is None else reference.role)
        refuse_trained({role.name: role.model for role in roles if role.model is not None})
        note_memory(run, roles)
        models = [policy.model, None if reference is None else reference.model]
        sources = sources_of(config.data)
        collate = sources.weighted(collate_of(config.rows, models, config.training, run))
        updates = PreferenceUpdates(
            engine,
            config.losses,
            dpo_loss_fn(engine.model, reference, config, sources),
            reference=reference,
            collate=partial(collate, micro_batch_tokens=config.training.tokens_per_forward),
            mismatch=partial(mismatched_rows, max_length=config.data.max_length, bos=bos_id(tokenizer)),
            imitates=config.sft is None and config.sft_weight > 0,
            demonstrations=demonstrations(config, texts),
        )
        fit(
            engine, stream, collate, updates.loss_fn, training=config.training, run=run,
            update=updates.update,
            evaluate=partial(updates.evaluate, held_out, updates.collate(held_out)) if held_out else None,
            save=partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size),
        )  # fmt: skip
        for line in notes_of(read_metrics(run.output / "metrics.jsonl")) if run.is_main else ():
            run.note(line)
        return run.output / "model"


def collate_of(rows: Rows, models: Sequence[object], training: TrainingConfig, run: Run) -> Collate:
    """Rows of a kind -> micro-batches, in which responses share their prompt where all of the models can read that."""
    if rows == "labels":
        return collate_labeled
    sharing = prompt_sharing(models, wanted=training.share_prompts, note=run.note)
    return partial(collate_pairs if rows == "comparisons" else collate_rankings, share_prompts=sharing)


def dpo_loss_fn(
    policy: LogProbModel, reference: LogProbModel | None, config: DPOConfig, sources: Sources = ONE_SOURCE
) -> PreferenceLossFn:
    """Loss function of the config's losses for their kind of rows, summed over the batch's rows.

    Args:
        policy: in training.
        reference: computes no gradients; None where batches hold its log-probabilities, or no loss needs them.
        config: names the losses.
        sources: told apart in metrics, and weighed.
    """
    reference, sft_coef = reference if config.refers else None, 0.0 if config.sft else config.sft_weight
    if config.rows == "labels":
        return labeled_loss_fn(policy, reference, config.losses, sft_coef, sources)
    if config.rows == "rankings":
        return ranked_loss_fn(policy, reference, config.losses, sft_coef, sources)
    return pair_loss_fn(policy, reference, config.losses, sft_coef, sources)


def pair_loss_fn(
    policy: LogProbModel,
    reference: LogProbModel | None,
    losses: Sequence[WeightedLoss],
    sft_coef: float,
    sources: Sources,
) -> PreferenceLossFn:
    """Loss function of pairs; `sft_coef` weighs the chosen responses' negative log-likelihood per token."""

    def loss_fn(batch: PairBatch, given: GlobalInputs = ALONE) -> LossSum:
        responses = response_log_probs(policy, reference, batch)  # of 2B, chosen first
        lengths = responses.tokens.chunk(2)
        more = {"margins": batch.margins, "length_difference": lengths[0] - lengths[1], None: None}
        cost = torch.zeros_like(responses.policy[: len(lengths[0])])
        for loss in losses:
            columns = [side for column in responses.of(loss) for side in column.chunk(2)]
            row_input = [] if (extra := more[loss.spec.row_input]) is None else [extra]
            keywords = {**loss.parameters, **given.keywords(loss)}
            cost = cost + loss.weight * loss.spec.function(*columns, *row_input, **keywords)
        watched = pair_metrics(responses, losses[0])
        loss = sources.loss_sum(cost, batch, watched.sums, accuracy=watched.accuracy)
        return with_sft(loss, responses, batch, given, sft_coef=sft_coef, means=watched.means)

    return loss_fn


def labeled_loss_fn(
    policy: LogProbModel,
    reference: LogProbModel | None,
    losses: Sequence[WeightedLoss],
    sft_coef: float,
    sources: Sources,
) -> PreferenceLossFn:
    """Loss function of responses judged alone; `sft_coef` as in `pair_loss_fn`, of the desirable ones."""

    def loss_fn(batch: UnpairedBatch, given: GlobalInputs = ALONE) -> LossSum:
        responses = response_log_probs(policy, reference, batch)  # of B
        cost = torch.zeros_like(responses.policy)
        for loss in losses:
            keywords = {**loss.parameters, **given.keywords(loss)}
            cost = cost + loss.weight * loss.spec.function(*responses.of(loss), batch.desirable, **keywords)
        watched = desirability_metrics(responses, batch.desirable, losses[0], given.kl)
        loss = sources.loss_sum(cost, batch, watched.sums, accuracy=watched.accuracy)
        return with_sft(loss, responses, batch, given, sft_coef=sft_coef, means=watched.means)

    return loss_fn


def ranked_loss_fn(
    policy: LogProbModel,
    reference: LogProbModel | None,
    losses: Sequence[WeightedLoss],
    sft_coef: float,
    sources: Sources,
) -> PreferenceLossFn:
    """Loss function of rankings; `sft_coef` as in `pair_loss_fn`, of the best responses."""

    def loss_fn(batch: RankedBatch, given: GlobalInputs = ALONE) -> LossSum:
        responses = response_log_probs(policy, reference, batch)  # of D
        ranks, mask = by_prompt(batch.ranks, batch)  # [B, K]
        cost = torch.zeros(len(batch.sizes), device=ranks.device)
        for loss in losses:
            columns = [by_prompt(column, batch)[0] for column in responses.of(loss)]
            cost = cost + loss.weight * loss.spec.function(*columns, ranks, mask=mask, **loss.parameters)
        watched = ranking_metrics(responses, batch, losses[0])
        loss = sources.loss_sum(cost, batch, watched.sums, accuracy=watched.accuracy)
        return with_sft(loss, responses, batch, given, sft_coef=sft_coef, means=watched.means)

    return loss_fn

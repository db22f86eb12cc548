"""The run of DPO and its kin, and its loss function; the losses are in a table, losses/preference_table.py."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignment.algorithms.dpo.responses import (
    ResponseLogProbs,
    WatchedMetrics,
    desirability_metrics,
    notes_of,
    pair_metrics,
    ranking_metrics,
    read_metrics,
    response_log_probs,
)
from alignment.algorithms.dpo.setup import DPOConfig, PreferenceConfig, WeightedLoss, require_margins
from alignment.algorithms.dpo.updates import (
    ALONE,
    GlobalInputs,
    PreferenceLossFn,
    PreferenceUpdates,
    demonstrations,
    mismatched_rows,
    with_sft,
)
from alignment.algorithms.memory_notes import Role, note_memory
from alignment.algorithms.policies import LogProbModel, load_policy, note_dropout_off, reference_of, save_policy
from alignment.algorithms.runs import check_rows, open_run, prepare_training, read_examples, read_split, sources_of
from alignment.data.batches import (
    PairBatch,
    PreferenceBatch,
    RankedBatch,
    UnpairedBatch,
    collate_labeled,
    collate_pairs,
    collate_rankings,
    padded_groups,
)
from alignment.data.prepare import Preparation
from alignment.data.stream import Stream
from alignment.data.tokenize import tokenize_ordered_rankings
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
        if run.finished:
            return run.output / "model"
        tokenizer = load_tokenizer(config.policy, config.chat_template)
        preparation = ROW_KINDS[config.rows].preparation
        train, held_out = read_split(config, config.rows, tokenizer, run, preparation=preparation)
        texts = [] if config.sft is None else read_examples(config.sft, "demonstrations", tokenizer, run)
        require_margins(config.losses, train, held_out)
        bases = SharedWeights(config.weights, shared=shares_weights())
        policy = load_policy(config.policy, config.adapter, tokenizer, config.output, bases=bases)
        for rows, data in ((train, config.data), (held_out, config.data), (texts, config.sft or config.data)):
            check_rows(policy.model, rows, data.max_length)
        note_dropout_off(policy, run)
        engine, stream = prepare_training(policy.model.eval(), config, train, run)
        reference = None
        if config.reference_log_probs == "cache":
            from alignment.algorithms.dpo.reference_cache import cached_reference

            assert isinstance(stream, Stream)  # streamed rows are refused with the config
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
            imitates=config.chosen_weight > 0,
            demonstrations=demonstrations(config, texts, engine),
        )
        fit(
            engine, stream, collate, updates.loss_fn, training=config.training, run=run,
            update=updates.update,
            evaluate=partial(updates.evaluate, held_out, updates.collate(held_out)) if held_out else None,
            save=partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size),
            remembers=updates,
        )  # fmt: skip
        for line in notes_of(read_metrics(run.output / "metrics.jsonl")) if run.is_main else ():
            run.note(line)
        return run.output / "model"


def dpo_loss_fn(
    policy: LogProbModel, reference: LogProbModel | None, config: PreferenceConfig, sources: Sources = ONE_SOURCE
) -> PreferenceLossFn:
    """Loss function of the config's losses for their kind of rows, summed over the batch's rows.

    Args:
        policy: in training.
        reference: computes no gradients; None where batches hold its log-probabilities, or no loss needs them.
        config: names the losses.
        sources: told apart in metrics, and weighed.
    """
    losses, kind = config.losses, ROW_KINDS[config.rows]
    reference = reference if config.refers else None

    def loss_fn(batch: PreferenceBatch, given: GlobalInputs = ALONE) -> LossSum:
        responses = response_log_probs(policy, reference, batch)
        costs = []
        for loss in losses:
            columns, more = kind.arguments(responses, batch, loss)
            keywords = {**more, **loss.parameters, **given.keywords(loss)}
            costs.append(loss.weight * loss.spec.function(*columns, **keywords))
        watched = kind.watch(responses, batch, losses[0], given.kl)
        loss = sources.loss_sum(torch.stack(costs).sum(0), batch, watched.sums, accuracy=watched.accuracy)
        return with_sft(loss, responses, batch, given, sft_coef=config.chosen_weight, means=watched.means)

    return loss_fn


# The three kinds of rows


class RowKind(NamedTuple):
    """What differs between the kinds of rows that preferences come in.

    Attributes:
        collate: rows -> micro-batches.
        arguments: (log-probabilities, batch, loss) -> what the loss's function takes of them, by position and by keyword.
        watch: (log-probabilities, batch, loss, KTO's reference point) -> metrics.
        preparation: how rows become examples; None: as in every stage that reads them.
    """

    collate: Callable[..., Sequence[Any]]
    arguments: Callable[[ResponseLogProbs, Any, WeightedLoss], tuple[list[Tensor], dict[str, Tensor]]]
    watch: Callable[[ResponseLogProbs, Any, WeightedLoss, Tensor | None], WatchedMetrics]
    preparation: Preparation | None = None


def pair_arguments(
    responses: ResponseLogProbs, batch: PairBatch, loss: WeightedLoss
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of the chosen and of the rejected responses under policy and reference, and the row's input, [B]."""
    columns = [side for column in responses.of(loss) for side in column.chunk(2)]
    if loss.spec.row_input == "margins":
        assert batch.margins is not None
        columns.append(batch.margins)
    elif loss.spec.row_input == "length_difference":
        chosen_tokens, rejected_tokens = responses.tokens.chunk(2)
        columns.append(chosen_tokens - rejected_tokens)
    if loss.spec.batch_input in ("paired_values", "unpaired_values") and batch.pair_positions is not None:
        return columns, {"positions": batch.pair_positions}
    return columns, {}


def labeled_arguments(
    responses: ResponseLogProbs, batch: UnpairedBatch, loss: WeightedLoss
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities under policy and reference, and whether each response is desirable, [B]."""
    return [*responses.of(loss), batch.desirable], {}


def ranked_arguments(
    responses: ResponseLogProbs, batch: RankedBatch, loss: WeightedLoss
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities under policy and reference and the ranks, a row per prompt, and where it has responses, [B, K]."""
    ranks, mask = padded_groups(batch.ranks, batch)
    return [*(padded_groups(column, batch)[0] for column in responses.of(loss)), ranks], {"mask": mask}


ORDERED = Preparation("ordered rankings", "rankings", tokenize_ordered_rankings)

ROW_KINDS: dict[Rows, RowKind] = {
    "comparisons": RowKind(collate_pairs, pair_arguments, pair_metrics),
    "labels": RowKind(collate_labeled, labeled_arguments, desirability_metrics),
    "rankings": RowKind(collate_rankings, ranked_arguments, ranking_metrics, ORDERED),
}


def collate_of(rows: Rows, models: Sequence[object], training: TrainingConfig, run: Run) -> Collate:
    """Rows of a kind -> micro-batches, in which responses share their prompt where all of the models can read that."""
    if rows == "labels":
        return collate_labeled
    sharing = prompt_sharing(models, wanted=training.share_prompts, note=run.note)
    return partial(ROW_KINDS[rows].collate, share_prompts=sharing)

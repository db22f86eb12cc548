"""Direct preference optimization (DPO) and its kin: the run, and the cost of each row.

The formulas are in losses/preference.py, by name in losses/preference_table.py; what a loss takes of the whole global batch
(KTO's z0, AOT's order, BCO's shift) is in global_inputs.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignment.algorithms.dpo.config import DPOConfig, PreferenceConfig, WeightedLoss
from alignment.algorithms.dpo.global_inputs import (
    ALONE,
    GlobalInputs,
    PreferenceLossFn,
    PreferenceUpdates,
    demonstrations,
    with_sft,
)
from alignment.algorithms.dpo.reference_cache import cached_reference
from alignment.algorithms.dpo.responses import (
    ResponseLogProbs,
    WatchedMetrics,
    label_metrics,
    note_end,
    pair_metrics,
    ranking_metrics,
    require_margins,
    response_log_probs,
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
from alignment.data.codecs import CODECS
from alignment.data.mixture import MixtureStream
from alignment.data.prepare import Preparation
from alignment.data.stream import Stream
from alignment.data.tokenize import tokenize_ordered_rankings
from alignment.data.tokenizers.tokenizer import bos_id
from alignment.loading import load_tokenizer
from alignment.losses.preference import (
    aot_paired_loss,
    aot_unpaired_loss,
    bco_loss,
    dpo_loss,
    kto_loss,
    odpo_loss,
    orpo_loss,
    rdpo_loss,
)
from alignment.losses.preference_table import Rows
from alignment.losses.ranking import ranked_dpo_loss
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.training import LossSum, fit
from alignment.training.distributed import shares_weights
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
        rows = ROW_KINDS[config.rows]
        train, held_out = read_split(config, config.rows, tokenizer, run, preparation=rows.preparation)
        texts = [] if config.sft is None else read_examples(config.sft, "demonstrations", tokenizer, run)
        require_margins(config.losses, train, held_out)

        bases = SharedWeights(config.weights, shared=shares_weights())
        policy = load_policy(config.policy, config.adapter, tokenizer, config.output, bases=bases)
        for examples, data in ((train, config.data), (held_out, config.data), (texts, config.sft or config.data)):
            check_rows(policy.model, examples, data.max_length)
        note_dropout_off(policy, run)
        engine, stream = prepare_training(policy.model.eval(), config, train, run)

        roles, reference = [Role("policy", engine.backend.unwrapped, engine)], None
        if config.cached:
            assert isinstance(stream, Stream | MixtureStream)  # streamed rows are refused with the config
            stream, held_out = cached_reference(config, policy, engine, stream, held_out, run=run)
            roles.append(Role("reference", None, remark="its log-probabilities, computed beforehand"))
        elif config.refers:
            reference = reference_of(policy, config.reference, engine, bases=bases)
            roles.append(reference.role)
        note_memory(run, roles)

        sources, collate = sources_of(config.data), rows.collate
        if config.rows != "labels":
            sharing = prompt_sharing(
                [policy.model, reference and reference.model], wanted=config.training.share_prompts, note=run.note
            )
            collate = partial(collate, share_prompts=sharing)
        collate = sources.weighted(collate)
        loss_fn = dpo_loss_fn(engine.model, reference, config, sources)
        updates = PreferenceUpdates(
            engine, config, loss_fn, reference, partial(collate, micro_batch_tokens=config.training.tokens_per_forward),
            bos=bos_id(tokenizer), demonstrations=demonstrations(config, texts, engine),
        )  # fmt: skip
        fit(
            engine, stream, collate, loss_fn, training=config.training, run=run,
            update=updates.update, evaluate=updates.evaluation(held_out), remembers=updates,
            save=partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size),
        )  # fmt: skip
        note_end(run)
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
    losses, rows = config.losses, ROW_KINDS[config.rows]

    def loss_fn(batch: PreferenceBatch, inputs: GlobalInputs = ALONE) -> LossSum:
        responses = response_log_probs(policy, reference if config.refers else None, batch)
        costs = [loss.weight * rows.cost(loss, responses, batch, inputs) for loss in losses]
        watched = rows.watch(responses, batch, losses[0], inputs.kl)
        loss = sources.loss_sum(torch.stack(costs).sum(0), batch, watched.sums, accuracy=watched.accuracy)
        loss = replace(loss, means=loss.means | watched.means)
        return with_sft(loss, responses, batch, inputs, coef=config.chosen_weight) if config.chosen_weight else loss

    return loss_fn


def pair_cost(loss: WeightedLoss, responses: ResponseLogProbs, batch: PairBatch, inputs: GlobalInputs) -> Tensor:
    """Cost of each pair, [B]."""
    chosen, rejected = responses.log_ratios(loss).chunk(2)  # log p - log p_ref, [B]; log p where there is no reference
    match loss.name:
        case "sigmoid":
            return dpo_loss(chosen, rejected, **loss.parameters)
        case "odpo":
            assert batch.margins is not None
            return odpo_loss(chosen, rejected, batch.margins, **loss.parameters)
        case "rdpo":
            chosen_tokens, rejected_tokens = responses.tokens.chunk(2)
            return rdpo_loss(chosen, rejected, chosen_tokens - rejected_tokens, **loss.parameters)
        case "bco":
            return bco_loss(chosen, rejected, beta=loss.beta, shift=loss.beta * inputs.shift)
        case "aot":
            policy, reference = responses.margins()
            return aot_paired_loss(policy, reference, order=inputs.order(batch, paired=True), **loss.parameters)
        case "aot_unpaired":
            return aot_unpaired_loss(chosen, rejected, order=inputs.order(batch, paired=False), **loss.parameters)
        case "orpo":
            return loss.beta * orpo_loss(chosen, rejected)
        case _:  # all others take the two log-ratios and their parameters
            return loss.spec.function(chosen, rejected, **loss.parameters)


def label_cost(loss: WeightedLoss, responses: ResponseLogProbs, batch: UnpairedBatch, inputs: GlobalInputs) -> Tensor:
    """Cost of each response that is labeled desirable or not, [B]; APO-zero's reference point is 0."""
    assert responses.reference is not None
    kl = inputs.kl if loss.name == "kto" else 0.0
    return kto_loss(responses.policy, responses.reference, batch.desirable, kl, **loss.parameters)


def ranking_cost(loss: WeightedLoss, responses: ResponseLogProbs, batch: RankedBatch, inputs: GlobalInputs) -> Tensor:
    """Cost of each prompt's ranking, [B]."""
    log_ratios, mask = padded_groups(responses.log_ratios(loss), batch)  # [B, K]
    ranks, _ = padded_groups(batch.ranks, batch)
    return ranked_dpo_loss(log_ratios, ranks, mask=mask, beta=loss.beta)


class RowKind(NamedTuple):
    """Functions of one kind of rows that preferences come in.

    Attributes:
        collate: rows -> micro-batches.
        cost: (loss, log-probabilities, batch, inputs of the global batch) -> cost of each row, [B].
        watch: (log-probabilities, batch, loss, KTO's reference point) -> metrics.
        preparation: how rows become examples; None: as in every stage that reads them.
    """

    collate: Callable[..., Sequence[Any]]
    cost: Callable[[WeightedLoss, ResponseLogProbs, Any, GlobalInputs], Tensor]
    watch: Callable[[ResponseLogProbs, Any, WeightedLoss, Tensor | float], WatchedMetrics]
    preparation: Preparation | None = None


ORDERED = Preparation("ordered rankings", "rankings", tokenize_ordered_rankings, CODECS["rankings"])

ROW_KINDS: dict[Rows, RowKind] = {
    "comparisons": RowKind(collate_pairs, pair_cost, pair_metrics),
    "labels": RowKind(collate_labeled, label_cost, label_metrics),
    "rankings": RowKind(collate_rankings, ranking_cost, ranking_metrics, ORDERED),
}

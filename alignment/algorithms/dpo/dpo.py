"""Direct preference optimization (DPO): the run and its loss function. Variants differ in the loss, see variants.py."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from alignment.algorithms.dpo.config import DPOConfig, PreferenceConfig
from alignment.algorithms.dpo.global_inputs import NO_GLOBAL_INPUTS, GlobalInputs, PreferenceLossFn, PreferenceUpdates
from alignment.algorithms.dpo.responses import metrics_of, note_end, require_margins, response_log_probs
from alignment.algorithms.dpo.variants import collate_for_rows, preparation_for_preferences, variant_loss, with_sft
from alignment.algorithms.policies import (
    GENERATORS,
    Role,
    load_policy,
    note_balance,
    note_dropout_off,
    note_memory,
    reference_of,
    save_policy,
)
from alignment.algorithms.runs import check_rows, collate_for, open_run, prepare_training, read_split, sources_of
from alignment.data.batches import PreferenceBatch
from alignment.loading import Checkpoint, load_tokenizer
from alignment.losses.preference import dpo_loss
from alignment.models.outputs import LogProbModel
from alignment.models.shared_weights import SharedWeights
from alignment.training import LossSum, fit
from alignment.training.distributed import shares_weights
from alignment.training.terms import ONE_SOURCE, Sources


def run(config: DPOConfig) -> Path:
    """Train a policy on preferences and return its directory, `output/model`.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; the papers of the other losses are named beside them.
    """
    with open_run(config, "dpo", parents=[config.policy, config.reference]) as run:
        if run.finished:
            return run.output / "model"
        start = Checkpoint(config.policy)
        tokenizer = load_tokenizer(start, config.chat_template)
        train, held_out = read_split(
            config, config.rows, tokenizer, run, preparation=preparation_for_preferences(start, config)
        )
        require_margins(config.losses, train, held_out)

        bases = SharedWeights(config.weights, shared=shares_weights())
        policy = load_policy(start, config.adapter, tokenizer, config.output, bases=bases, architectures=GENERATORS)
        check_rows(policy.model, train + held_out, config.data.max_length)
        note_dropout_off(policy, run)
        note_balance(run, policy.model)
        engine, stream = prepare_training(policy.model.eval(), config, train, run)

        reference = None
        roles = [Role("policy", engine.backend.unwrapped, engine)]
        if config.cached:
            from alignment.algorithms.dpo.reference_cache import cached_reference

            stream, held_out = cached_reference(config, policy, engine, stream, held_out, run=run)
            roles.append(Role("reference", None, remark="its log-probabilities, computed beforehand"))
        elif config.refers:
            reference = reference_of(policy, config.reference, engine, bases=bases)
            roles.append(reference.role)
        note_memory(run, roles)

        collate = collate_for(
            policy.model, collate_for_rows(config, [policy.model, reference and reference.model], run)
        )
        loss_fn = dpo_loss_fn(engine.model, reference, config, sources_of(config.data))
        collate_micro = partial(collate, micro_batch_tokens=config.training.tokens_per_forward)
        updates = PreferenceUpdates(engine, config, loss_fn, reference, collate_micro, bos=tokenizer.bos_token_id)
        fit(
            engine,
            stream,
            collate,
            loss_fn,
            training=config.training,
            run=run,
            update=updates.update,
            evaluate=updates.evaluation(held_out),
            remembers=updates,
            save=partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size),
        )
        note_end(run)
        return run.output / "model"


def dpo_loss_fn(
    policy: LogProbModel, reference: LogProbModel | None, config: PreferenceConfig, sources: Sources = ONE_SOURCE
) -> PreferenceLossFn:
    """Loss function of the config's losses, summed over the rows of a batch.

    Args:
        policy: in training.
        reference: computes no gradients; None where batches hold its log-probabilities, or no loss needs them.
        config: names the losses.
        sources: reported separately in metrics.
    """
    losses = config.losses
    reference = reference if config.refers else None

    def loss_fn(batch: PreferenceBatch, inputs: GlobalInputs = NO_GLOBAL_INPUTS) -> LossSum:
        responses = response_log_probs(policy, reference, batch)
        costs = []
        for loss in losses:
            if loss.name == "sigmoid":
                chosen, rejected = responses.log_ratios(loss).chunk(2)  # log p - log p_ref of the two responses, [B]
                cost = dpo_loss(chosen, rejected, beta=loss.beta, label_smoothing=loss.parameters["label_smoothing"])
            else:
                cost = variant_loss(loss, responses, batch, inputs)
            costs.append(loss.weight * cost)
        watched = metrics_of(responses, batch, losses[0], inputs.kl)
        total = sources.loss_sum(torch.stack(costs).sum(0), batch, watched.sums, accuracy=watched.accuracy)
        total = replace(total, means=total.means | watched.means)
        return with_sft(total, responses, batch, inputs, coef=config.sft_weight) if config.sft_weight else total

    return loss_fn

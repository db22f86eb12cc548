"""DPO's variants: the cost of each row by the loss's name, and rows and micro-batches of the kind that it takes."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from alignment.algorithms.dpo.config import DPOConfig, WeightedLoss
from alignment.algorithms.dpo.global_inputs import GlobalInputs
from alignment.algorithms.dpo.responses import (
    ResponseLogProbs,
    preferred_responses,
)
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
from alignment.data.tokenize import tokenize_ordered_rankings
from alignment.errors import UserError
from alignment.loading import Checkpoint, preparation_for
from alignment.losses import preference
from alignment.losses.ranking import ranked_dpo_loss
from alignment.models.shared_prompts import prompt_sharing
from alignment.training import LossSum, Run
from alignment.training.terms import Collate


def preparation_for_preferences(start: Checkpoint, config: DPOConfig) -> Preparation:
    """The preparation of the config's rows; UserError where policy and reference are of different architectures."""
    kind = start.architecture
    if config.reference and (other := Checkpoint(config.reference).architecture) != kind:
        raise UserError(
            f"reference: {config.reference} is of kind {other}, and the policy of kind {kind}; both read the same rows"
        )
    if config.rows == "rankings" and kind == "decoder":
        return Preparation("ordered rankings", "rankings", tokenize_ordered_rankings)
    return preparation_for(start, config.rows)


def collate_for_rows(config: DPOConfig, models: Sequence[object], run: Run) -> Collate:
    """Rows of the config's kind -> micro-batches; responses share their prompt where all models can read that."""
    if config.rows == "labels":
        return collate_labeled
    sharing = prompt_sharing(models, wanted=config.training.share_prompts, note=run.note)
    collate = collate_pairs if config.rows == "comparisons" else collate_rankings
    return partial(collate, share_prompts=sharing)


def variant_loss(
    loss: WeightedLoss, responses: ResponseLogProbs, batch: PreferenceBatch, inputs: GlobalInputs
) -> Tensor:
    """Cost of each row of a batch, [B]."""
    if loss.spec.rows == "labels":
        assert isinstance(batch, UnpairedBatch) and responses.reference is not None
        kl = inputs.kl if loss.name == "kto" else 0.0  # APO-zero's reference point is 0
        return preference.kto_loss(responses.policy, responses.reference, batch.desirable, kl, **loss.parameters)
    if loss.spec.rows == "rankings":
        assert isinstance(batch, RankedBatch)
        log_ratios, mask = padded_groups(responses.log_ratios(loss), batch)  # [B, K]
        ranks, _ = padded_groups(batch.ranks, batch)
        return ranked_dpo_loss(log_ratios, ranks, mask=mask, beta=loss.beta)
    chosen, rejected = responses.log_ratios(loss).chunk(2)  # log p - log p_ref, [B]; log p where there is no reference
    match loss.name:
        case "odpo":
            assert isinstance(batch, PairBatch) and batch.margins is not None
            return preference.odpo_loss(chosen, rejected, batch.margins, **loss.parameters)
        case "rdpo":
            chosen_tokens, rejected_tokens = responses.tokens.chunk(2)
            return preference.rdpo_loss(chosen, rejected, chosen_tokens - rejected_tokens, **loss.parameters)
        case "bco":
            return preference.bco_loss(chosen, rejected, beta=loss.beta, shift=loss.beta * inputs.shift)
        case "aot":
            order = inputs.order(batch, paired=True)
            return preference.aot_paired_loss(*responses.margins(), order=order, **loss.parameters)
        case "aot_unpaired":
            order = inputs.order(batch, paired=False)
            return preference.aot_unpaired_loss(chosen, rejected, order=order, **loss.parameters)
        case "orpo":
            return loss.beta * preference.orpo_loss(chosen, rejected)
        case _:  # all others take the two log-ratios and their parameters
            return loss.spec.function(chosen, rejected, **loss.parameters)


def with_sft(
    loss: LossSum, responses: ResponseLogProbs, batch: PreferenceBatch, inputs: GlobalInputs, *, coef: float
) -> LossSum:
    """The loss with the negative log-likelihood of the batch's preferred responses, as a part of a sum over rows.

    Over the whole global batch the parts add up to (rows) * coef * (mean over the preferred responses' tokens of -log
    p).
    """
    preferred = preferred_responses(batch)
    nll = -torch.where(preferred, responses.policy, 0.0).sum()
    tokens = torch.where(preferred, responses.tokens, 0.0).sum()
    mean_tokens = tokens / batch.weight if inputs.mean_tokens is None else inputs.mean_tokens
    total = loss.total + coef * (nll / mean_tokens.clamp(min=1e-9))
    return LossSum(total, loss.metrics, loss.means | {"sft_loss": (nll.detach(), tokens)})

"""DPO's kin: the cost of each row by the name of the loss, and the batches of their kinds of rows."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from alignment.algorithms.dpo.config import DPOConfig, WeightedLoss
from alignment.algorithms.dpo.global_inputs import GlobalInputs
from alignment.algorithms.dpo.responses import ResponseLogProbs
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
from alignment.losses import preference
from alignment.losses.ranking import ranked_dpo_loss
from alignment.models.shared_prompts import prompt_sharing
from alignment.training import Run
from alignment.training.loop import Collate

# Preparations of rows that differ from those of other stages.
PREPARATIONS = {"rankings": Preparation("ordered rankings", "rankings", tokenize_ordered_rankings)}


def collate_of(config: DPOConfig, models: Sequence[object], run: Run) -> Collate:
    """Rows of the config's kind -> micro-batches, in which responses share their prompt where all models can read that."""
    if config.rows == "labels":
        return collate_labeled
    sharing = prompt_sharing(models, wanted=config.training.share_prompts, note=run.note)
    collate = collate_pairs if config.rows == "comparisons" else collate_rankings
    return partial(collate, share_prompts=sharing)


def cost_of_kin(
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

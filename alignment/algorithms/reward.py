"""Reward models, trained on pairs of responses, on K ranked ones, or on labeled steps; decoders and encoders.

The settings, the rows of each objective, the run, and the loss. An ensemble has the cost of each member, on rows of its
own choice where it draws any.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Gt
from torch import Tensor

from alignment.adapters.specs import AdapterSpec
from alignment.algorithms.policies import Policy, Role, note_balance, note_memory
from alignment.algorithms.reward_networks import (
    EnsembleConfig,
    NormalizeConfig,
    load_reward_start,
    measure_reference,
    reference_texts,
    save_reward_model,
    write_reference,
)
from alignment.algorithms.runs import check_rows, open_run, prepare_training, read_split, sources_of
from alignment.data.batches import (
    PairBatch,
    RankedBatch,
    StepBatch,
    collate_pairs,
    collate_rankings,
    collate_steps,
    padded_groups,
)
from alignment.data.config import DataConfig
from alignment.data.encoder_inputs import encode_comparisons, encode_ordered_rankings, encode_rankings, with_segments
from alignment.data.prepare import TOKENIZE, Preparation, Tokenize
from alignment.data.rows.records import Kind
from alignment.data.text.special_tokens import end_token_ids
from alignment.data.tokenize import tokenize_comparisons, tokenize_ordered_rankings, tokenize_rankings, tokenize_steps
from alignment.errors import UserError
from alignment.loading import Checkpoint, load_tokenizer
from alignment.losses.preference import Measured, bradley_terry_loss, center_penalty, preference_metrics
from alignment.losses.ranking import (
    center_scores_penalty,
    ordered_pair_metrics,
    plackett_luce_loss,
    prompt_accuracy,
    ranking_loss,
    rao_kupper_loss,
    step_loss,
    step_metrics,
)
from alignment.models.encoder_decoder import DocumentClassifier
from alignment.models.families import FAMILIES, is_external_type
from alignment.models.model import Model
from alignment.models.safetensors_files import read_config
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.ragged import Ragged, RaggedBatch, Sharing
from alignment.reward_model.model import AdapterEnsemble, document_scores
from alignment.settings import NonNegativeFloat, PositiveFloat, Rule, Settings, refusal
from alignment.training import Collate, LossFn, LossSum, OptimConfig, TrainingConfig, fit
from alignment.training.terms import ONE_SOURCE, Sources

POISSON = np.cumsum([math.exp(-1) / math.factorial(count) for count in range(16)])  # P(number <= count) of Poisson(1)

RewardLoss = Literal["bradley_terry", "ranking", "plackett_luce", "rao_kupper", "steps"]


@dataclass(frozen=True)
class RewardOptim(OptimConfig):
    """The optimizer and its schedule, with the learning rate of reward models."""

    learning_rate: PositiveFloat = 1e-5


@dataclass(frozen=True)
class RewardConfig(Settings):
    """Settings of one reward-model run.

    Attributes:
        policy: the checkpoint whose trunk the reward model starts from, usually the SFT policy; a decoder, or an
            encoder such as BERT, which reads prompt and response as a pair of texts.
        data: comparisons; rankings (pairs among them) for ranking, plackett_luce and rao_kupper; steps for steps.
        output: the run's directory.
        loss: bradley_terry: pairs. ranking: K responses, each prompt the mean of its pairs (InstructGPT).
            plackett_luce: the probability of the whole ranking. rao_kupper: pairs, ties among them. steps: a label at
                the end of each step, for
            a process reward model.
        theta: of rao_kupper, how easily two responses tie, above 1.
        adapter: train an adapter and the score head only; None trains every weight. Of an encoder it is saved merged.
        chat_template: as for SFT; saved with the model, whose scores depend on it.
        ensemble: train several members at once; None: one model.
        normalize: give scores mean 0 and deviation 1 on reference samples, after training; None: scores stay as they
            are.
        weights: type of the frozen weights in memory.
        center_coef: weight of (chosen + rejected)^2, which holds the scores near 0 (Eisenstein et al. 2023,
            arXiv:2312.09244); 0 leaves their level free.
    """

    policy: str
    data: DataConfig
    output: str
    loss: RewardLoss = "bradley_terry"
    theta: Annotated[float, Gt(1)] = 2.0
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    ensemble: EnsembleConfig | None = None
    normalize: NormalizeConfig | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    center_coef: NonNegativeFloat = 0.0
    optim: RewardOptim = field(default_factory=RewardOptim)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    RULES = (
        Rule("weights", lambda c: refusal(check_weights, c.weights, frozen=c.adapter is not None)),
        Rule(
            "center_coef",
            lambda c: c.center_coef and c.loss == "steps",
            "holds scores of whole responses near 0; leave it out with loss=steps",
        ),
        Rule(
            "theta",
            lambda c: c.theta != 2 and c.loss != "rao_kupper",
            "goes with loss=rao_kupper; loss={self.loss} has none",
        ),
        Rule(
            "ensemble",
            lambda c: c.ensemble is not None and c.ensemble.kind == "adapters" and c.adapter is None,
            "of kind adapters needs `adapter`, whose copies are the members; set adapter.kind=lora",
        ),
        Rule(
            "normalize",
            lambda c: c.loss == "steps" and c.normalize is not None,
            "is for scores of whole responses; scores of steps are logits of probabilities",
        ),
    )


@dataclass(frozen=True)
class Objective:
    """The rows of one way to learn scores."""

    kind: Kind  # of the rows
    tokenize: Tokenize  # rows -> examples, for a decoder
    encode: Tokenize | None  # the same for an encoder; None: only decoders can learn this
    collate: Callable[..., Sequence[Any]]  # examples -> batches

    def collate_sharing(self, sharing: Sharing) -> Collate:
        """`collate` of batches in which responses share their prompt, where a prompt has several."""
        return self.collate if self.kind == "steps" else partial(self.collate, share_prompts=sharing)

    def preparation_for(self, start: Checkpoint) -> Preparation:
        """The preparation of rows for a checkpoint; no weights are read."""
        tokenize = self.tokenize
        if start.architecture != "decoder":
            if self.encode is None or is_external_type(read_config(start.base)):
                names = [name for name, f in FAMILIES.items() if f.architecture != "decoder" and "scalar" in f.tasks]
                encoders = "" if self.encode is None else f", or from a model of {', '.join(names)}"
                raise UserError(
                    f"{start.source}: this model is an {start.architecture}, and a reward model of this loss starts "
                    f"from a decoder, which reads prompt and response in one text{encoders}"
                )
            tokenize = self.encode
        name = self.kind if tokenize is TOKENIZE[self.kind] else tokenize.__name__
        return Preparation(name, self.kind, tokenize)


RANKED = Objective("rankings", tokenize_ordered_rankings, encode_ordered_rankings, collate_rankings)
OBJECTIVES: dict[RewardLoss, Objective] = {
    "bradley_terry": Objective("comparisons", tokenize_comparisons, encode_comparisons, collate_pairs),
    "ranking": RANKED,
    "plackett_luce": RANKED,
    "rao_kupper": Objective("rankings", tokenize_rankings, encode_rankings, collate_rankings),
    "steps": Objective("steps", tokenize_steps, None, collate_steps),
}


def run(config: RewardConfig) -> Path:
    """Train a reward model and return its directory, `output/model`.

    Each update minimizes, with loss=bradley_terry, the mean over pairs of
    -log sigmoid(score(chosen) - score(rejected) - margin); a decoder's score is read at the last token of prompt +
    response + end token. The other losses are in losses/ranking.py.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4; margin Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    with open_run(config, "reward", parents=[config.policy]) as run:
        if run.finished:
            return run.output / "model"
        start = Checkpoint(config.policy)
        tokenizer = load_tokenizer(start, config.chat_template)
        objective = OBJECTIVES[config.loss]
        preparation = objective.preparation_for(start)
        train, held_out = read_split(config, objective.kind, tokenizer, run, preparation=preparation)
        references = None if config.normalize is None else reference_texts(config.normalize, held_out or train)
        reward_model = load_reward_start(
            start, config.adapter, tokenizer, config.output, weights=config.weights, ensemble=config.ensemble
        )
        check_rows(reward_model.model, train + held_out, config.data.max_length)
        for line in notes(reward_model):
            run.note(line)
        engine, stream = prepare_training(reward_model.model.train(), config, train, run)
        note_memory(run, [Role("reward model", engine.backend.unwrapped, engine)])
        note_balance(run, reward_model.model)
        bootstrap = None
        if config.ensemble is not None and config.ensemble.bootstrap:
            bootstrap = partial(bootstrap_counts, seed=config.training.seed, members=config.ensemble.members)
        model = reward_model.model
        loss_fn = objective_loss_fn(
            engine.model,
            config.loss,
            center_coef=config.center_coef,
            theta=config.theta,
            bootstrap=bootstrap,
            is_encoder=isinstance(model, DocumentClassifier),
            sources=sources_of(config.data),
        )
        networks = list(model.members) if isinstance(model, AdapterEnsemble) else [model]  # those that read a batch
        sharing = prompt_sharing(networks, wanted=config.training.share_prompts, note=run.note)
        collate = objective.collate_sharing(sharing)

        def save() -> Path:
            theta = config.theta if config.loss == "rao_kupper" else None
            measured = measure_reference(engine, reward_model, config.training, config.loss, references, theta=theta)
            write = partial(write_reference, *measured)
            return save_reward_model(engine, reward_model, run.output, config.training.max_shard_size, write)

        fit(engine, stream, collate, loss_fn, training=config.training, run=run, held_out=held_out, save=save)
        if model.config.get("pad_token_id") is None:
            run.note(
                "config.json has no padding token, so transformers scores no batch by this model; `alignment export` "
                "gives an adapter's one; else add '<|pad|>' to the policy by its --add-special-token, and train again"
            )
        return run.output / "model"


def notes(reward_model: Policy) -> Iterator[str]:
    """Notes on a reward model before it is trained."""
    yield f"score head: new, with random weights; any head that {reward_model.source} has is not used"
    if isinstance(reward_model.model, DocumentClassifier):
        return
    pad = reward_model.model.config.get("pad_token_id")
    if reward_model.adapter is not None and pad in end_token_ids(reward_model.tokenizer):
        yield (
            f"{reward_model.base}: its config.json has an end token ({pad}) as pad_token_id, so transformers reads "
            "this adapter's scores before the end token, where they are others; `alignment export` writes a model that "
            "it reads right, or set pad_token_id to null on the loaded base's config"
        )


# The loss


def objective_loss_fn(
    model: Model,
    loss: RewardLoss,
    *,
    center_coef: float = 0.0,
    theta: float = 2.0,
    bootstrap: Callable[[Sequence[str]], Tensor] | None = None,
    is_encoder: bool = False,
    sources: Sources = ONE_SOURCE,
) -> LossFn:
    """Loss function of a reward model: the mean of its members' costs, summed over what a batch counts.

    A decoder's scores are read at the last token of each document, which saw the whole text, or at the end of each
    step.

    Args:
        model: called on a batch, also an ensemble of k members.
        loss: see `RewardConfig`.
        center_coef: weight of the penalty on scores away from 0.
        theta: of rao_kupper.
        bootstrap: row ids -> weight of each row for each member, [rows, k]; None: all count alike.
        is_encoder: True where the model gives one score per document, whatever is read.
        sources: reported separately in metrics.
    """

    def loss_fn(batch: RaggedBatch) -> LossSum:
        ragged: Ragged = with_segments(batch.ragged) if is_encoder else batch.ragged
        read_at = batch.ends if isinstance(batch, StepBatch) else batch.ragged.last
        # A decoder's last layer then computes these tokens alone; an encoder gives a score per document anyway.
        output = model(batch=ragged) if is_encoder else model(batch=ragged, tokens=read_at)
        scores = document_scores(output)  # [D, k]
        members = [cost_of(loss, one, batch, theta=theta, center_coef=center_coef) for one in scores.unbind(-1)]
        costs = torch.stack(members, -1)
        if bootstrap is not None:
            costs = costs * bootstrap(counted_rows(batch)).to(costs.device)
        sums, means, accuracy = score_metrics(scores.mean(-1).detach(), batch)
        if scores.shape[-1] > 1:
            deviation = scores.detach().std(-1, correction=0)
            means = means | {"spread": (deviation.sum(), deviation.new_full((), len(deviation)))}
        total = sources.loss_sum(costs.mean(-1), batch, sums, accuracy=accuracy)
        return replace(total, means=means | total.means)

    return loss_fn


def cost_of(loss: RewardLoss, scores: Tensor, batch: RaggedBatch, *, theta: float, center_coef: float) -> Tensor:
    """Cost of each pair, each prompt's group of K responses or each step of a batch, [B], centering included.

    Args:
        scores: what was read, [D]; of pairs the chosen ones, then the rejected.
    """
    if isinstance(batch, StepBatch):
        return step_loss(scores, batch.labels)
    if isinstance(batch, PairBatch):
        chosen, rejected = scores.chunk(2)
        cost = bradley_terry_loss(chosen, rejected, batch.margins)
        return cost + center_coef * center_penalty(chosen, rejected) if center_coef else cost
    assert isinstance(batch, RankedBatch)
    rows, mask = padded_groups(scores, batch)
    ranks, _ = padded_groups(batch.ranks, batch)
    if loss == "ranking":
        cost = ranking_loss(rows, ranks, mask=mask, margin=batch.margins)
    elif loss == "plackett_luce":
        cost = plackett_luce_loss(rows, ranks, mask=mask)
    else:
        cost = rao_kupper_loss(rows, ranks, mask=mask, theta=theta)
    return cost + center_coef * center_scores_penalty(rows, mask) if center_coef else cost


def score_metrics(scores: Tensor, batch: RaggedBatch) -> Measured:
    """Metrics of a batch by the mean scores of the members, [D], without gradient.

    Accuracy and ties of pairs, ordered pairs or steps, their margin, top-1 accuracy of groups, and the mean score.
    """
    if isinstance(batch, StepBatch):
        sums = step_metrics(scores, batch.labels) | {"score": scores.float().sum()}
        return Measured(sums, {}, torch.where(scores == 0, 0.5, ((scores > 0) == batch.labels).float()))
    if isinstance(batch, PairBatch):
        chosen, rejected = scores.chunk(2)
        lead = chosen - rejected
        sums = preference_metrics(lead) | {"score": (chosen + rejected).sum() / 2}
        return Measured(sums, {}, (lead > 0).float() + (lead == 0).float() / 2)
    assert isinstance(batch, RankedBatch)
    rows, mask = padded_groups(scores, batch)
    ranks, _ = padded_groups(batch.ranks, batch)
    score = (rows.float().sum(1) / mask.sum(1)).sum()
    return Measured({"score": score}, ordered_pair_metrics(rows, ranks, mask), prompt_accuracy(rows, ranks, mask))


def counted_rows(batch: RaggedBatch) -> list[str]:
    """The row id of each thing that the batch's weight counts."""
    row_ids = batch.row_ids
    if isinstance(batch, PairBatch):
        return list(row_ids[: len(row_ids) // 2])
    if isinstance(batch, RankedBatch):
        ends = torch.tensor(batch.sizes).cumsum(0).tolist()
        return [row_ids[end - 1] for end in ends]
    assert isinstance(batch, StepBatch)
    return [row_ids[row] for row in batch.rows.tolist()]


def bootstrap_counts(row_ids: Sequence[str], seed: int, members: int) -> Tensor:
    """Poisson(1) weights of each row for each member of an ensemble, fixed by (seed, member, row id); [rows, members].

    As many rows as there are, drawn with replacement, have such counts where rows are many. Nothing is drawn at run
    time, so batches, ranks and resumption change nothing.

    Source: Oza and Russell 2001, "Online bagging and boosting", section 2.
    """
    keys = [f"{seed}:{member}:{row}".encode() for row in row_ids for member in range(members)]
    uniform = [int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64 for key in keys]
    counts = np.searchsorted(POISSON, uniform, side="right")
    return torch.tensor(counts, dtype=torch.float32).view(len(row_ids), members)

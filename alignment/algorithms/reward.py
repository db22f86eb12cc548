"""Reward models, trained on pairs of responses, on K ranked ones, or on labeled steps; decoders and encoders."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from annotated_types import Gt

from alignment.adapters.specs import AdapterSpec
from alignment.algorithms.policies import Policy, Role, note_memory
from alignment.algorithms.reward_losses import OBJECTIVES, RewardLoss, bootstrap_counts, objective_loss_fn
from alignment.algorithms.reward_networks import (
    EnsembleConfig,
    NormalizeConfig,
    load_reward_start,
    measure_reference,
    networks_of,
    reference_texts,
    save_reward_model,
    write_reference,
)
from alignment.algorithms.runs import check_rows, open_run, prepare_training, read_split, sources_of
from alignment.data.config import DataConfig
from alignment.data.text.chat import stop_token_ids
from alignment.loading import load_tokenizer
from alignment.models.classifiers import SequenceClassifier
from alignment.models.model import Model
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.settings import NonNegativeFloat, Rule, Settings, refusal
from alignment.training import LossFn, OptimConfig, TrainingConfig, fit


@dataclass(frozen=True)
class RewardConfig(Settings):
    """Settings of one reward-model run.

    Attributes:
        policy: the checkpoint whose trunk the reward model starts from, usually the SFT policy; a decoder, or an encoder such
            as BERT, which reads prompt and response as a pair of texts.
        data: comparisons; rankings (pairs among them) for ranking, plackett_luce and rao_kupper; steps for steps.
        output: the run's directory.
        loss: bradley_terry: pairs. ranking: K responses, each prompt the mean of its pairs (InstructGPT). plackett_luce: the
            probability of the whole ranking. rao_kupper: pairs, ties among them. steps: a label at the end of each step, for
            a process reward model.
        theta: of rao_kupper, how easily two responses tie, above 1.
        adapter: train an adapter and the score head only; None trains every weight. Of an encoder it is saved merged.
        chat_template: as for SFT; saved with the model, whose scores depend on it.
        ensemble: train several members at once; None: one model.
        normalize: give scores mean 0 and deviation 1 on reference samples, after training; None: scores stay as they are.
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
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
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
        tokenizer = load_tokenizer(config.policy, config.chat_template)
        objective = OBJECTIVES[config.loss]
        preparation = objective.preparation_for(config.policy)
        train, held_out = read_split(config, objective.kind, tokenizer, run, preparation=preparation)
        references = None if config.normalize is None else reference_texts(config.normalize, held_out or train)
        reward_model = load_reward_start(
            config.policy, config.adapter, tokenizer, config.output, weights=config.weights, ensemble=config.ensemble
        )
        check_rows(reward_model.model, train + held_out, config.data.max_length)
        for line in notes(reward_model):
            run.note(line)
        engine, stream = prepare_training(reward_model.model.train(), config, train, run)
        note_memory(run, [Role("reward model", engine.backend.unwrapped, engine)])
        bootstrap = None
        if config.ensemble is not None and config.ensemble.bootstrap:
            bootstrap = partial(bootstrap_counts, seed=config.training.seed, members=config.ensemble.members)
        loss_fn = objective_loss_fn(
            engine.model, config.loss, center_coef=config.center_coef, theta=config.theta, bootstrap=bootstrap,
            is_encoder=isinstance(reward_model.model, SequenceClassifier), sources=sources_of(config.data),
        )  # fmt: skip

        sharing = prompt_sharing(networks_of(reward_model.model), wanted=config.training.share_prompts, note=run.note)
        collate = objective.collate_sharing(sharing)

        def save() -> Path:
            theta = config.theta if config.loss == "rao_kupper" else None
            measured = measure_reference(engine, reward_model, config.training, config.loss, references, theta=theta)
            size, extra_files = config.training.max_shard_size, partial(write_reference, *measured)
            return save_reward_model(engine, reward_model, run.output, max_shard_size=size, extra_files=extra_files)

        fit(engine, stream, collate, loss_fn, training=config.training, run=run, held_out=held_out, save=save)
        return run.output / "model"


def reward_loss_fn(model: Model, center_coef: float) -> LossFn:
    """Loss function of a reward model on pairs: Bradley-Terry, summed over them, plus `center_penalty`."""
    return objective_loss_fn(model, "bradley_terry", center_coef=center_coef)


def notes(reward_model: Policy) -> Iterator[str]:
    """Notes on a reward model before it is trained."""
    yield f"score head: new, with random weights; any head that {reward_model.source} has is not used"
    if isinstance(reward_model.model, SequenceClassifier):
        return
    pad = reward_model.model.config.get("pad_token_id")
    if reward_model.adapter is not None and pad in stop_token_ids(reward_model.tokenizer):
        yield (
            f"{reward_model.base}: its config.json has an end token ({pad}) as pad_token_id, so transformers reads this "
            "adapter's scores before the end token, where they are others; `alignment export` writes a model that it "
            "reads right, or set pad_token_id to null on the loaded base's config"
        )

"""Each stage's networks, what of them trains, and the rows of an update: all that a plan has to know of a stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from alignment.adapters.specs import AdapterSpec
from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.finetune.model import HEADS
from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.pretrain.objectives import task_of
from alignment.algorithms.pretrain.pretrain import PretrainConfig
from alignment.algorithms.reward import RewardConfig
from alignment.algorithms.reward_losses import OBJECTIVES
from alignment.algorithms.sft import SFTConfig
from alignment.data.rows.records import Kind
from alignment.errors import UserError
from alignment.models.families import is_external_type
from alignment.models.heads import score_labels
from alignment.planning.starts import Start, config_dtype, find_start, fresh_config, is_encoder

StageConfig = SFTConfig | RewardConfig | DPOConfig | OnlineDPOConfig | PPOConfig | PretrainConfig | FinetuneConfig

RANKED = 4  # responses of a ranking, typically
CHOICES = 4  # of a row of multiple choice
DOCUMENTS: dict[str | None, int] = {"comparisons": 2, "rankings": RANKED}  # of a row of this kind; of others one


@dataclass(frozen=True)
class Network:
    """A network of a stage.

    Attributes:
        start: the checkpoint that it starts from.
        task: its head: language, scalar, sequence, tokens, span or next_sentence.
        updates: forward and backward passes for each token of the run; 0: all its weights are frozen.
        forwards: further passes without gradients, for each token of the run.
        adapter: trained on the frozen start; None: all weights train.
        labels: keys of config.json that describe the outputs of its head.
        members: adapters of an ensemble over one base.
        trains_head: its head trains beside the adapter.
        trains_trunk: False: the head alone trains.
    """

    start: Start
    task: str = "language"
    updates: float = 0.0
    forwards: float = 0.0
    adapter: AdapterSpec | None = None
    labels: Mapping[str, object] = field(default_factory=dict)
    members: int = 1
    trains_head: bool = False
    trains_trunk: bool = True


@dataclass(frozen=True)
class Workload:
    """The networks and rows of a stage.

    Attributes:
        networks: by role.
        kind: of the rows that it reads; None: those of a fine-tuning task.
        documents: of a row that is learned from.
        responses: sampled for each prompt; 0: none.
        minibatches: of an update's rows.
        texts: the most tokens of a text, and number of texts, that an update of the policy has besides; None: none.
        asked: role whose log-probabilities an update computes beside those of the policy; '': none.
        objective: of pretraining.
        options: keywords with which the policy is called in an update.
        dropout: whether it acts in an update.
    """

    networks: dict[str, Network]
    kind: Kind | None
    documents: int = 1
    responses: int = 0
    minibatches: int = 1
    texts: tuple[int, int] | None = None
    asked: str = ""
    objective: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: bool = True


def workload_of(config: StageConfig, near: Path | None = None) -> Workload:
    """The networks and rows of a config's stage.

    Args:
        near: folder of the user's config, whose other configs may write a start that is not there yet.

    Raises:
        UserError: nothing is known about a checkpoint that the config names.
    """
    if isinstance(config, PretrainConfig):
        return _pretrain(config, near)
    if isinstance(config, FinetuneConfig):
        return _finetune(config, near)
    start = find_start(config.policy, near)
    if isinstance(config, SFTConfig):
        return Workload({"policy": Network(start, updates=1, adapter=config.adapter)}, "demonstrations")
    if isinstance(config, RewardConfig):
        kind = OBJECTIVES[config.loss].kind
        return Workload({"reward model": _reward_model(config, start)}, kind, DOCUMENTS.get(kind, 1))
    if isinstance(config, DPOConfig):
        other = 1 if any(loss.spec.needs in ("kl", "shift", "order") for loss in config.losses) else 0
        policy = Network(start, updates=1, forwards=other, adapter=config.adapter)
        networks = {"policy": policy}
        if config.holds_reference:
            networks = _with_reference(config, policy, 1 + other, near)
        documents = DOCUMENTS.get(config.rows, 1)
        return Workload(networks, config.rows, documents, asked=_asked(config, networks), dropout=False)
    judges = {f"reward model{f' {i}' if i else ''}": find_start(x, near) for i, x in enumerate(config.judging_models)}
    scoring = {role: Network(judge, "scalar", forwards=1) for role, judge in judges.items()}
    if isinstance(config, OnlineDPOConfig):
        updates = 2 / config.responses_per_prompt * config.epochs  # a pair of the responses, so often
        policy = Network(start, updates=updates, forwards=1, adapter=config.adapter)
        networks = {"policy": policy}
        if config.holds_reference:
            networks = _with_reference(config, policy, 1 + updates, near)
        networks |= scoring
        return Workload(
            networks, "prompts", 2, config.responses_per_prompt, config.minibatches, asked=_asked(config, networks),
            dropout=False,
        )  # fmt: skip
    policy = Network(start, updates=config.epochs, forwards=2, adapter=config.adapter)
    networks = _with_reference(config, policy, 1, near)
    if config.has_own_value_model:
        value = start if config.value_model == "policy" else judges["reward model"]
        networks["value model"] = Network(value, "scalar", config.epochs, 1, config.adapter)
    networks |= scoring
    texts = None
    if config.pretrain is not None and config.pretrain_coef > 0:
        texts = config.pretrain.max_length, config.pretrain_batch_size
    return Workload(
        networks, "prompts", 1, config.responses_per_prompt, config.minibatches, texts, dropout=False,
        options={"entropy": True} | ({"values": True} if config.shares_trunk else {}),
    )  # fmt: skip


def _with_reference(
    config: DPOConfig | OnlineDPOConfig | PPOConfig, policy: Network, forwards: float, near: Path | None
) -> dict[str, Network]:
    """Policy and reference, which is a network of its own or the policy with its adapter off."""
    if config.reference is None and config.adapter is not None:
        return {"policy": replace(policy, forwards=policy.forwards + forwards)}
    start = policy.start if config.reference is None else find_start(config.reference, near)
    return {"policy": policy, "reference": Network(start, forwards=forwards)}


def _asked(config: DPOConfig | OnlineDPOConfig, networks: Mapping[str, Network]) -> str:
    """The role that is the reference of an update: the policy itself where that is its disabled adapter."""
    return ("reference" if "reference" in networks else "policy") if config.holds_reference else ""


def _reward_model(config: RewardConfig, start: Start) -> Network:
    """The reward model of a run: one, an ensemble of heads, or one of adapters over the same base.

    Raises:
        UserError: what the run itself refuses, or an ensemble of adapters over a model of transformers' class.
    """
    encoder, ensemble = is_encoder(start.config), config.ensemble
    if encoder and config.loss == "steps":
        raise UserError(f"{config.policy}: an encoder learns no scores of steps (loss=steps); start from a decoder")
    network = Network(start, "scalar", updates=1, adapter=config.adapter, trains_head=encoder)
    if ensemble is None or ensemble.kind == "heads":
        return replace(network, labels=score_labels(1 if ensemble is None else ensemble.members))
    if encoder or is_external_type(start.config):
        raise UserError(
            f"{config.policy}: an ensemble of adapters is planned for decoders that run as our class; take "
            "ensemble.kind=heads"
        )
    return replace(network, members=ensemble.members)


def _pretrain(config: PretrainConfig, near: Path | None) -> Workload:
    task = task_of(config.objective)
    if config.policy is None:
        values = {"model": config.model, "vocabulary": config.vocabulary, "tokenizer_kind": config.tokenizer_kind}
        fresh = fresh_config({**values, "tokenizer": config.tokenizer})
        start = Start(fresh, torch.float32, "fresh", shapes_from="the config's `model`")
    else:
        start = find_start(config.policy, near)
    networks = {"policy": Network(start, task, updates=1, adapter=config.adapter)}
    if config.distillation is not None:
        networks["teacher"] = Network(find_start(config.distillation.teacher, near), task, forwards=1)
    return Workload(networks, "text", objective=config.objective.kind)


def _finetune(config: FinetuneConfig, near: Path | None) -> Workload:
    if config.policy is None:
        fresh = dict(config.model or {})
        start = Start(fresh, config_dtype(fresh), "fresh", shapes_from="the config's `model`")
    else:
        start = find_start(config.policy, near)
    choice = config.task == "multiple_choice"
    labels = {} if config.task == "question_answering" else {"num_labels": 1 if choice else 2}
    network = Network(
        start, HEADS[config.task], 1, adapter=config.adapter, labels=labels, trains_head=True,
        trains_trunk=not config.frozen_trunk,
    )  # fmt: skip
    return Workload({"policy": network}, None, CHOICES if choice else 1)

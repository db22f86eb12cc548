"""Each stage's networks, what of them trains, and the rows of an update: all that a plan has to know of a stage."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import try_to_load_from_cache

from alignment.adapters.attach import read_spec
from alignment.adapters.files import is_adapter, read_base
from alignment.adapters.specs import AdapterSpec, LoRASpec
from alignment.algorithms.distill import DistillConfig
from alignment.algorithms.dpo import DPOConfig
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.finetune.model import HEADS
from alignment.algorithms.online_dpo import OnlineDPOConfig
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.pretrain import PretrainConfig, task_of
from alignment.algorithms.reward import OBJECTIVES, RewardConfig
from alignment.algorithms.sft import SFTConfig
from alignment.config.load import build, config_that_writes, packaged_folder
from alignment.config.yaml_source import SourcedYaml, fill, read_yaml
from alignment.data.rows.records import Kind
from alignment.errors import UserError, suggest
from alignment.loading import load_tokenizer, missing_directory
from alignment.models.families import FAMILIES, family_of, is_external_type
from alignment.models.heads import score_labels
from alignment.models.safetensors_files import CONFIG, HFConfig, read_config

StageConfig = (
    SFTConfig | RewardConfig | DPOConfig | OnlineDPOConfig | PPOConfig | DistillConfig | PretrainConfig | FinetuneConfig
)

RANKED = 4  # responses of a ranking, typically
CHOICES = 4  # of a row of multiple choice
DOCUMENTS: dict[str | None, int] = {"comparisons": 2, "rankings": RANKED}  # of a row of this kind; of others one


@dataclass(frozen=True)
class Start:
    """A checkpoint as far as its memory goes.

    Attributes:
        config: config.json of the base model.
        dtype: type of the base's weights.
        base: identity of the base model; checkpoints with the same one can share its weights.
        adapters: settings of the adapters that the checkpoint has on the base, in order; empty for a whole model.
    """

    config: HFConfig
    dtype: torch.dtype
    base: str
    adapters: tuple[AdapterSpec, ...] = ()


@dataclass(frozen=True)
class Network:
    """A network of a stage.

    Attributes:
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
    """The networks of a stage by role, and its rows.

    Attributes:
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
    """Networks and rows of a config's stage; `near`: folder of configs that may write a start that is not there yet."""
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
    if isinstance(config, DistillConfig):
        policy = Network(start, updates=config.epochs, forwards=1, adapter=config.adapter)
        networks = {"policy": policy, "teacher": Network(find_start(config.teacher, near), forwards=config.epochs)}
        return Workload(networks, "prompts", 1, config.responses_per_prompt, config.minibatches, dropout=False)
    judges = {f"reward model{f' {i}' if i else ''}": find_start(x, near) for i, x in enumerate(config.judging_models)}
    scoring = {role: Network(judge, "scalar", forwards=1) for role, judge in judges.items()}
    if isinstance(config, OnlineDPOConfig):
        updates = 2 / config.responses_per_prompt * config.epochs  # a pair of the responses, so often
        policy = Network(start, updates=updates, forwards=1, adapter=config.adapter)
        networks = {"policy": policy}
        if config.holds_reference:
            networks = _with_reference(config, policy, 1 + updates, near)
        networks |= scoring
        asked = _asked(config, networks)
        responses = config.responses_per_prompt
        return Workload(networks, "prompts", 2, responses, config.minibatches, asked=asked, dropout=False)
    policy = Network(start, updates=config.epochs, forwards=2, adapter=config.adapter)
    networks = _with_reference(config, policy, 1, near)
    if config.has_value_model and not config.shares_trunk:
        value = start if config.value_model == "policy" else judges["reward model"]
        networks["value model"] = Network(value, "scalar", config.epochs, 1, config.adapter)
    networks |= scoring
    texts = None
    if config.pretrain is not None and config.pretrain_coef > 0:
        texts = config.pretrain.max_length, config.pretrain_batch_size
    return Workload(
        networks,
        "prompts",
        1,
        config.responses_per_prompt,
        config.minibatches,
        texts,
        dropout=False,
        options={"entropy": True} | ({"values": True} if config.shares_trunk else {}),
    )


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
    """The reward model of a run: one, an ensemble of heads, or one of adapters over the same base."""
    encoder = is_encoder(start.config)
    ensemble = config.ensemble
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
        names = ("model", "vocabulary", "tokenizer_kind", "tokenizer")
        start = Start(fresh_config({name: getattr(config, name) for name in names}), torch.float32, "fresh")
    else:
        start = find_start(config.policy, near)
    networks = {"policy": Network(start, task, updates=1, adapter=config.adapter)}
    if config.distillation is not None:
        networks["teacher"] = Network(find_start(config.distillation.teacher, near), task, forwards=1)
    return Workload(networks, "text", objective=config.objective.kind)


def _finetune(config: FinetuneConfig, near: Path | None) -> Workload:
    if config.policy is None:
        fresh = dict(config.model or {})
        start = Start(fresh, config_dtype(fresh), "fresh")
    else:
        start = find_start(config.policy, near)
    choice = config.task == "multiple_choice"
    outputs = 1 if choice or config.task == "regression" else 2
    labels = {} if config.task == "question_answering" else {"num_labels": outputs}
    network = Network(
        start,
        HEADS[config.task],
        1,
        adapter=config.adapter,
        labels=labels,
        trains_head=True,
        trains_trunk=not config.frozen_trunk,
    )
    return Workload({"policy": network}, None, CHOICES if choice else 1)


# Starts


def find_start(source: str, near: Path | None = None) -> Start:
    """The checkpoint behind a directory or a Hub name, by its config.json alone: nothing is downloaded.

    A directory that is not there yet is traced to the config that writes it, in the folder `near` or packaged, and a
    base of the Hub to configs/bases.
    """
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        if is_adapter(path):
            below = find_start(read_base(path), near)
            return replace(below, adapters=_on_top(below.adapters, read_spec(path)))
        config = read_config(path)
        return Start(config, config_dtype(config), str(path.resolve()))
    if path.name == "model" and (writer := config_that_writes(str(path.parent), near)) is not None:
        return _start_of_run(source, writer, near)
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise UserError(f"{source}: {missing_directory(path)}, and no config writes it")
    cached = try_to_load_from_cache(source, CONFIG)
    if isinstance(cached, str):
        config = read_config(Path(cached).parent)
    elif source in (bases := packaged_bases()):
        _, config = bases[source]
    else:
        raise UserError(
            f"{source}: its config.json is neither in the Hub's cache nor packaged ({suggest(source, bases)}); "
            f"download it (`hf download {source} config.json`), or give a directory that holds it"
        )
    return Start(config, config_dtype(config), source)


def config_dtype(config: HFConfig) -> torch.dtype:
    """The type that a config.json names; float32 where it names none."""
    floats = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return floats.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)


def is_encoder(config: HFConfig) -> bool:
    """True for one of our encoders or encoder-decoders, which have a score for a text and none per token."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.architecture != "decoder" and not is_external_type(config)


@cache
def packaged_bases() -> dict[str, tuple[str, HFConfig]]:
    """Hub name -> file name and config.json, for the bases whose facts are packaged."""
    bases = {}
    for path in sorted((packaged_folder("configs") / "bases").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        bases |= dict.fromkeys(content["hub_ids"], (path.name, content["config"]))
    return bases


@dataclass(frozen=True)
class _Section:
    adapter: AdapterSpec


def _start_of_run(source: str, file: Path, near: Path | None) -> Start:
    """The checkpoint that a config file's run will write: its own start, trained whole or with its adapter on top."""
    values: dict[str, Any] = fill(read_yaml(file).values, {"configs": str(packaged_folder("configs")), "data": ""})
    if values.get("policy") is None:
        return Start(fresh_config(values), torch.float32, source)
    below = find_start(values["policy"], near)
    if values.get("adapter") is None:
        return replace(below, base=source, adapters=(), dtype=torch.float32)  # all weights were trained
    section = SourcedYaml({"adapter": values["adapter"]}, {(): str(file)})
    return replace(below, adapters=_on_top(below.adapters, build(_Section, section).adapter))


def _on_top(adapters: tuple[AdapterSpec, ...], new: AdapterSpec) -> tuple[AdapterSpec, ...]:
    """Adapters of a checkpoint that trains a new one on these: two LoRAs are saved as one of the sum of their ranks."""
    if adapters and isinstance(adapters[-1], LoRASpec) and isinstance(new, LoRASpec):
        return (*adapters[:-1], replace(new, rank=adapters[-1].rank + new.rank))
    return (*adapters, new)


def fresh_config(values: Mapping[str, object]) -> HFConfig:
    """config.json of a model that is trained from nothing; its vocabulary is the tokenizer's, as far as that is known.

    A tokenizer that is named as a packaged base has the vocabulary of that base: it is not read.
    """
    model = dict(cast(HFConfig, values["model"]))
    if "vocab_size" not in model:
        sizes = {"bytes": 259, "characters": 512}  # bytes and special tokens; a guess for characters
        size = values.get("vocabulary") or sizes.get(str(values.get("tokenizer_kind")))
        _, base = packaged_bases().get(tokenizer := str(values.get("tokenizer")), ("", {}))
        model["vocab_size"] = size or base.get("vocab_size") or len(load_tokenizer(tokenizer))
    return {**family_of(model).new_model_config, **model}

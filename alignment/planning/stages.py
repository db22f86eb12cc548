"""Each stage's networks, and the phases of which one is the peak of its memory.

The loss functions are the stages' own; only rows are made up where the data is not there.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.adapters.attach import disabled
from alignment.algorithms.dpo import DPOConfig, dpo_loss_fn
from alignment.algorithms.dpo.reference_cache import CACHED_ROWS
from alignment.algorithms.finetune.finetune import FinetuneConfig
from alignment.algorithms.finetune.model import HEADS
from alignment.algorithms.finetune.scoring import finetune_loss_fn
from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.policies import LogProbModel, language_loss_fn
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.loss_functions import policy_loss_fn, value_loss_fn
from alignment.algorithms.ppo.rollout import RolloutBatch
from alignment.algorithms.pretrain.objectives import distillation_loss_fn, sentence_pair_loss_fn, task_of
from alignment.algorithms.pretrain.pretrain import PretrainConfig
from alignment.algorithms.reward import RewardConfig
from alignment.algorithms.reward_losses import OBJECTIVES, Measured, objective_loss_fn
from alignment.algorithms.reward_networks import networks_of
from alignment.algorithms.sft import SFTConfig
from alignment.data.batches import (
    PairBatch,
    PreferenceBatch,
    RankedBatch,
    collate,
    collate_labeled,
    collate_pairs,
    collate_rankings,
)
from alignment.data.examples import Example, LabeledExample, PairExample, RankedExample
from alignment.data.step_batches import StepBatch, collate_steps
from alignment.errors import UserError
from alignment.generation.sampling import SamplingConfig, sample_token_unasked, sampling_log_probs
from alignment.models.families import is_external_type
from alignment.models.heads import score_labels
from alignment.models.outputs import LanguageOutput
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.value_head import attach_value_head
from alignment.planning import batches
from alignment.planning.layout import Layout
from alignment.planning.networks import Networks, is_encoder, state_bytes
from alignment.planning.starts import Start, config_dtype, find_start, fresh_config
from alignment.planning.trace import Tracer
from alignment.ragged import DeviceBatch, Ragged, RaggedBatch, Seq2Seq, Sharing
from alignment.reward_model.ensemble import AdapterEnsemble
from alignment.training import LossFn

StageConfig = SFTConfig | RewardConfig | DPOConfig | OnlineDPOConfig | PPOConfig | PretrainConfig | FinetuneConfig


@dataclass(frozen=True)
class DeviceRows:
    """The rows that a device sees.

    Attributes:
        tokens: of a micro-batch.
        per_update: rows of one update on one device.
        longest: the longest rows of the data, where it could be read; empty otherwise.
    """

    tokens: int
    per_update: int
    longest: Sequence[Any] = ()


def build_networks(config: StageConfig, layout: Layout, near: Path | None) -> tuple[Networks, dict[str, Start]]:
    """The networks of a stage, and what each role starts from.

    Args:
        near: folder of the user's config, whose other configs may write a start that is not there yet.

    Raises:
        UserError: nothing is known about a checkpoint that the config names.
    """
    networks = Networks(config.weights, layout.shares_base)
    if isinstance(config, PretrainConfig):
        return networks, _pretrain_networks(networks, config, near)
    if isinstance(config, FinetuneConfig):
        return networks, _finetune_networks(networks, config, near)
    start = find_start(config.policy, near)
    if isinstance(config, SFTConfig):
        networks.add("policy", start, adapter=config.adapter)
        return networks, {"policy": start}
    if isinstance(config, RewardConfig):
        _reward_network(networks, config, start)
        return networks, {"reward model": start}
    networks.add("policy", start, adapter=config.adapter)
    starts = {"policy": start}
    held = config.holds_reference if isinstance(config, DPOConfig | OnlineDPOConfig) else True
    if held and (config.reference is not None or config.adapter is None):
        starts["reference"] = start if config.reference is None else find_start(config.reference, near)
        networks.add("reference", starts["reference"], trained=False)
    models = config.judging_models if isinstance(config, PPOConfig | OnlineDPOConfig) else []
    judges = {f"reward model{f' {i}' if i else ''}": name for i, name in enumerate(models)}
    starts |= {role: find_start(name, near) for role, name in judges.items()}
    if isinstance(config, PPOConfig) and config.has_own_value_model:
        starts["value model"] = start if config.value_model == "policy" else starts["reward model"]
        networks.add("value model", starts["value model"], "scalar", adapter=config.adapter)
    for role in judges:
        networks.add(role, starts[role], "scalar", trained=False)
    return networks, starts


def _reward_network(networks: Networks, config: RewardConfig, start: Start) -> None:
    """The reward model of a run: one, an ensemble of heads, or one of adapters over the same base.

    Raises:
        UserError: what the run itself refuses, or an ensemble of adapters over a model of transformers' class.
    """
    members = 1 if config.ensemble is None else config.ensemble.members
    encoder = is_encoder(start.config)
    if encoder and config.loss == "steps":
        raise UserError(f"{config.policy}: an encoder learns no scores of steps (loss=steps); start from a decoder")
    if config.ensemble is None or config.ensemble.kind == "heads":
        changes = score_labels(members)
        model = networks.add("reward model", start, "scalar", adapter=config.adapter, changes=changes)
        if encoder:
            model.head.requires_grad_(True)
        return
    if encoder or not networks.shared or is_external_type(start.config):
        raise UserError(
            f"{config.policy}: an ensemble of adapters is planned for decoders that run as our class, unsharded (the run "
            "itself refuses encoders and sharding); take ensemble.kind=heads, or another launch file"
        )
    models = [networks.add("reward model", start, "scalar", adapter=config.adapter) for _ in range(members)]
    networks.by_role["reward model"] = AdapterEnsemble(models)


def _pretrain_networks(networks: Networks, config: PretrainConfig, near: Path | None) -> dict[str, Start]:
    if config.policy is None:
        values = {"model": config.model, "vocabulary": config.vocabulary, "tokenizer_kind": config.tokenizer_kind}
        fresh = fresh_config({**values, "tokenizer": config.tokenizer})
        starts = {"policy": Start(fresh, torch.float32, "fresh", shapes_from="the config's `model`")}
    else:
        starts = {"policy": find_start(config.policy, near)}
    networks.add("policy", starts["policy"], task_of(config.objective), adapter=config.adapter)
    if config.distillation is not None:
        starts["teacher"] = find_start(config.distillation.teacher, near)
        networks.add("teacher", starts["teacher"], task_of(config.objective), trained=False)
    return starts


def _finetune_networks(networks: Networks, config: FinetuneConfig, near: Path | None) -> dict[str, Start]:
    if config.policy is None:
        fresh = dict(config.model or {})
        start = Start(fresh, config_dtype(fresh), "fresh", shapes_from="the config's `model`")
    else:
        start = find_start(config.policy, near)
    task = HEADS[config.task]
    changes = {} if task == "span" else {"num_labels": 1 if config.task == "multiple_choice" else 2}
    model = networks.add("policy", start, task, adapter=config.adapter, changes=changes)
    model.head.requires_grad_(True)
    if config.frozen_trunk:
        for name, module in model.named_children():
            module.requires_grad_(name == "head")
    return {"policy": start}


# Phases


def trace(config: StageConfig, tracer: Tracer, rows: DeviceRows) -> None:
    """Run the phases of a stage; the tracer keeps their peaks."""
    training = config.training
    if training.gradient_checkpointing:
        for role, model in tracer.networks.by_role.items():
            if any(parameter.requires_grad for parameter in model.parameters()) and role != "teacher":
                model.checkpoint_activations(True, training.keep_activations)
    if isinstance(config, SFTConfig):
        model = tracer.train("policy", state_bytes(tracer.networks.by_role["policy"], config.optim)).train()
        batch = collate(_examples(config.data.max_length, rows), rows.tokens)[0]
        tracer.update("update", "policy", [(language_loss_fn(model), batch)], repeated=_repeated(batch, rows))
    elif isinstance(config, RewardConfig):
        model = tracer.train("reward model", state_bytes(tracer.networks.by_role["reward model"], config.optim)).train()
        batch = _reward_batch(config, rows, _sharing(config, tracer))
        # Metrics take no memory worth counting, and some have sizes that depend on the numbers.
        objective = replace(OBJECTIVES[config.loss], measure=no_metrics)
        loss_fn = objective_loss_fn(
            model,
            objective,
            center_coef=config.center_coef,
            theta=lambda: config.theta,
            is_encoder=is_encoder(model.config),
        )
        tracer.update("update", "reward model", [(loss_fn, batch)], repeated=_repeated(batch, rows))
    elif isinstance(config, DPOConfig):
        model = tracer.train("policy", state_bytes(tracer.networks.by_role["policy"], config.optim)).eval()
        batch = _preference_batch(config, rows, _sharing(config, tracer))
        loss_fn = dpo_loss_fn(model, _reference(tracer) if config.holds_reference else None, config)
        terms: list[tuple[LossFn, DeviceBatch]] = [(loss_fn, batch)]
        if config.sft is not None:
            texts = replace(rows, longest=(), per_update=config.sft_batch_size)
            text = collate(_examples(config.sft.max_length, texts), rows.tokens)[0]
            terms.append((language_loss_fn(model), text))
        tracer.update("update", "policy", terms, repeated=_repeated(batch, rows))
    elif isinstance(config, OnlineDPOConfig):
        _trace_online_dpo(config, tracer, rows)
    elif isinstance(config, PPOConfig):
        _trace_ppo(config, tracer, rows)
    elif isinstance(config, PretrainConfig):
        _trace_pretrain(config, tracer, rows)
    else:
        model = tracer.train("policy", state_bytes(tracer.networks.by_role["policy"], config.optim)).train()
        count = batches.rows_of(rows.tokens, config.data.max_length, rows.per_update)
        batch = batches.task_batch(config.task, config.data.max_length, count)
        loss_fn = finetune_loss_fn(model, config.task, 0.0)
        tracer.update("update", "policy", [(loss_fn, batch)], repeated=_repeated(batch, rows))


def trace_caching(config: DPOConfig, tracer: Tracer, rows: DeviceRows) -> None:
    """The phase before the updates in which a reference's log-probabilities are computed, one response per document."""
    length = max((len(ids) for row in rows.longest for ids in row.documents), default=config.data.max_length)
    examples = [batches.example(length)] * batches.rows_of(rows.tokens, length, CACHED_ROWS)
    batch = collate(examples, rows.tokens)[0]
    reference = _reference(tracer)
    with tracer.running("reference log-probabilities", ["policy"]):
        reference(batch=batches.as_fake(batch, tracer.mode))


def _sharing(config: StageConfig, tracer: Tracer) -> Sharing:
    """Which pairs share their prompt, as in the run."""
    networks = [network for model in tracer.networks.by_role.values() for network in networks_of(model)]
    return prompt_sharing(networks, wanted=config.training.share_prompts, note=lambda line: None)


def _repeated(batch: DeviceBatch, rows: DeviceRows) -> bool:
    """Whether an update has more micro-batches than this one."""
    documents = len(batch.lengths)  # type: ignore[attr-defined]  # of steps too, whose weight counts the steps
    return (int(batch.weight) if isinstance(batch, PairBatch | RankedBatch) else documents) < rows.per_update


def _examples(length: int, rows: DeviceRows) -> list[Example]:
    if rows.longest:
        return list(rows.longest)
    return [batches.example(length)] * batches.rows_of(rows.tokens, length, rows.per_update)


def _pairs(length: int, rows: DeviceRows) -> list[PairExample]:
    if rows.longest:
        return list(rows.longest)
    pair = PairExample(batches.example(length), batches.example(length), None, "row")
    return [pair] * batches.rows_of(rows.tokens, 2 * length, rows.per_update)


def _reward_batch(
    config: RewardConfig, rows: DeviceRows, share_prompts: Sharing
) -> PairBatch | RankedBatch | StepBatch:
    """The largest micro-batch of the kind of rows that the config's loss learns from."""
    length, kind = config.data.max_length, OBJECTIVES[config.loss].kind
    if kind == "steps":
        count = batches.rows_of(rows.tokens, length, rows.per_update)
        return collate_steps(list(rows.longest) or [batches.steps(length)] * count, rows.tokens)[0]
    if kind == "rankings":
        return collate_rankings(_rankings(length, rows), rows.tokens, share_prompts=share_prompts)[0]
    return collate_pairs(_pairs(length, rows), rows.tokens, share_prompts=share_prompts)[0]


def no_metrics(scores: Tensor, batch: RaggedBatch) -> Measured:
    """The metrics of a batch that is only traced."""
    return Measured({}, {}, scores.new_zeros(int(batch.weight)))


def _rankings(length: int, rows: DeviceRows) -> list[RankedExample]:
    count = batches.rows_of(rows.tokens, batches.RANKED * length, rows.per_update)
    return list(rows.longest) or [batches.ranking(length)] * count


def _preference_batch(config: DPOConfig, rows: DeviceRows, share_prompts: Sharing) -> PreferenceBatch:
    """The largest micro-batch of the kind of rows that the config's losses learn from."""
    length = config.data.max_length
    batch: PreferenceBatch
    if config.rows == "labels":
        count = batches.rows_of(rows.tokens, length, rows.per_update)
        labeled = list(rows.longest) or [LabeledExample(batches.example(length), True, "row")] * count
        batch = collate_labeled(labeled, rows.tokens)[0]
    elif config.rows == "rankings":
        batch = collate_rankings(_rankings(length, rows), rows.tokens, share_prompts=share_prompts)[0]
    else:
        batch = collate_pairs(_pairs(length, rows), rows.tokens, share_prompts=share_prompts)[0]
    if config.refers and not config.holds_reference:
        return replace(batch, reference=torch.zeros(len(batch.lengths)))
    return batch


def _reference(tracer: Tracer) -> LogProbModel:
    """The stage's reference: a network of its own, or the policy with its adapter off."""
    own = "reference" in tracer.networks.by_role
    model = tracer.networks.by_role["reference" if own else "policy"]

    def reference(*, batch: Ragged | Seq2Seq, temperature: float = 1.0) -> LanguageOutput:
        with torch.no_grad(), nullcontext() if own else disabled(model), tracer.autocast():
            return model(batch=batch, temperature=temperature)

    return reference


def _trace_pretrain(config: PretrainConfig, tracer: Tracer, rows: DeviceRows) -> None:
    model = tracer.train("policy", state_bytes(tracer.networks.by_role["policy"], config.optim)).train()
    length, kind = config.data.max_length, config.objective.kind
    count = batches.rows_of(rows.tokens, length, rows.per_update)
    batch: DeviceBatch
    if kind == "causal":
        batch = collate(_examples(length, rows), rows.tokens)[0]
    elif kind == "masked":
        batch = batches.masked_text_batch(length, count)
    elif kind == "sentence_pairs":
        batch = batches.sentence_pair_batch(length, count)
    else:
        batch = batches.seq2seq_batch(length, count)
    loss_fn = language_loss_fn(model)
    if kind == "sentence_pairs":
        loss_fn = sentence_pair_loss_fn(model)
    elif config.distillation is not None:
        loss_fn = distillation_loss_fn(model, tracer.networks.by_role["teacher"], config.distillation)
    tracer.update("update", "policy", [(loss_fn, batch)], repeated=_repeated(batch, rows))


# PPO and online DPO


def _trace_online_dpo(config: OnlineDPOConfig, tracer: Tracer, rows: DeviceRows) -> None:
    networks = tracer.networks.by_role
    policy = tracer.train("policy", state_bytes(networks["policy"], config.optim)).eval()
    prompt = max((len(row.ids) for row in rows.longest), default=config.data.max_length)
    responses = rows.per_update * config.responses_per_prompt
    _trace_sampling(config, tracer, prompt, min(config.micro_rollout_batch_size, responses))
    length = prompt + config.max_new_tokens
    if len(networks) > 1 or config.refers:
        count = batches.rows_of(rows.tokens, length, responses)
        ragged = Ragged.build([[0] * length] * count, [[False] * prompt + [True] * config.max_new_tokens] * count)
        _trace_judging(config, tracer, ragged)
    minibatch = replace(rows, per_update=math.ceil(rows.per_update / config.minibatches), longest=())
    side = batches.example(length, prompt)
    pair = PairExample(side, side, 1.0, "row")
    pairs = [pair] * batches.rows_of(rows.tokens, 2 * length, minibatch.per_update)
    batch = collate_pairs(pairs, rows.tokens)[0]
    reference = _reference(tracer) if config.holds_reference else None
    loss_fn = dpo_loss_fn(policy, reference, config)
    tracer.update("update", "policy", [(loss_fn, batch)], repeated=_repeated(batch, minibatch))


def _trace_judging(config: OnlineDPOConfig, tracer: Tracer, ragged: Ragged) -> None:
    """Log-probabilities of the reference, and scores, without gradients."""
    batch = batches.as_fake(ragged, tracer.mode)
    with tracer.running("scoring", ["policy"]), torch.no_grad(), tracer.autocast():
        if config.holds_reference:
            _reference(tracer)(batch=batch, temperature=config.temperature)
        _score_by_all(tracer.networks, batch)


def _trace_ppo(config: PPOConfig, tracer: Tracer, rows: DeviceRows) -> None:
    networks = tracer.networks.by_role
    policy = tracer.train("policy", state_bytes(networks["policy"], config.optim)).eval()
    value = None
    if config.has_own_value_model:
        optim = config.value_optim or config.optim
        value = tracer.train("value model", state_bytes(networks["value model"], optim)).eval()
    if config.shares_trunk:
        with tracer.mode:
            attach_value_head(policy)
    prompt = max((len(row.ids) for row in rows.longest), default=config.data.max_length)
    rows = replace(rows, per_update=rows.per_update * config.responses_per_prompt)
    _trace_sampling(config, tracer, prompt, min(config.micro_rollout_batch_size, rows.per_update))
    length = prompt + config.max_new_tokens
    minibatch = math.ceil(rows.per_update / config.minibatches)
    count = batches.rows_of(rows.tokens, length, rows.per_update)
    ragged = Ragged.build([[0] * length] * count, [[False] * prompt + [True] * config.max_new_tokens] * count)
    _trace_scoring(config, tracer, ragged)
    ragged = _first_rows(ragged, length, min(count, minibatch), prompt)
    targets = torch.zeros(len(ragged.target_index))
    batch = RolloutBatch(ragged, targets, targets, targets, targets, reference_log_probs=targets)
    repeated = _repeated(batch, replace(rows, per_update=minibatch))
    terms: list[tuple[LossFn, DeviceBatch]] = [(policy_loss_fn(policy, config, [], kl_coef=config.kl_coef), batch)]
    if config.pretrain is not None and config.pretrain_coef > 0:
        text = replace(rows, longest=(), per_update=config.pretrain_batch_size)
        texts = collate(_examples(config.pretrain.max_length, text), rows.tokens)[0]
        terms.append((language_loss_fn(policy), texts))
    kept = [] if value is None else ["value model"]
    tracer.update("policy update", "policy", terms, repeated=repeated, kept=kept)
    if value is not None:
        tracer.update("value update", "value model", [(value_loss_fn(value, config), batch)], repeated=repeated)


def _first_rows(ragged: Ragged, length: int, count: int, prompt: int) -> Ragged:
    if count == len(ragged.lengths):
        return ragged
    return Ragged.build([[0] * length] * count, [[False] * prompt + [True] * (length - prompt)] * count)


def _trace_sampling(config: PPOConfig | OnlineDPOConfig, tracer: Tracer, prompt: int, count: int) -> None:
    """Prefill and the last step of decoding, when the cache is full."""
    policy = tracer.networks.by_role["policy"]
    batch = batches.as_fake(Ragged.build([[0] * prompt] * count), tracer.mode)
    sampling = config.sampling
    with tracer.running("sampling", ["policy"]), torch.no_grad(), tracer.autocast(sampling=True):
        cache = policy.new_cache(count, prompt + config.max_new_tokens)
        tracer.tracker.count(_cache_tensors(cache), "key-value cache")
        logits = policy.prefill(batch, cache)
        for _ in range(2):
            drawn = _sample(logits, sampling)
            logits = policy.decode(drawn, cache)
            if hasattr(cache, "longest"):
                cache.longest = prompt + config.max_new_tokens - 1
    tracer.choose_rollout_weights("policy", config.rollout_weights)


def _sample(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    log_probs = sampling_log_probs(logits, sampling)
    drawn = sample_token_unasked(log_probs, torch.zeros(len(logits), dtype=torch.float64))
    log_probs.gather(-1, drawn.unsqueeze(-1))
    return drawn


def _cache_tensors(cache: object) -> list[Tensor]:
    """The keys and values of a cache."""
    return [*getattr(cache, "keys", []), *getattr(cache, "values", [])]


def _trace_scoring(config: PPOConfig, tracer: Tracer, ragged: Ragged) -> None:
    """Log-probabilities, values and scores of sampled responses, without gradients."""
    networks = tracer.networks.by_role
    batch = batches.as_fake(ragged, tracer.mode)
    reference = _reference(tracer)
    trained = ["value model"] if config.has_own_value_model else []
    with tracer.running("scoring", trained, kept=["policy"]), torch.no_grad(), tracer.autocast():
        networks["policy"](batch=batch, temperature=config.temperature)
        reference(batch=batch, temperature=config.temperature)
        if trained:
            _ = networks["value model"](batch=batch).values
        _score_by_all(tracer.networks, batch)


def _score_by_all(networks: Networks, batch: Ragged) -> None:
    for judge in (network for role, network in networks.by_role.items() if role.startswith("reward model")):
        _ = _score(judge, batch)


def _score(reward_model: nn.Module, batch: Ragged) -> Tensor:
    output = reward_model(batch=batch)
    return output.values[batch.last] if hasattr(output, "values") else output.logits[:, 0]

"""Metrics of a rollout: what is logged before anything is learned from it."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.diagnostics import rollout_statistics
from alignment.algorithms.ppo.rollout import Rollout
from alignment.algorithms.ppo.setup import MetricFn, PPOState
from alignment.algorithms.ppo.utilization import utilization
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.generation import response_text
from alignment.losses.policy import kl_estimates
from alignment.rewards.combine import part_metrics
from alignment.training import Run
from alignment.training.distributed import ProcessGroup


class SampledResponses(Protocol):
    """Prompts and sampled responses as token ids, and whether each response ended by itself."""

    @property
    def prompts(self) -> list[list[int]]: ...

    @property
    def responses(self) -> list[list[int]]: ...

    @property
    def ended(self) -> Tensor: ...


def rollout_metrics(rollout: Rollout, state: PPOState, config: PPOConfig) -> dict[str, float]:
    """Everything logged of a rollout of all ranks, with the weight of its KL penalty."""
    group = state.process_group
    metrics = response_means(rollout, group.sum)
    metrics |= {"kl_coef": state.kl.coef, "sampling_error": sampling_error(rollout, group.max)}
    metrics |= importance_metrics(rollout, config.importance_cap, group)
    metrics |= rollout_statistics(rollout, group)
    metrics |= {f"seconds_{phase}": seconds for phase, seconds in rollout.phases.items()}
    metrics["distinct_share"] = distinct_share(rollout, group.gather_objects)
    metrics |= part_metrics(rollout.score_parts, group.sum)
    return text_metrics(rollout, state.metrics, state.start.tokenizer, group) | metrics  # names of its own stay


def response_means(rollout: Rollout, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Means over all ranks' responses of what was sampled; `kl` and `kl_k3`: see `kl_columns`."""
    per_response = {
        **kl_columns(rollout.log_probs, rollout.reference_log_probs, rollout.mask, rollout.token_kl),
        "response_tokens": rollout.mask.float().sum(1),
        "ended_share": rollout.ended.float(),
    }
    metrics = score_means(rollout.scores, reduce) | global_means(per_response, reduce)
    return metrics if rollout.values is None else metrics | {"explained_variance": explained_variance(rollout, reduce)}


def score_means(scores: Tensor, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Mean of the scores of all ranks' responses, [B] each, and the share of those without one (not a number)."""
    known = ~scores.isnan()
    sums = torch.stack([torch.where(known, scores, 0.0).float().sum(), known.float().sum(), (~known).float().sum()])
    total, number, missing = reduce(sums).tolist()
    return {"score": total / max(1.0, number), "unscored_share": missing / (number + missing)}


def kl_columns(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, token_kl: Tensor | None = None
) -> dict[str, Tensor]:
    """The KL from the reference, summed over each response, nats, [B]: its k1 (`kl`) and k3 estimates, or `kl` alone.

    Args:
        log_probs, reference_log_probs: per token, [B, R].
        mask: True at each response token, [B, R].
        token_kl: exact, of each token, [B, R]; given for samples of another distribution than the policy's, for which the
            estimates do not hold. `kl` is then its sum.
    """
    if token_kl is not None:
        return {"kl": token_kl.sum(1)}
    kl, zero = kl_estimates(log_probs, reference_log_probs), torch.zeros_like(log_probs)
    return {"kl": torch.where(mask, kl["k1"], zero).sum(1), "kl_k3": torch.where(mask, kl["k3"], zero).sum(1)}


def global_means(columns: dict[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Mean of each column, one number per response, over the responses of all ranks."""
    count = torch.ones_like(next(iter(columns.values())))
    sums = reduce(torch.stack([column.float().sum() for column in (count, *columns.values())])).tolist()
    return {name: total / sums[0] for name, total in zip(columns, sums[1:], strict=True)}


def distinct_share(rollout: SampledResponses, gather: Callable[[Any], list[Any]]) -> float:
    """Distinct responses / responses, of all ranks; `gather` gives the value of every rank."""
    responses = [tuple(response) for part in gather(rollout.responses) for response in part]
    return len(set(responses)) / len(responses)


def text_metrics(
    rollout: SampledResponses, functions: dict[str, MetricFn], tokenizer: Tokenizer, group: ProcessGroup
) -> dict[str, float]:
    """Mean of each function over all ranks' prompts and responses as texts."""
    if not functions:
        return {}
    prompts, responses = texts_of(rollout, tokenizer)
    metrics = {}
    for name, function in functions.items():
        values = function(prompts, responses)
        total, count = group.sum(torch.tensor([sum(values), len(values)], dtype=torch.float64)).tolist()
        metrics[name] = total / count
    return metrics


def texts_of(rollout: SampledResponses, tokenizer: Tokenizer, count: int | None = None) -> tuple[list[str], list[str]]:
    """Prompts and responses as texts; of the first `count` rows, or of all."""
    rows = range(len(rollout.prompts))[:count]
    prompts = [tokenizer.decode(rollout.prompts[row], skip_special_tokens=True) for row in rows]
    responses = [response_text(tokenizer, rollout.responses[row], bool(rollout.ended[row])) for row in rows]
    return prompts, responses


def log_samples(
    run: Run,
    step: int,
    tokenizer: Tokenizer,
    samples: SampledResponses,
    *,
    scores: Tensor,
    count: int = 2,
    columns: Mapping[str, Sequence[object]] = MappingProxyType({}),
) -> None:
    """Write an iteration's first `count` responses, which have `scores`, as texts to the run's samples; a score that is not a
    number is written as null.

    Args:
        columns: further values of each response, by the name under which they are written.
    """
    for row, (prompt, response) in enumerate(zip(*texts_of(samples, tokenizer, count), strict=True)):
        more = {name: values[row] for name, values in columns.items()}
        score = None if scores[row].isnan() else float(scores[row])
        run.sample(step, prompt=prompt, response=response, score=score, **more)


def sample_columns(rollout: Rollout, count: int = 2) -> Mapping[str, Sequence[object]]:
    """Entries of samples.jsonl for the first `count` responses beside their scores: the parts, KL (nats), tokens, end."""
    mask = rollout.mask[:count]
    token_kl = None if rollout.token_kl is None else rollout.token_kl[:count]
    columns = kl_columns(rollout.log_probs[:count], rollout.reference_log_probs[:count], mask, token_kl)
    known = {"kl": columns["kl"].tolist(), "tokens": mask.sum(1).tolist(), "ended": rollout.ended[:count].tolist()}
    return {**part_columns(rollout.score_parts, count), **known}


def part_columns(parts: Mapping[str, Tensor], count: int) -> dict[str, list[float | None]]:
    """What samples.jsonl says of the parts of the first `count` scores; None where a reward does not apply."""
    found = {f"score/{name}": part[:count].tolist() for name, part in parts.items()}
    return {name: [value if value == value else None for value in values] for name, values in found.items()}


def report(
    run: Run,
    state: PPOState,
    config: PPOConfig,
    metrics: dict[str, float],
    rollout: Rollout,
    *,
    step: int,
    seconds: float,
) -> None:
    """Write what an iteration gave: its metrics, some responses as texts, and the alarms that it raises.

    Args:
        step: iterations done.
        seconds: the iteration took.
    """
    group = state.process_group
    metrics = metrics | {"seconds_rollout": rollout.seconds, "seconds_update": seconds - rollout.seconds}
    responses = float(group.sum(torch.tensor(len(rollout.responses))))
    metrics["tokens_per_second"] = metrics["response_tokens"] * responses / seconds
    documents = [len(p) + len(r) for p, r in zip(rollout.prompts, rollout.responses, strict=True)]
    metrics |= utilization(metrics, config, state.roles, group, documents=documents)
    run.log(step, metrics)
    columns = sample_columns(rollout)
    log_samples(run, step, state.start.tokenizer, rollout, scores=rollout.scores, columns=columns)
    for line in state.alarms.add(step, metrics | {"responses": responses}):
        run.note(line)


def sampling_error(rollout: Rollout, largest: Callable[[Tensor], Tensor]) -> float:
    """Largest difference, nats, between a token's log-probability when it was drawn and the one training computes."""
    return float(largest((rollout.sampled_log_probs - rollout.log_probs).abs().max()))


def importance_metrics(rollout: Rollout, cap: float | None, group: ProcessGroup) -> dict[str, float]:
    """How far the sampler's distribution lies from the policy's, over the response tokens of all ranks.

    Args:
        cap: the largest importance weight.

    Returns:
        `sampling_kl`, mean of log q - log p over tokens drawn from q, nats: the k1 estimate of KL(sampler || policy); and
        where there are importance weights, their mean and largest and the share of tokens at the cap.
    """
    mask, weights = rollout.mask, rollout.weights
    difference = (rollout.sampled_log_probs - rollout.log_probs)[mask].double()
    columns = [torch.ones_like(difference), difference]
    if weights is not None and cap is not None:
        columns += [weights[mask].double(), (weights[mask] >= cap).double()]
    count, *sums = group.sum(torch.stack([column.sum() for column in columns])).tolist()
    names = ("sampling_kl", "importance_weight_mean", "importance_clipped_share")
    metrics = {name: total / count for name, total in zip(names, sums, strict=False)}
    return metrics if weights is None else metrics | {"importance_weight_max": float(group.max(weights.max()))}


def explained_variance(rollout: Rollout, reduce: Callable[[Tensor], Tensor]) -> float:
    """1 - var(returns - values) / var(returns) over the tokens of all ranks that are learned from; 1: perfect values, 0: as a constant."""
    if rollout.returns is None or rollout.values is None:
        raise ValueError("the rollout has no returns yet (see add_advantages), or there is no value model")
    mask = rollout.learned_mask
    returns = rollout.returns[mask].double()
    columns = torch.stack([returns, returns - rollout.values[mask].double()])  # [2, tokens]
    *sums, count = reduce(torch.cat([columns.sum(1), columns.new_tensor([len(returns)])])).tolist()
    means = columns.new_tensor(sums).unsqueeze(1) / count
    spread, left = reduce(((columns - means) ** 2).sum(1)).tolist()
    return 1 - left / spread if count > 1 and spread > 0 else 0.0

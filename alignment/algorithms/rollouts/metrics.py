"""Metrics of samples, and the report of an iteration: its metrics, some texts, and alarms."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms.rollouts.alarms import new_alarms
from alignment.algorithms.rollouts.config import METRICS
from alignment.algorithms.rollouts.rollout import Rollout
from alignment.algorithms.rollouts.state import MetricFn, SamplingState
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation import response_text
from alignment.losses.policy import kl_estimates
from alignment.ragged import on_float64_device
from alignment.rewards.combine import part_metrics
from alignment.rewards.functions import load_own
from alignment.training import Run
from alignment.training.distributed import ProcessGroup

NGRAM = 4  # tokens of the n-grams whose repetition is counted


def report(
    run: Run,
    state: SamplingState,
    metrics: dict[str, float],
    rollout: Rollout,
    *,
    step: int,
    seconds: float,
) -> None:
    """Write what an iteration gave: its metrics, some responses as texts, and the alarms that it raises."""
    group = state.process_group
    tokenizer = state.start.tokenizer
    metrics |= {"seconds_rollout": rollout.seconds, "seconds_update": seconds - rollout.seconds}
    responses = float(group.sum(torch.tensor(len(rollout.responses))))
    metrics["tokens_per_second"] = metrics["response_tokens"] * responses / seconds
    if taken := state.metrics.keys() & metrics.keys():
        raise UserError(f"metrics: {taken} are the run's own; rename the functions")
    run.log(step, metrics | text_metrics(rollout, state.metrics, tokenizer, group))
    texts = dict(zip(("prompt", "response"), texts_of(rollout, tokenizer, state.logged_samples), strict=True))
    table = {**texts, **sample_columns(rollout, state.logged_samples)}
    run.log_samples(step, [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)])
    if state.alarms is not None:
        for line in new_alarms(state.alarms, step, metrics | {"responses": responses}):
            run.note(line)


# Samples


def sample_metrics(rollout: Rollout, state: SamplingState) -> dict[str, float]:
    """Metrics of the responses of all ranks: score and its parts, KL from the reference, length, time."""
    group = state.process_group
    metrics = response_means(rollout, group.sum) | part_metrics(rollout.score_parts, group.sum)
    metrics |= {f"seconds_{phase}": seconds for phase, seconds in rollout.phases.items()}
    return metrics | {"distinct_share": distinct_share(rollout, group.gather_objects)}


def response_means(rollout: Rollout, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Means over all ranks' responses of what was sampled; `kl` and `kl_k3`: see `kl_columns`."""
    per_response = {
        **kl_columns(rollout.log_probs, rollout.reference_log_probs, rollout.mask, rollout.token_kl),
        "response_tokens": rollout.mask.float().sum(1),
        "ended_share": rollout.ended.float(),
    }
    known = ~rollout.scores.isnan()
    sums = [
        torch.where(known, rollout.scores, 0.0).float().sum(),
        known.float().sum(),
        *(column.float().sum() for column in per_response.values()),
        known.new_tensor(float(len(known)), dtype=torch.float32),
    ]
    total, scored, *others, count = reduce(torch.stack(sums)).tolist()
    metrics = {"score": total / max(1.0, scored), "unscored_share": (count - scored) / count}
    return metrics | {name: other / count for name, other in zip(per_response, others, strict=True)}


def kl_columns(
    log_probs: Tensor, reference_log_probs: Tensor | None, mask: Tensor, token_kl: Tensor | None = None
) -> dict[str, Tensor]:
    """The KL from the reference, summed over each response, nats, [B]: its k1 (`kl`) and k3 estimates.

    With `token_kl`, [B, R], given for samples of another distribution than the policy's, for which the estimates do not
    hold, `kl` is its sum; nothing without a reference.
    """
    if token_kl is not None:
        return {"kl": token_kl.sum(1)}
    if reference_log_probs is None:
        return {}
    kl = kl_estimates(log_probs, reference_log_probs)
    zero = torch.zeros_like(log_probs)
    return {"kl": torch.where(mask, kl["k1"], zero).sum(1), "kl_k3": torch.where(mask, kl["k3"], zero).sum(1)}


def distinct_share(rollout: Rollout, gather: Callable[[Any], list[Any]]) -> float:
    """Distinct responses / responses, of all ranks."""
    responses = [tuple(response) for part in gather(rollout.responses) for response in part]
    return len(set(responses)) / len(responses)


def moments(columns: dict[str, Tensor], group: ProcessGroup) -> dict[str, float]:
    """`NAME_mean` and `NAME_std` (divided by n) of columns of one length over all ranks, in float64."""
    if not columns:
        return {}
    count, means, squares = spreads(
        torch.stack([on_float64_device(column).double() for column in columns.values()]), group.sum
    )
    named = {f"{name}_mean": mean for name, mean in zip(columns, means, strict=True)}
    return named | {f"{name}_std": (square / count) ** 0.5 for name, square in zip(columns, squares, strict=True)}


def spreads(columns: Tensor, reduce: Callable[[Tensor], Tensor]) -> tuple[float, list[float], list[float]]:
    """Number, mean and sum of squared distances from it of each column's values over all ranks; columns: [C, n]."""
    *sums, count = reduce(torch.cat([columns.sum(1), columns.new_tensor([columns.shape[1]])])).tolist()
    means = [total / count for total in sums]
    return count, means, reduce((columns - columns.new_tensor(means).unsqueeze(1)).square().sum(1)).tolist()


def repeated_share(tokens: Sequence[int], size: int = NGRAM) -> float:
    """1 - distinct n-grams / n-grams of a response; 0 where it is shorter than one.

    Source: Welleck et al. 2020, arXiv:1908.04319, section 6 (seq-rep-n).
    """
    grams = list(zip(*(tokens[start:] for start in range(size)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# Texts


def load_metrics(names: Sequence[str]) -> dict[str, MetricFn]:
    """The functions that a config's `metrics` names, by the name of the function, under which it is logged."""
    functions: dict[str, MetricFn] = {}
    for name in names:
        function = METRICS.get(name, name).rpartition(":")[2]
        if function in functions:
            raise UserError(f"metrics: {name!r} would be logged as {function!r}, as another one is; rename it")
        functions[function] = load_own(METRICS.get(name, name), "metrics:")
    return functions


def text_metrics(
    rollout: Rollout, functions: dict[str, MetricFn], tokenizer: Tokenizer, group: ProcessGroup
) -> dict[str, float]:
    """Mean of each function over all ranks' prompts and responses as texts."""
    metrics = {}
    texts = texts_of(rollout, tokenizer) if functions else ([], [])
    for name, function in functions.items():
        values = function(*texts)
        total, count = group.sum(torch.tensor([sum(values), len(values)], dtype=torch.float64)).tolist()
        metrics[name] = total / count
    return metrics


def texts_of(rollout: Rollout, tokenizer: Tokenizer, count: int | None = None) -> tuple[list[str], list[str]]:
    """Prompts and responses as texts; of the first `count` rows, for people and with the marks of roles, or of all."""
    rows = range(len(rollout.prompts))[:count]
    skip = count is None or tokenizer.chat_template is None
    prompts = [tokenizer.decode(rollout.prompts[row], skip_special_tokens=skip) for row in rows]
    responses = [response_text(tokenizer, rollout.responses[row], bool(rollout.ended[row])) for row in rows]
    return prompts, responses


def sample_columns(rollout: Rollout, count: int = 2) -> Mapping[str, Sequence[object]]:
    """Entries of samples.jsonl for the first `count` responses: score and parts (None: missing), KL, tokens, end."""
    scores = {"score": rollout.scores} | {f"score/{name}": part for name, part in rollout.score_parts.items()}
    columns = {
        name: [None if math.isnan(value) else value for value in values[:count].tolist()]
        for name, values in scores.items()
    }
    kl_sums = kl_columns(rollout.log_probs, rollout.reference_log_probs, rollout.mask, rollout.token_kl)
    kl = {"kl": kl_sums["kl"][:count].tolist()} if kl_sums else {}
    return {**columns, **kl, "tokens": rollout.mask[:count].sum(1).tolist(), "ended": rollout.ended[:count].tolist()}

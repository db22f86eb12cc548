"""Everything that a method of rollouts logs: metrics of samples, signs of a run that collapses, utilization, alarms."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alignment.algorithms.policies import Role
from alignment.algorithms.ppo.config import METRICS, PPOConfig, SamplingSettings
from alignment.algorithms.ppo.rollout import Rollout
from alignment.algorithms.ppo.state import Alarms, MetricFn, PPOState, SamplingState
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation import response_text
from alignment.losses.policy import kl_estimates
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.ragged import on_float64_device
from alignment.rewards.combine import part_metrics
from alignment.rewards.functions import load_own
from alignment.training import Run
from alignment.training.distributed import ProcessGroup
from alignment.training.loop import DISTINCT_LEFT, ENDED, ENTROPY_LEFT, all_equal, least_kl, repeats
from alignment.training.speed import peak_tflops

NGRAM = 4  # tokens of the n-grams whose repetition is counted
BACKWARD = 2  # times the operations of a forward; what is recomputed for want of memory does not count
# Of alarms; their other bounds are those of `doctor --run`, see training/loop.py.
# iterations that are the start of a run, newest iterations that alarms read
BASELINE = 3
WINDOW = 5
# share that is too little from the start on, for responses of so many tokens
LEAST_DISTINCT = 0.25
LONG_RESPONSE = 4.0
WATCHED = {
    "entropy",
    "repetition",
    "distinct_share",
    "response_tokens",
    "ended_share",
    "kl",
    "kl_k3",
    "responses",
    "score",
}


def report(
    run: Run,
    state: SamplingState,
    config: SamplingSettings,
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
    if isinstance(config, PPOConfig):
        documents = [len(p) + len(r) for p, r in zip(rollout.prompts, rollout.responses, strict=True)]
        metrics |= utilization(metrics, config, state.roles, group, documents=documents)
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


def rollout_metrics(rollout: Rollout, state: PPOState, config: PPOConfig) -> dict[str, float]:
    """Metrics of PPO's rollout of all ranks, with the weight of its KL penalty."""
    group = state.process_group
    metrics = {"kl_coef": state.kl.coef, "sampling_error": sampling_error(rollout, group.max)}
    metrics |= importance_metrics(rollout, config.importance_cap, group) | rollout_statistics(rollout, group)
    return sample_metrics(rollout, state) | metrics


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
    metrics |= {name: other / count for name, other in zip(per_response, others, strict=True)}
    return metrics if rollout.values is None else metrics | {"explained_variance": explained_variance(rollout, reduce)}


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


def sampling_error(rollout: Rollout, largest: Callable[[Tensor], Tensor]) -> float:
    """Largest difference, nats, between a token's log-probability when it was drawn and the one training computes."""
    return float(largest((rollout.sampled_log_probs - rollout.log_probs).abs().max()))


def importance_metrics(rollout: Rollout, cap: float | None, group: ProcessGroup) -> dict[str, float]:
    """`sampling_kl`, mean of log q - log p over tokens drawn from q, nats: the k1 estimate of KL(sampler || policy).

    Where there are importance weights, also their mean and largest and the share of tokens at the cap.
    """
    mask = rollout.mask
    weights = rollout.weights
    difference = on_float64_device((rollout.sampled_log_probs - rollout.log_probs)[mask]).double()
    columns = [torch.ones_like(difference), difference]
    if weights is not None and cap is not None:
        token_weights = on_float64_device(weights[mask])
        columns += [token_weights.double(), (token_weights >= cap).double()]
    count, *sums = group.sum(torch.stack([column.sum() for column in columns])).tolist()
    names = ("sampling_kl", "importance_weight_mean", "importance_clipped_share")
    metrics = {name: total / count for name, total in zip(names, sums, strict=False)}
    return metrics if weights is None else metrics | {"importance_weight_max": float(group.max(weights.max()))}


def explained_variance(rollout: Rollout, reduce: Callable[[Tensor], Tensor]) -> float:
    """1 - var(returns - values) / var(returns) over the tokens of all ranks that are learned from; 0: as a constant."""
    assert rollout.returns is not None and rollout.values is not None
    both = (column[rollout.learned_mask] for column in (rollout.returns, rollout.values))
    returns, values = (on_float64_device(column).double() for column in both)
    count, _, (spread, left) = spreads(torch.stack([returns, returns - values]), reduce)
    return 1 - left / spread if count > 1 and spread > 0 else 0.0


def rollout_statistics(rollout: Rollout, group: ProcessGroup) -> dict[str, float]:
    """Statistics over the responses and response tokens of all ranks; a collective operation.

    `empty_share` counts responses that are an end token alone. Advantages are those before whitening where there is a
    value model, else those that are learned from.
    """
    mask = rollout.mask
    lengths = rollout.mask.sum(1)
    means = {}
    if rollout.token_kl is None and rollout.reference_log_probs is not None:  # the estimates hold for its own samples
        k2 = kl_estimates(rollout.log_probs, rollout.reference_log_probs)["k2"]
        means["kl_k2"] = torch.where(mask, k2, 0.0).sum(1)
    means["empty_share"] = (lengths == 1) & rollout.ended
    means["repetition"] = torch.tensor([repeated_share(tokens) for tokens in rollout.responses], device=mask.device)
    statistics = moments({"response_tokens": lengths, **means}, group) | moments(token_columns(rollout), group)
    statistics |= moments({"score": rollout.scores[~rollout.scores.isnan()]}, group)
    kept = (
        "advantage_mean",
        "return_mean",
        "value_mean",
        "score_std",
        "response_tokens_std",
        "advantage_std",
        "return_std",
    )
    shortest, longest = group.max(torch.stack([-lengths.min(), lengths.max()])).tolist()
    statistics |= {name: statistics[f"{name}_mean"] for name in means}
    extremes = {"response_tokens_min": -float(shortest), "response_tokens_max": float(longest)}
    return {name: statistics[name] for name in (*kept, *means) if name in statistics} | extremes


def token_columns(rollout: Rollout) -> dict[str, Tensor]:
    """Advantages before whitening, returns and values of the tokens that are learned from, as far as there are any."""
    given = {"return": rollout.returns, "value": rollout.values}
    columns = {name: column[rollout.learned_mask] for name, column in given.items() if column is not None}
    if len(columns) == 2:
        columns["advantage"] = columns["return"] - columns["value"]
    elif rollout.advantages is not None:
        columns["advantage"] = rollout.advantages[rollout.learned_mask]
    return columns


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


# Model FLOPs utilization (MFU): the share of the devices' peak rate that each phase of an iteration of PPO reaches


def utilization(
    metrics: Mapping[str, float],
    config: PPOConfig,
    roles: Sequence[Role],
    group: ProcessGroup,
    *,
    documents: Sequence[int],
) -> dict[str, float]:
    """`mfu` of an iteration and of its phases: operations / (seconds * peak rate of all devices).

    Counted are the matrix products and attention of sampling, of the forwards of policy, reference and value model, and
    of the updates, without pretraining mix and scoring. Nothing where operations or the peak rate are not known.
    """
    models = {role.name: role.model for role in roles if role.name in ("policy", "reference", "value model")}
    if "policy" not in models or (peak := peak_tflops(group.device, config.training.precision)) is None:
        return {}
    tokens = sum(documents)
    forward = {
        name: operations_per_token(models["policy"] if model is None else model, tokens // len(documents))
        for name, model in models.items()
    }
    if not all(forward.values()):
        return {}
    passes = metrics.get("updates", config.epochs * config.minibatches) / config.minibatches
    work = {
        "sampling": forward["policy"],
        "forward": sum(forward.values()),
        "policy": passes * (1 + BACKWARD) * forward["policy"],
        "value": passes * (1 + BACKWARD) * forward.get("value model", 0.0),
    }
    seconds = {name: metrics.get(f"seconds_{name}", 0.0) for name in work}
    available = {name: seconds[name] * peak * 1e12 / tokens for name in work if seconds[name] > 0 and work[name] > 0}
    if not available:
        return {}
    whole = sum(work[name] for name in available) / sum(available.values())
    return {"mfu": whole} | {f"mfu_{name}": work[name] / available[name] for name in available}


def operations_per_token(model: nn.Module | None, length: int) -> float:
    """Operations of a forward per token of documents of `length` tokens; 0 where they are not known."""
    spec = getattr(model, "spec", None)
    if not isinstance(spec, TransformerSpec) or not is_counted(spec):
        return 0.0
    if getattr(model, "task", None) == "scalar":
        spec = replace(spec, vocabulary=1)
    return forward_operations(spec, max(1, length))


# Alarms of a run that collapses: they are noted, and stop nothing


def new_alarms(alarms: Alarms, step: int, metrics: Mapping[str, float]) -> list[str]:
    """Take in the metrics of an iteration, and return the alarms that it gives, as lines to note.

    An alarm is given once, and again only after it has been quiet for an iteration.
    """
    line = {name: value for name, value in metrics.items() if name.split("/")[0] in WATCHED}
    alarms.start = [*alarms.start, line][:BASELINE]
    alarms.recent = [*alarms.recent, line][-WINDOW:]
    alarm_texts = dict(_alarms(alarms))
    new = [
        f"alarm in iteration {step} ({name}): {text}" for name, text in alarm_texts.items() if name not in alarms.raised
    ]
    alarms.raised = list(alarm_texts)
    return new


def _alarms(alarms: Alarms) -> Iterator[tuple[str, str]]:
    """Name and text of each alarm of the newest iterations; what was not logged is not a number, and gives none."""
    now = defaultdict(lambda: math.nan, alarms.recent[-1])
    start = {name: sum(values) / BASELINE for name, values in _columns(alarms.start, BASELINE).items()}
    start = defaultdict(lambda: math.nan, start)
    last = _columns(alarms.recent, WINDOW)
    if now["entropy"] < ENTROPY_LEFT * start["entropy"]:
        yield (
            "entropy",
            f"entropy fell to {now['entropy']:.3g} nats per token from {start['entropy']:.3g} at the start; raise "
            "kl_coef, or set entropy_coef",
        )
    if start["repetition"] >= 0 and repeats(now["repetition"], start["repetition"]):
        yield (
            "repetition",
            f"{now['repetition']:.0%} of the n-grams of a response repeat earlier ones, {start['repetition']:.0%} at "
            "the start; look at samples.jsonl",
        )
    distinct = now["distinct_share"]
    if distinct < DISTINCT_LEFT * start["distinct_share"]:
        yield (
            "distinct responses",
            f"{distinct:.0%} of the responses are distinct, {start['distinct_share']:.0%} at the start; raise kl_coef, "
            "or lower the learning rate",
        )
    elif distinct < LEAST_DISTINCT and now["response_tokens"] >= LONG_RESPONSE:
        yield (
            "distinct responses",
            f"{distinct:.0%} of the responses are distinct; temperature, top_k, top_p or min_p leave the sampler no "
            "choice",
        )
    before = start["ended_share"]
    ended = sum(last.get("ended_share", [WINDOW])) / WINDOW
    if before >= 0 and ended < ENDED:
        long = "max_new_tokens, or train the policy to end its responses"
        yield (
            "missing ends",
            f"{ended:.0%} of the last responses end by themselves, {before:.0%} at the start; raise "
            f"{'missing_end_penalty' if before >= ENDED else long}",
        )
    kl = last.get("kl", [0.0])
    mean = sum(kl) / WINDOW
    responses = WINDOW * alarms.recent[-1].get("responses", 1.0)
    if max(kl) < 0 and mean < least_kl(sum(last["kl_k3"]) / WINDOW if "kl_k3" in last else abs(mean), responses):
        yield (
            "KL negative",
            f"kl was below 0 in the last {WINDOW} iterations, {mean:.3g} nats on average: the responses do not come "
            "from the policy that is scored; see sampling_error and sampling_kl",
        )
    scores = {name: values for name, values in last.items() if name.startswith("score") and all_equal(values)}
    if flat := ", ".join(f"{name} = {values[-1]:.4g}" for name, values in scores.items()):
        yield "score flat", f"the same in the last {WINDOW} iterations: {flat}; nothing is learned from it"


def _columns(lines: Sequence[Mapping[str, float]], count: int) -> dict[str, list[float]]:
    """The values of each metric in `count` iterations; nothing before there are as many."""
    return (
        {name: [line[name] for line in lines] for name in lines[0] if all(name in line for line in lines)}
        if len(lines) == count
        else {}
    )

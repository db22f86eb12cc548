"""Everything that a method of rollouts logs: metrics of samples, what tells a run that collapses, utilization, alarms."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alignment.algorithms.memory_notes import Role
from alignment.algorithms.ppo.config import METRICS, PPOConfig, SamplingSettings
from alignment.algorithms.ppo.rollout import Rollout
from alignment.algorithms.ppo.state import Alarms, MetricFn, PPOState, SamplingState
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation import response_text
from alignment.losses.policy import kl_estimates
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.rewards.combine import part_metrics
from alignment.rewards.functions import import_own
from alignment.training import Run
from alignment.training.distributed import ProcessGroup
from alignment.training.loop import DISTINCT_LEFT, ENDED, ENTROPY_LEFT, all_equal, least_kl, repeats
from alignment.training.speed import peak_tflops

LOGGED_KEYS = {  # of every PPO run's log; a metric of the config may not have one of these names
    "advantage_mean", "advantage_std", "approx_kl", "best_held_out_score", "best_held_out_win_rate", "best_step",
    "clip_fraction", "distinct_share", "empty_share", "ended_share", "entropy", "explained_variance",
    "first_ratio_error", "grad_norm", "held_out_kl", "held_out_score", "held_out_unscored_share", "held_out_win_rate",
    "importance_clipped_share", "importance_weight_max", "importance_weight_mean", "kl", "kl_coef", "kl_k2", "kl_k3",
    "kl_loss", "learning_rate", "loss", "mfu", "mfu_forward", "mfu_policy", "mfu_sampling", "mfu_value", "policy_loss",
    "pretrain_loss", "repetition", "response_tokens", "response_tokens_max", "response_tokens_min",
    "response_tokens_std", "return_mean", "return_std", "sampling_error", "sampling_kl", "score", "score_std",
    "seconds_forward", "seconds_held_out", "seconds_policy", "seconds_rollout", "seconds_sampling", "seconds_scoring",
    "seconds_update", "seconds_value", "step", "tokens", "tokens_per_second", "unscored_share", "updates",
    "value_grad_norm", "value_loss", "value_mean",
}  # fmt: skip
NGRAM = 4  # tokens of the n-grams whose repetition is counted
BACKWARD = 2  # times the operations of a forward; what is recomputed for want of memory does not count
# Of alarms; their other bounds are those of `doctor --run`, see training/collapse.py.
BASELINE, WINDOW = 3, 5  # iterations that are the start of a run, newest iterations that alarms read
LEAST_DISTINCT, LONG_RESPONSE = 0.25, 4.0  # share that is too little from the start on, for responses of so many tokens
WATCHED = {
    "entropy", "repetition", "distinct_share", "response_tokens", "ended_share", "kl", "kl_k3", "responses", "score",
}  # fmt: skip


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
    """Write what an iteration gave: its metrics, some responses as texts, and the alarms that it raises.

    Args:
        step: iterations done.
        seconds: the iteration took.
    """
    metrics = metrics | {"seconds_rollout": rollout.seconds, "seconds_update": seconds - rollout.seconds}
    responses = float(state.process_group.sum(torch.tensor(len(rollout.responses))))
    metrics["tokens_per_second"] = metrics["response_tokens"] * responses / seconds
    if isinstance(config, PPOConfig):
        documents = [len(p) + len(r) for p, r in zip(rollout.prompts, rollout.responses, strict=True)]
        metrics |= utilization(metrics, config, state.roles, state.process_group, documents=documents)
    run.log(step, metrics)
    log_samples(run, step, state.start.tokenizer, rollout, count=state.logged_samples)
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
    """Metrics of the responses of all ranks: score and its parts, KL from the reference, length, functions of the config."""
    group = state.process_group
    metrics = response_means(rollout, group.sum) | part_metrics(rollout.score_parts, group.sum)
    metrics |= {f"seconds_{phase}": seconds for phase, seconds in rollout.phases.items()}
    metrics["distinct_share"] = distinct_share(rollout, group.gather_objects)
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
    log_probs: Tensor, reference_log_probs: Tensor | None, mask: Tensor, token_kl: Tensor | None = None
) -> dict[str, Tensor]:
    """The KL from the reference, summed over each response, nats, [B]: its k1 (`kl`) and k3 estimates, or `kl` alone.

    Args:
        log_probs: per token, [B, R].
        reference_log_probs: likewise; None where nobody asked the reference.
        mask: True at each response token, [B, R].
        token_kl: exact, of each token, [B, R]; given for samples of another distribution than the policy's, for which the
            estimates do not hold. `kl` is then its sum.
    """
    if token_kl is not None:
        return {"kl": token_kl.sum(1)}
    if reference_log_probs is None:
        return {}
    kl, zero = kl_estimates(log_probs, reference_log_probs), torch.zeros_like(log_probs)
    return {"kl": torch.where(mask, kl["k1"], zero).sum(1), "kl_k3": torch.where(mask, kl["k3"], zero).sum(1)}


def global_means(columns: dict[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Mean of each column, one number per response, over the responses of all ranks."""
    count = torch.ones_like(next(iter(columns.values())))
    sums = reduce(torch.stack([column.float().sum() for column in (count, *columns.values())])).tolist()
    return {name: total / sums[0] for name, total in zip(columns, sums[1:], strict=True)}


def distinct_share(rollout: Rollout, gather: Callable[[Any], list[Any]]) -> float:
    """Distinct responses / responses, of all ranks; `gather` gives the value of every rank."""
    responses = [tuple(response) for part in gather(rollout.responses) for response in part]
    return len(set(responses)) / len(responses)


def sampling_error(rollout: Rollout, largest: Callable[[Tensor], Tensor]) -> float:
    """Largest difference, nats, between a token's log-probability when it was drawn and the one training computes."""
    return float(largest((rollout.sampled_log_probs - rollout.log_probs).abs().max()))


def importance_metrics(rollout: Rollout, cap: float | None, group: ProcessGroup) -> dict[str, float]:
    """Distance of the sampler's distribution from the policy's, over the response tokens of all ranks.

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
    returns, values = (column[rollout.learned_mask].double() for column in (rollout.returns, rollout.values))
    count, _, (spread, left) = spreads(torch.stack([returns, returns - values]), reduce)
    return 1 - left / spread if count > 1 and spread > 0 else 0.0


def rollout_statistics(rollout: Rollout, group: ProcessGroup) -> dict[str, float]:
    """Statistics over the responses and response tokens of all ranks; a collective operation.

    Returns:
        `kl_k2`: the k2 estimate of the KL from the reference, summed over a response, nats; of the policy's own samples.
        `score_std`. `response_tokens_min`, `_max`, `_std`. `empty_share`: responses that are an end token alone.
        `repetition`: see `repeated_share`.
        `advantage_mean`, `advantage_std`: as estimated, before they are whitened, where there is a value model; else as
        learned from. `return_mean`, `return_std`, `value_mean`: of tokens.
    """
    mask, lengths, means = rollout.mask, rollout.mask.sum(1), {}
    if rollout.token_kl is None and rollout.reference_log_probs is not None:  # the estimates hold for its own samples
        k2 = kl_estimates(rollout.log_probs, rollout.reference_log_probs)["k2"]
        means["kl_k2"] = torch.where(mask, k2, 0.0).sum(1)
    means["empty_share"] = (lengths == 1) & rollout.ended
    repetition = [repeated_share(response) for response in rollout.responses]
    means["repetition"] = torch.tensor(repetition, device=mask.device)
    found = moments({"response_tokens": lengths, **means}, group) | moments(token_columns(rollout), group)
    found |= moments({"score": rollout.scores[~rollout.scores.isnan()]}, group)
    kept = [f"{name}_mean" for name in ("advantage", "return", "value")]
    kept += [f"{name}_std" for name in ("score", "response_tokens", "advantage", "return")]
    shortest, longest = group.max(torch.stack([-lengths.min(), lengths.max()])).tolist()
    return {name: found[name] for name in kept if name in found} | {
        **{name: found[f"{name}_mean"] for name in means},
        "response_tokens_min": -float(shortest),
        "response_tokens_max": float(longest),
    }


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
    count, means, squares = spreads(torch.stack([column.double() for column in columns.values()]), group.sum)
    named = {f"{name}_mean": mean for name, mean in zip(columns, means, strict=True)}
    return named | {f"{name}_std": (square / count) ** 0.5 for name, square in zip(columns, squares, strict=True)}


def spreads(columns: Tensor, reduce: Callable[[Tensor], Tensor]) -> tuple[float, list[float], list[float]]:
    """Number, mean and sum of squared distances from it of the values of each column over all ranks; columns: [C, n]."""
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


def load_metrics(names: Sequence[str], taken: Set[str] = frozenset(LOGGED_KEYS)) -> dict[str, MetricFn]:
    """The functions that a config's `metrics` names, by the name of the function, under which it is logged.

    Args:
        names: of the config.
        taken: the stage's own metrics.

    Raises:
        UserError: a name that is neither in METRICS nor module:function, a module or function that is missing, or a
            function named like another one or like a metric of the stage's own.
    """
    found: dict[str, MetricFn] = {}
    for name in names:
        module, _, function = METRICS.get(name, name).partition(":")
        try:
            metric = getattr(import_own(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"metrics: {name!r} was not found ({error}); known: {', '.join(METRICS)}") from error
        if function in found or function in taken:
            raise UserError(
                f"metrics: {name!r} would be logged as {function!r}, as another metric is; rename the function or leave it out"
            )
        found[function] = metric
    return found


def text_metrics(
    rollout: Rollout, functions: dict[str, MetricFn], tokenizer: Tokenizer, group: ProcessGroup
) -> dict[str, float]:
    """Mean of each function over all ranks' prompts and responses as texts."""
    metrics, texts = {}, texts_of(rollout, tokenizer) if functions else ([], [])
    for name, function in functions.items():
        values = function(*texts)
        total, count = group.sum(torch.tensor([sum(values), len(values)], dtype=torch.float64)).tolist()
        metrics[name] = total / count
    return metrics


def texts_of(rollout: Rollout, tokenizer: Tokenizer, count: int | None = None) -> tuple[list[str], list[str]]:
    """Prompts and responses as texts; of the first `count` rows, or of all."""
    rows = range(len(rollout.prompts))[:count]
    prompts = [tokenizer.decode(rollout.prompts[row], skip_special_tokens=True) for row in rows]
    responses = [response_text(tokenizer, rollout.responses[row], bool(rollout.ended[row])) for row in rows]
    return prompts, responses


def log_samples(run: Run, step: int, tokenizer: Tokenizer, rollout: Rollout, *, count: int = 2) -> None:
    """Write an iteration's first `count` responses to the run's samples; a score that is not a number becomes null."""
    columns = sample_columns(rollout, count)
    for row, (prompt, response) in enumerate(zip(*texts_of(rollout, tokenizer, count), strict=True)):
        more = {name: values[row] for name, values in columns.items()}
        score = None if rollout.scores[row].isnan() else float(rollout.scores[row])
        run.sample(step, prompt=prompt, response=response, score=score, **more)


def sample_columns(rollout: Rollout, count: int = 2) -> Mapping[str, Sequence[object]]:
    """Entries of samples.jsonl for the first `count` responses beside their scores: the parts, KL (nats), tokens, end.

    A part is None where its reward does not apply.
    """
    parts = {f"score/{name}": part[:count].tolist() for name, part in rollout.score_parts.items()}
    columns = {name: [value if value == value else None for value in values] for name, values in parts.items()}
    found = kl_columns(rollout.log_probs, rollout.reference_log_probs, rollout.mask, rollout.token_kl)
    kl = {"kl": found["kl"][:count].tolist()} if found else {}
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
    of the updates, without the pretraining mix; scoring is left out of operations and seconds.

    Args:
        metrics: of the iteration, with `seconds_NAME` of each phase, and `updates` where some were left out.
        roles: the networks.
        documents: tokens of prompt and response of each of this rank's rows; the other ranks' are much alike.

    Returns:
        `mfu`, `mfu_sampling`, `mfu_forward`, `mfu_policy` and `mfu_value`; nothing where the operations of a network or
        the device's peak rate are not known.
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
    work = {"sampling": forward["policy"], "forward": sum(forward.values())}
    work["policy"] = passes * (1 + BACKWARD) * forward["policy"]
    work["value"] = passes * (1 + BACKWARD) * forward.get("value model", 0.0)
    seconds = {name: metrics.get(f"seconds_{name}", 0.0) for name in work}
    available = {name: seconds[name] * peak * 1e12 / tokens for name in work if seconds[name] > 0 and work[name] > 0}
    if not available:
        return {}
    whole = sum(work[name] for name in available) / sum(available.values())
    return {"mfu": whole} | {f"mfu_{name}": work[name] / available[name] for name in available}


def operations_per_token(model: nn.Module | None, length: int) -> float:
    """Operations of a forward per token of documents of `length` tokens; 0 where they are not known.

    A network that gives one number per token has a head of one row.
    """
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

    Args:
        alarms: of the run so far; changed in place.
        metrics: as logged, and the number of `responses` of all ranks.
    """
    line = {name: value for name, value in metrics.items() if name.split("/")[0] in WATCHED}
    if len(alarms.start) < BASELINE:
        alarms.start.append(line)
    alarms.recent = [*alarms.recent, line][-WINDOW:]
    found = dict(_alarms(alarms))
    new = [f"alarm in iteration {step} ({name}): {text}" for name, text in found.items() if name not in alarms.raised]
    alarms.raised = list(found)
    return new


def _alarms(alarms: Alarms) -> Iterator[tuple[str, str]]:
    """Name and text of each alarm that the newest iterations give."""
    now, never = alarms.recent[-1], math.inf
    entropy, before = now.get("entropy", never), _before(alarms, "entropy", 0.0)
    if before > 0 and entropy < ENTROPY_LEFT * before:
        fell = f"entropy fell to {entropy:.3g} nats per token from {before:.3g} at the start"
        yield "entropy", f"{fell}; raise kl_coef, or set entropy_coef"
    repetition, before = now.get("repetition", 0.0), _before(alarms, "repetition", never)
    if repeats(repetition, before):
        rose = f"{repetition:.0%} of the n-grams of a response repeat earlier ones, {before:.0%} at the start"
        yield "repetition", f"{rose}; look at samples.jsonl"
    distinct, before = now.get("distinct_share", never), _before(alarms, "distinct_share", 0.0)
    said = f"{distinct:.0%} of the responses are distinct"
    if distinct < DISTINCT_LEFT * before:
        yield "distinct responses", f"{said}, {before:.0%} at the start; raise kl_coef, or lower the learning rate"
    elif distinct < LEAST_DISTINCT and now.get("response_tokens", 0.0) >= LONG_RESPONSE:
        yield "distinct responses", f"{said}; temperature, top_k, top_p or min_p leave the sampler no choice"
    ended, before = _window(alarms, "ended_share"), _before(alarms, "ended_share", never)
    if ended and before < never and (share := sum(ended) / WINDOW) < ENDED:
        advice = (
            "missing_end_penalty" if before >= ENDED else "max_new_tokens, or train the policy to end its responses"
        )
        said = f"{share:.0%} of the last responses end by themselves, {before:.0%} at the start"
        yield "missing ends", f"{said}; raise {advice}"
    kl, k3, responses = _window(alarms, "kl"), _window(alarms, "kl_k3"), now.get("responses") or 1.0
    mean = sum(kl) / WINDOW
    if kl and max(kl) < 0 and mean < least_kl(sum(k3) / WINDOW if k3 else abs(mean), responses * WINDOW):
        said = f"kl was below 0 in the last {WINDOW} iterations, {mean:.3g} nats on average"
        yield (
            "KL negative",
            (f"{said}: the responses do not come from the policy that is scored; see sampling_error and sampling_kl"),
        )
    scores = {name: _window(alarms, name) for name in now if name == "score" or name.startswith("score/")}
    if flat := [f"{name} = {values[-1]:.4g}" for name, values in scores.items() if values and all_equal(values)]:
        said = f"the same in the last {WINDOW} iterations: {', '.join(flat)}"
        yield "score flat", f"{said}; nothing is learned from it"


def _before(alarms: Alarms, name: str, otherwise: float) -> float:
    """The mean of a metric over the first iterations; `otherwise` before these are over, or where it was not logged."""
    values = [line[name] for line in alarms.start if name in line]
    return sum(values) / BASELINE if len(values) == BASELINE else otherwise


def _window(alarms: Alarms, name: str) -> list[float]:
    """The newest values of a metric; none before there are enough."""
    values = [line[name] for line in alarms.recent if name in line]
    return values if len(values) == WINDOW else []

"""Symptoms of a training run that went wrong, judged by its logs (`alignment doctor --run DIR`): one table.

Each threshold stands with its reason where it is used; those that PPO's alarms have too are in training/loop.py.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import yaml

from alignment.reports.run_log import ENOUGH, RunLog, Series
from alignment.training.loop import DISTINCT_LEFT, ENDED, ENTROPY_LEFT, all_equal, least_kl, repeats


class Times(NamedTuple):
    """The present value of a setting times a factor, at least `least`."""

    factor: float
    least: float = 0.0


@dataclass(frozen=True)
class Advice:
    """A setting to try: its key, its value, and why; of a run also the value that it had."""

    key: str
    value: object
    why: str
    now: object = None


class Symptom(NamedTuple):
    """A row of the table."""

    name: str
    # that are examined for it; "rows": all that learn from rows without preferences, such as sft
    stages: tuple[str, ...]
    # names of metrics -> True where the run is not well, called with the run and the `Series` of each metric. One sign
    # suffices; it is absent where the run lacks a metric.
    signs: Mapping[str, Callable[..., object]]
    cause: str  # what usually leads to it
    advice: tuple[Advice, ...]  # the likeliest first
    unless: tuple[str, ...] = ()  # symptoms that would explain this one
    enough: int = ENOUGH  # lines of each metric


@dataclass(frozen=True)
class Diagnosis:
    """A symptom that was found, its evidence and cause, the steps that show it, and settings to try."""

    symptom: str
    evidence: str
    cause: str
    steps: tuple[int, int]
    settings: tuple[Advice, ...] = ()


def diagnose(run: RunLog) -> list[Diagnosis]:
    """The symptoms of a run; a cause of others comes before them."""
    diagnoses = {diagnosis.symptom: diagnosis for diagnosis in _overflow(run)}
    for symptom in symptoms_of(run.stage):
        seen: dict[str, Series] = {}
        for metrics, wrong in symptom.signs.items():
            logged = {name: run.series[name] for name in metrics.split() if name in run.series}
            enough = all(len(series.values) >= symptom.enough for series in logged.values())
            if enough and len(logged) == len(metrics.split()) and wrong(run, *logged.values()):
                seen |= logged
        if seen and not set(symptom.unless) & diagnoses.keys():
            evidence = "; ".join(f"{name} {series.describe()}" for name, series in seen.items())
            steps = (
                min(series.changing_step for series in seen.values()),
                max(series.steps[-1] for series in seen.values()),
            )
            settings = settings_to_try(run, symptom.advice)
            diagnoses[symptom.name] = Diagnosis(symptom.name, evidence, symptom.cause, steps, settings)
    return list(diagnoses.values())


def symptoms_of(stage: str) -> list[Symptom]:
    """The rows of the table that a stage's runs are examined for."""
    known = stage if stage in {*SAMPLED, *PAIRS} else "rows"
    return [symptom for symptom in SYMPTOMS if known in symptom.stages]


def is_judged(symptom: Symptom, run: RunLog) -> bool:
    """True where a run has logged the metrics of one of its signs, often enough."""
    lines = {name: len(series.values) for name, series in run.series.items()}
    return any(all(lines.get(name, 0) >= symptom.enough for name in metrics.split()) for metrics in symptom.signs)


def _overflow(run: RunLog) -> Iterator[Diagnosis]:
    """Metrics that are no finite numbers, which no series holds."""
    steps = sorted(step for broken_steps in run.broken.values() for step in broken_steps)
    if steps:
        names = sorted(name for name, broken_steps in run.broken.items() if broken_steps[0] == steps[0])
        evidence = f"{', '.join(names)} from step {steps[0]} on; {len(steps)} values in all"
        yield Diagnosis(
            "not finite",
            evidence,
            "A loss or gradient overflowed. What is trained after it is worthless; go back to a checkpoint before it.",
            (steps[0], steps[-1]),
            settings_to_try(run, OVERFLOW_ADVICE),
        )


def settings_to_try(run: RunLog, advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """The settings whose key the run's config has and whose value differs from the run's."""
    settings = []
    for setting in advice:
        value = setting.value
        now = run.setting(setting.key)
        if isinstance(value, Times):
            new_value = max(float(f"{run.number(setting.key, 0) * value.factor:.3g}"), value.least)
            value = int(new_value) if isinstance(now, int) else new_value
        if run.has(setting.key) and now != value:
            settings.append(replace(setting, value=value, now=now))
    return tuple(settings)


# Signs


def exceeds_rounding(run: RunLog, errors: Series, *, fp32: float, bf16: float) -> bool:
    """Any line lies above the bound of the run's precision."""
    sixteen = run.setting("weights.dtype") in ("bfloat16", "float16") or run.setting("weights.quantize")
    return max(errors.values) > (bf16 if run.setting("training.precision") == "bf16" or sixteen else fp32)


def sampling_differs(run: RunLog, errors: Series) -> bool:
    """Responses come from another distribution than the policy's, though nothing in the configuration says so.

    Sampling error, nats: the cache sums in another order (1e-5 is usual); bfloat16 holds logits of 16 to 32 in steps of
    1/8, and this is the largest difference of all tokens.
    """
    filtered = run.number("top_p", 1) < 1 or run.number("top_k", 0) > 0 or run.number("min_p", 0) > 0
    configured = filtered or run.number("rollouts_behind", 0) > 0
    return not configured and exceeds_rounding(run, errors, fp32=1e-2, bf16=0.5)


def gradient_spikes(_: RunLog, norms: Series) -> bool:
    """Single updates have gradients far above the usual; the first updates of a new head are large.

    Three norms of 10 times the median, as fewer may be odd rows; or one of 100 times, which moves Adam's second moment
    for a thousand updates.
    """
    late = norms.later(0.1)
    usual = np.median(late)
    return bool(usual > 0 and ((late > 10 * usual).sum() >= 3 or late.max() >= 100 * usual))


def kl_negative(run: RunLog, kl: Series) -> bool:
    """The estimated KL stays further below 0 than its noise, though a KL is never negative."""
    k3 = run.series.get("kl_k3")
    low = float(kl.windows.min())
    responses = run.number("training.batch_size", 32) * run.number("responses_per_prompt", 1) * kl.width
    return low < least_kl(k3.last if k3 is not None else abs(low), responses)


def kl_grows(run: RunLog, kl: Series) -> bool:
    """The policy leaves the reference and is still leaving, or misses the target.

    10 nats per response is the best of 60,000 samples; gold rewards peak below it (Gao et al. 2023).
    """
    limit = max(10.0, 2 * run.number("kl_target", 0))
    before = kl.windows[max(0, len(kl.windows) - 1 - kl.width)]
    return kl.last > limit and (kl.last >= 1.1 * before or kl.last >= 5 * limit)


def equal_scores(run: RunLog, score: Series) -> bool:
    """All samples have the same score."""
    given = [float(row["score"]) for row in run.samples if isinstance(row.get("score"), (int, float))]
    return not score.increases() and len(given) >= ENOUGH and all_equal(given)


def over_optimized(_: RunLog, score: Series, held_out: Series) -> bool:
    """The score rises further while what it stands for falls."""
    best = held_out.windows.max()
    fall = max(3 * held_out.error, 0.1 * abs(best - held_out.first))
    return score.increases() and best > held_out.first and best - held_out.last > fall


def length_hacking(run: RunLog, score: Series, length: Series) -> bool:
    """The score rises with the length of the responses: they near the limit, or samples' scores follow their length."""
    if not score.increases() or not length.increases(3) or length.last < 1.25 * length.first:
        return False  # up to a quarter the words of a better answer account for
    rows = [row for row in run.samples if isinstance(row.get("score"), (int, float)) and "response" in row]
    rows = rows[len(rows) // 2 :]
    values = [len(row["response"]) for row in rows], [float(row["score"]) for row in rows]
    lengths, scores = (np.argsort(np.argsort(column)) for column in values)
    correlated = len(rows) >= 16 and np.corrcoef(lengths, scores)[0, 1] >= 0.4  # ranks: 16 % of the variance
    return bool(correlated) or 0 < 0.8 * run.number("max_new_tokens", 0) < length.last


def unmoved(_: RunLog, *rewards: Series) -> bool:
    """Chosen and rejected responses are as likely as at the start; implicit rewards of some losses do not begin at 0.

    Noise is that of batches whose rewards differ, so that their mean alone stays where it was. By 0.01, beta times nats
    of a response, the odds of a pair change by 1 %.
    """
    return all(max(abs(reward.last - reward.first), reward.noise) < 0.01 for reward in rewards)


# The table

SAMPLED = ("ppo", "online_dpo", "distill")
PAIRS = ("dpo", "reward")
ALL = (*SAMPLED, *PAIRS, "rows")
RATE = "optim.learning_rate"
THIRD = Advice(RATE, Times(1 / 3), "a third of the step")
HALF = Advice(RATE, Times(0.5), "half the step")
FIVE_TIMES = Advice(RATE, Times(5), "five times the step")
TEN_TIMES = Advice(RATE, Times(10), "ten times the step")
WARMUP = Advice("optim.warmup_steps", Times(2, 20), "small steps at first")
LENGTH = Advice("data.max_length", Times(2), "nothing that matters is cut")
PENALTY = Advice("kl_coef", Times(2, 0.02), "twice the penalty")
TARGET_KL = Advice("target_kl", 0.02, "ends the passes over a rollout once the policy has moved so far")
TEMPERATURE = Advice("temperature", 1.0, "samples that differ")
END_PENALTY = Advice("missing_end_penalty", Times(2, 1.0), "a response that reaches the limit loses")
OVERFLOW_ADVICE = (
    THIRD,
    Advice("optim.max_grad_norm", 1.0, "bounds the gradient of an update"),
    WARMUP,
    Advice("training.precision", "fp32", "a wider range, to find out whether the type is to blame"),
)
SYMPTOMS = (  # a cause of others comes before them
    Symptom(
        "gradient spikes", ALL, {"grad_norm": gradient_spikes},
        "Odd rows (very long, broken, mislabeled) or steps at the edge of what is stable.",
        (HALF, WARMUP, Advice("optim.max_grad_norm", Times(0.5), "cuts what is above the usual")),
    ),
    Symptom(
        "sampler mismatch", SAMPLED,
        # rounding of a ratio of 1: a float32 sum of some thousand terms,
        # or bfloat16's 8 bits of a log-probability near -10
        {"first_ratio_error": lambda run, errors: exceeds_rounding(run, errors, fp32=1e-4, bf16=0.05),
         "sampling_error": sampling_differs,
         "importance_weight_mean": lambda _, weights: abs(weights.last - 1) > 0.2},  # 1 where both agree
        "Training computes other log-probabilities than the sampler drew from, so ratios and KL are of another policy: "
        "weights that are stale or in fewer bits in the sampler, another temperature, filtered sampling, or dropout.",
        (Advice("rollouts_behind", 0, "samples of the present weights"),
         Advice("top_p", 1.0, "training computes the whole distribution"),
         Advice("top_k", 0, "training computes the whole distribution"),
         Advice("importance_cap", 2.0, "corrects what is left, by truncated importance sampling"),
         Advice("weights.dtype", "float32", "rounding is then below 1e-4; compare on a short run"),
         Advice("training.precision", "fp32", "rounding is then below 1e-4")),
        enough=1,
    ),
    Symptom(
        "KL negative", SAMPLED, {"kl": kl_negative},
        "The samples do not come from the policy whose log-probabilities are compared: a colder sampler, a minimum "
        "length, dropout in one of the two, or a reference at another temperature. The penalty then pays for leaving "
        "the reference.",
        (Advice("temperature", 1.0, "the temperature at which the reference was trained"),
         Advice("kl_estimator", "k3", "never negative, where the KL is part of the loss"),
         Advice("training.precision", "fp32", "if sampling_error is large as well")),
    ),
    Symptom(
        "updates too large", SAMPLED,
        {"clip_fraction": lambda _, share: share.windows.max() > 0.3,  # 0.05 to 0.2 is usual (Huang et al. 2024)
         "approx_kl": lambda _, moved: moved.windows.max() > 0.1},  # nats per token; 0.01 to 0.02 is usual as target_kl
        "The policy leaves the range in which the samples say something about it: the learning rate is too high, or "
        "the passes over one rollout are too many.",
        (THIRD, Advice("epochs", Times(0.5, 1), "fewer passes over each rollout"), TARGET_KL),
    ),
    Symptom(
        "critic lost", SAMPLED,
        # a constant: 0
        {"explained_variance value_loss": lambda _, explained, loss: np.median(explained.later(0.5)) < 0.05},
        "The values are no better than a constant, so the advantages carry the whole noise of the returns: the critic "
        "learns too slowly to follow the policy, or its steps overshoot where the variance is far below 0.",
        (Advice("value_optim.learning_rate", Times(3), "three times its step"),
         Advice("value_warmup_steps", Times(2, 10), "the critic learns first"),
         Advice("value_model", "reward_model", "its trunk has already learned what is scored"),
         Advice("advantages", "rloo", "needs no critic (with responses_per_prompt of 4 or more)")),
    ),
    Symptom(
        "score constant", SAMPLED, {"score": equal_scores}, "The reward tells nothing apart.", (TEMPERATURE,)
    ),
    Symptom(
        "score falls", SAMPLED, {"score": lambda _, score: score.decreases(3)},
        "What is learned is not the score: the penalty outweighs it, or the updates are too large to improve it.",
        (THIRD, Advice("kl_coef", Times(0.5), "half the penalty"),
         Advice("pretrain_coef", Times(0.5), "half the weight of the text")),
        unless=("score constant",),
    ),
    Symptom(
        "score flat at the reference", SAMPLED,
        {"score kl": lambda _, score, kl: not score.increases() and abs(kl.last) < 0.05},  # nats
        "The policy has hardly moved: the steps are too small, or the penalty holds it at the reference.",
        (Advice(RATE, Times(3), "three times the step"), Advice("kl_coef", Times(0.25), "a quarter of the penalty"),
         Advice("epochs", 4, "more passes over each rollout")),
        unless=("score constant", "score falls"),
    ),
    Symptom(
        "score flat", SAMPLED, {"score": lambda _, score: not score.increases()},
        "The policy moves, but not towards the score: the advantages are mostly noise.",
        (Advice("training.batch_size", Times(4), "a quarter of the noise's variance"),
         Advice("responses_per_prompt", 4, "compares responses to one prompt, which takes out how hard the prompt "
                                           "is"), HALF),
        unless=("score constant", "score falls", "score flat at the reference"),
    ),
    Symptom(
        "over-optimization", SAMPLED,
        {f"score {held_out}": over_optimized for held_out in ("held_out_win_rate", "held_out_score", "gold_score")},
        "The policy has found what the reward model gets wrong: its score no longer means what it did. End where the "
        "held-out measure was best.",
        (PENALTY, Advice("reward_combine", "min", "with an ensemble: what one member doubts does not pay")),
    ),
    Symptom(
        "length hacking", SAMPLED, {"score response_tokens": length_hacking},
        "The reward pays for length: reward models learn that from labelers who prefer long answers.",
        (END_PENALTY, PENALTY),
    ),
    Symptom(
        "missing ends", SAMPLED, {"ended_share": lambda _, ended: ended.last < ENDED},
        "The policy has unlearned to end its responses, the limit is too short, or the starting policy never learned "
        "its end token (see the chat template and the end tokens of its SFT run).",
        (END_PENALTY, Advice("max_new_tokens", Times(2), "room to end")),
    ),
    Symptom(
        "collapse", SAMPLED,
        {"entropy": lambda _, nats: nats.last < ENTROPY_LEFT * nats.first and nats.decreases(3),
         "distinct_share": lambda _, share: share.last < DISTINCT_LEFT * share.first and share.decreases(3),
         "repetition": lambda _, share: repeats(share.last, share.first)},
        "The policy has settled on few responses: nothing is left to compare, so nothing more is learned.",
        (PENALTY, Advice("entropy_coef", 0.01, "pays for entropy"), HALF, TEMPERATURE),
    ),
    Symptom(
        "KL runs away", SAMPLED, {"kl": kl_grows},
        "The penalty is too weak for this reward, or the steps are too large for it: beyond about 10 nats learned "
        "rewards stop agreeing with what they stand for.",
        (PENALTY, Advice("kl_target", 6.0, "steers the coefficient towards 6 nats per response"), HALF, TARGET_KL),
    ),
    Symptom(
        "policy did not move", ("dpo", "online_dpo"), {"chosen_reward rejected_reward": unmoved},
        "The result is the starting policy: the steps are too small, or too few.", (TEN_TIMES,),
    ),
    Symptom(
        "preferences not learned", PAIRS,
        {"accuracy":
            lambda run, each: each.last < 0.55
            and ((margin := run.series_of("margin")) is None or not margin.increases())},
        "The labels contradict each other or are swapped, the part in which two responses differ is cut off, or the "
        "steps are too small. `alignment data check` shows tokens and what is cut.",
        (FIVE_TIMES, LENGTH),
        unless=("policy did not move",),
    ),
    Symptom(
        "overfitting", (*PAIRS, "rows"),
        {"held_out_loss": lambda _, loss: loss.values[-1] > 1.05 * min(loss.values) > 0,
         "accuracy held_out_accuracy":
            lambda _, own, held_out: len(own.values) >= ENOUGH and own.last - held_out.values[-1] > 0.15},
        "The rows are learned by heart: too many passes, or too few rows for so large a step.",
        (Advice("training.keep_best", "held_out_loss", "the model of the best evaluation is the result"),
         Advice("training.epochs", 1, "each row once"), HALF),
        enough=3,
    ),
    Symptom(
        "loss rises", (*PAIRS, "rows"),
        {"loss": lambda _, loss: loss.last - loss.windows.min() >= max(4 * loss.error, 0.1 * abs(loss.windows.min()))},
        "The steps are too large for what has been reached, or the later rows are of another kind.",
        (THIRD, Advice("optim.schedule", "cosine", "smaller steps towards the end"), WARMUP),
    ),
    Symptom(
        "loss flat", ("rows",), {"loss": lambda _, loss: not loss.decreases()},
        "Nothing is learned that shows: the steps are too small, or the rows hold nothing that the model does not "
        "know.",
        (FIVE_TIMES,),
        unless=("loss rises",),
    ),
    Symptom(
        "chosen responses become unlikely", ("dpo",),
        {"chosen_reward margin":
            lambda _, chosen, margin: chosen.first - chosen.last > max(margin.last - margin.first, 1.0)},
        "Both responses of a pair become unlikely, one more than the other; the probability goes to texts that nobody "
        "judged.",
        (Advice("sft_coef", 0.2, "keeps the chosen responses likely"), Advice("beta", Times(2), "a stronger pull to "
                                                                                                "the reference"),
         HALF),
    ),
)  # fmt: skip


# The report


def updates(run: RunLog) -> int:
    """Logged updates or iterations."""
    return max((len(series.values) for series in run.series.values()), default=0)


def report_lines(name: str, run: RunLog, findings: Sequence[Diagnosis], width: int = 100) -> Iterator[str]:
    """The report on the run `name` as lines of text."""
    count = updates(run)
    yield f"{name}: {run.stage}, {count} updates logged"
    if count < ENOUGH:
        yield f"fewer than {ENOUGH} updates: no trend is judged yet, nor a level that needs as many"
    if not findings:
        names = (
            ", ".join(symptom.name for symptom in symptoms_of(run.stage) if is_judged(symptom, run)) or "none of them"
        )
        yield from textwrap.wrap(f"none of the usual failures found; examined for: {names}", width)
    for index, finding in enumerate(findings, 1):
        yield from ("", f"{index}. {finding.symptom} (steps {finding.steps[0]} to {finding.steps[1]})")
        changes = [f"{one.key}={_value(one.value)} (now {_value(one.now)}): {one.why}" for one in finding.settings]
        titles = ["evidence", "cause", "try", *[""] * len(changes)]
        for title, text in zip(titles, [finding.evidence, finding.cause, *changes], strict=False):
            yield from textwrap.wrap(
                text, width, initial_indent=f"   {title:10s}", subsequent_indent=" " * 13, break_on_hyphens=False
            )


def _value(value: object) -> str:
    """A setting's value as it is written in `key=value`."""
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def report_json(name: str, run: RunLog, findings: Sequence[Diagnosis]) -> dict[str, object]:
    """The report for machines."""
    return {
        "run": name,
        "stage": run.stage,
        "updates": updates(run),
        "findings": [asdict(finding) for finding in findings],
    }

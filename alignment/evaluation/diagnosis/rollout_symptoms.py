"""Symptoms of a stage that learns from its own samples (PPO and its kin, online DPO), each one function of the run's logs.

Every threshold is a constant with its reason, here or, where an alarm during the run has it too, in training/collapse.py.
A function gives None where the run is well or lacks the metric.
"""

from collections.abc import Sequence

import numpy as np

from alignment.evaluation.diagnosis.run_log import ENOUGH, Diagnosis, RunLog, Series, Setting
from alignment.training.collapse import DISTINCT_LEFT, ENDED, ENTROPY_LEFT, all_equal, least_kl, repeats

RATIO_ERROR = {
    "fp32": 1e-4,
    "bf16": 0.05,
}  # the first ratio is 1 but for rounding: a float32 sum of some thousand terms, or
# bfloat16's 8 bits of a log-probability near -10
SAMPLING_ERROR = {
    "fp32": 1e-2,
    "bf16": 0.5,
}  # nats: the cache sums in another order (1e-5 is usual); bfloat16 holds logits of
# 16 to 32 in steps of 1/8, and this is the largest difference of all tokens
WEIGHT_OFF = 0.2  # the mean importance weight is 1 where both distributions agree
CLIPPED_WEIGHTS = 0.1  # share of weights at the cap: above it the correction is biased as well as noisy
STILL = 0.05  # nats per response: a policy so close to the reference gives its responses
RUNAWAY_KL = (
    10.0  # nats per response: the KL of the best of 60,000 samples; gold rewards peak below it (Gao et al. 2023)
)
EXPLAINED = 0.05  # a constant explains 0; below this the advantages are the returns with noise added
LONGER = 1.25  # times the first length; below, the words of a better answer account for it
NEAR_LIMIT = 0.8  # of max_new_tokens
LENGTH_CORRELATION = 0.4  # rank correlation of score and length over the samples: 16 % of the variance
EMPTY = 0.1  # share of responses without a token before the end
CLIPPED = 0.3  # share of clipped tokens; 0.05 to 0.2 is usual (Huang et al. 2024)
LARGE_UPDATE = 0.1  # nats per token from the sampling policy to the updated one; 0.01 to 0.02 is usual as target_kl
SMALL_UPDATE = 1e-6  # nats per token: log-probabilities move by a thousandth
TAX = 0.05  # nats per token of the pretraining text: 5 % of its perplexity
DOMINANT = 0.95  # of the movement of all reward parts


def rounding_of(run: RunLog) -> str:
    """Key of the rounding bounds: bf16 where the run computes in 16 bits."""
    held = run.setting("weights.dtype") in ("bfloat16", "float16") or run.setting("weights.quantize")
    return "bf16" if run.setting("training.precision") == "bf16" or held else "fp32"


def sampler_mismatch(run: RunLog) -> Diagnosis | None:
    """The tokens were drawn from another distribution than the one that training computes."""
    kind, evidence, steps = rounding_of(run), [], []
    differs = run.number("top_p", 1) < 1 or run.number("top_k", 0) > 0 or run.number("min_p", 0) > 0
    differs = differs or run.number("rollouts_behind", 0) > 0
    bounds = {"first_ratio_error": RATIO_ERROR[kind]} | ({} if differs else {"sampling_error": SAMPLING_ERROR[kind]})
    for name, bound in bounds.items():
        bad = above(run.series.get(name), bound)
        if bad:
            evidence.append(f"{name} up to {max(bad.values):.3g} (at most {bound:g} in {kind})")
            steps += bad.steps
    weights, clipped = run.series.get("importance_weight_mean"), run.series.get("importance_clipped_share")
    if weights is not None and abs(weights.last - 1) > WEIGHT_OFF:
        evidence.append(f"importance_weight_mean {weights.last:.3g} at the end (1 without a mismatch)")
        steps += weights.span
    if clipped is not None and clipped.last > CLIPPED_WEIGHTS:
        evidence.append(f"importance_clipped_share {clipped.last:.3g} at the end")
        steps += clipped.span
    if not evidence:
        return None
    return Diagnosis(
        "sampler mismatch",
        "; ".join(evidence),
        "Training computes other log-probabilities than the sampler drew from, so ratios and KL are of another policy: "
        "weights that are stale or in fewer bits in the sampler, another temperature, filtered sampling, or dropout.",
        (min(steps), max(steps)),
        run.advise(
            ("rollouts_behind", 0, "samples of the present weights"),
            ("top_p", 1.0, "training computes the whole distribution"),
            ("top_k", 0, "training computes the whole distribution"),
            ("importance_cap", 2.0, "corrects what is left, by truncated importance sampling"),
            ("weights.dtype", "float32", "rounding is then below 1e-4; compare on a short run"),
            ("training.precision", "fp32", "likewise"),
        ),
    )


def kl_negative(run: RunLog) -> Diagnosis | None:
    """The estimated KL stays below what its noise allows, though a KL is never negative."""
    kl = run.trend("kl")
    if kl is None:
        return None
    k3, responses = run.series.get("kl_k3"), responses_per_step(run)
    low, steps = kl.lowest()
    bound = least_kl(k3.last if k3 is not None else abs(low), responses * kl.width)
    if low >= bound:
        return None
    return Diagnosis(
        "KL negative",
        f"kl is {low:.3g} nats on average over steps {steps[0]} to {steps[1]}; noise alone stays above {bound:.2g}",
        "The samples do not come from the policy whose log-probabilities are compared: a colder sampler, a minimum "
        "length, dropout in one of the two, or a reference at another temperature. The penalty then pays for leaving the "
        "reference.",
        steps,
        run.advise(
            ("temperature", 1.0, "the temperature at which the reference was trained"),
            ("kl_estimator", "k3", "never negative, where the KL is part of the loss"),
            ("training.precision", "fp32", "if sampling_error is large as well"),
        ),
    )


def kl_runaway(run: RunLog) -> Diagnosis | None:
    """The policy leaves the reference and is still leaving, or misses the target."""
    kl = run.trend("kl")
    if kl is None:
        return None
    target = run.setting("kl_target")
    limit = max(RUNAWAY_KL, 2 * float(target)) if isinstance(target, (int, float)) else RUNAWAY_KL
    means = kl.window_means()
    before = float(means[max(0, len(means) - 1 - kl.width)])
    if kl.last <= limit or (kl.last < 1.1 * before and kl.last < 5 * limit):
        return None
    return Diagnosis(
        "KL runs away",
        f"kl {kl.course()} nats per response and rising at the end; {before:.3g} a window earlier"
        + (f"; kl_target {target}" if target is not None else ""),
        "The penalty is too weak for this reward, or the steps are too large for it: beyond about 10 nats learned rewards "
        "stop agreeing with what they stand for.",
        (kl.steps[-kl.width], kl.steps[-1]),
        run.advise(
            ("kl_coef", max(run.scaled("kl_coef", 2), 0.02), "twice the penalty"),
            ("kl_target", 6.0, "steers the coefficient towards 6 nats per response"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 0.5), "half the step"),
            ("target_kl", 0.02, "ends the passes over a rollout once the policy has moved so far"),
        ),
    )


def score_flat(run: RunLog) -> Diagnosis | None:
    """The mean score does not rise by more than its noise, or falls."""
    score, kl = run.trend("score"), run.trend("kl")
    if score is None or score.rises():
        return None
    fell = score.falls(3)
    evidence = f"score {score.course()}, standard error of the change {score.error:.2g}"
    evidence += f"; kl {kl.last:.3g} nats at the end" if kl is not None else ""
    given = [float(row["score"]) for row in run.samples if isinstance(row.get("score"), (int, float))]
    rate = run.scaled("optim.learning_rate", 3)
    if len(given) >= ENOUGH and all_equal(given):
        cause = f"All {len(given)} sampled responses have the score {given[0]:.3g}: the reward tells nothing apart."
        settings = run.advise(("temperature", 1.0, "samples that differ"))
    elif fell:
        cause = (
            "What is learned is not the score: the penalty outweighs it, or the updates are too large to improve it."
        )
        settings = run.advise(
            ("optim.learning_rate", run.scaled("optim.learning_rate", 1 / 3), "a third of the step"),
            ("kl_coef", run.scaled("kl_coef", 0.5), "half the penalty"),
            ("pretrain_coef", run.scaled("pretrain_coef", 0.5), "half the weight of the text"),
        )
    elif kl is not None and abs(kl.last) < STILL:
        cause = "The policy has hardly moved: the steps are too small, or the penalty holds it at the reference."
        settings = run.advise(
            ("optim.learning_rate", rate, "three times the step"),
            ("kl_coef", run.scaled("kl_coef", 0.25), "a quarter of the penalty"),
            ("epochs", 4, "more passes over each rollout"),
        )
    else:
        cause = "The policy moves, but not towards the score: the advantages are mostly noise."
        settings = run.advise(
            (
                "training.batch_size",
                int(run.number("training.batch_size", 32) * 4),
                "a quarter of the noise's variance",
            ),
            ("responses_per_prompt", 4, "compares responses to one prompt, which takes out how hard the prompt is"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 0.5), "half the step"),
        )
    return Diagnosis("score falls" if fell else "score flat", evidence, cause, score.span, settings)


def update_too_small(run: RunLog) -> Diagnosis | None:
    """The policy hardly changes within an iteration, while the score does not rise."""
    moved, score = run.trend("approx_kl"), run.trend("score")
    if moved is None or updates_per_rollout(run) < 2 or score is None or score.rises():
        return None  # with one update per rollout the ratio is 1 by construction
    moved = at_high_rate(run, moved)
    if np.median(moved.values) >= SMALL_UPDATE:
        return None
    clipped = run.series.get("clip_fraction")
    return Diagnosis(
        "updates too small",
        f"approx_kl {np.median(moved.values):.2g} nats per token"
        + (f", clip_fraction {np.median(clipped.values):.2g}" if clipped is not None else "")
        + f" at learning rates near {run.number('optim.learning_rate', 0):g}; score {score.course()}",
        "The learning rate is too low for so many updates.",
        moved.span,
        run.advise(("optim.learning_rate", run.scaled("optim.learning_rate", 10), "ten times the step")),
    )


def update_too_large(run: RunLog) -> Diagnosis | None:
    """Many tokens are clipped, or the policy moves far within an iteration."""
    evidence, steps = [], []
    for name, bound in (("clip_fraction", CLIPPED), ("approx_kl", LARGE_UPDATE)):
        if (series := run.trend(name)) is not None and (high := series.highest())[0] > bound:
            evidence.append(f"{name} {high[0]:.3g} over steps {high[1][0]} to {high[1][1]} (above {bound})")
            steps += high[1]
    if not evidence:
        return None
    fewer = max(1, int(run.number("epochs", 1)) // 2)
    return Diagnosis(
        "updates too large",
        "; ".join(evidence),
        "The policy leaves the range in which the samples say something about it: the learning rate is too high, or the "
        "passes over one rollout are too many.",
        (min(steps), max(steps)),
        run.advise(
            ("optim.learning_rate", run.scaled("optim.learning_rate", 1 / 3), "a third of the step"),
            ("epochs", fewer, "fewer passes over each rollout"),
            ("target_kl", 0.02, "ends the passes over a rollout once the policy has moved so far"),
        ),
    )


def collapse(run: RunLog) -> Diagnosis | None:
    """The policy says ever the same: entropy or distinct responses gone, or repetition."""
    evidence, steps = [], []
    for name, share in (("entropy", ENTROPY_LEFT), ("distinct_share", DISTINCT_LEFT)):
        series = run.trend(name)
        if series is not None and series.last < share * series.first and series.falls(3):
            evidence.append(f"{name} {series.course()}")
            steps.append(first_below(series, share * series.first))
    repeated = run.trend("repetition")
    if repeated is not None and repeats(repeated.last, repeated.first):
        evidence.append(f"repetition {repeated.course()}")
        steps.append(repeated.steps[-repeated.width])
    if not evidence:
        return None
    return Diagnosis(
        "collapse",
        "; ".join(evidence),
        "The policy has settled on few responses: nothing is left to compare, so nothing more is learned.",
        (min(steps), max(series.steps[-1] for series in run.series.values())),
        run.advise(
            ("kl_coef", max(run.scaled("kl_coef", 2), 0.02), "twice the penalty on leaving the reference"),
            ("entropy_coef", 0.01, "pays for entropy"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 0.5), "half the step"),
            ("temperature", 1.0, "samples as varied as the policy"),
        ),
    )


def critic_lost(run: RunLog) -> Diagnosis | None:
    """The value model explains nothing of the returns in the later half, or its loss rises."""
    explained, loss = run.trend("explained_variance"), run.trend("value_loss")
    late = None if explained is None else explained.later(0.5)
    useless = late is not None and float(np.median(late.values)) < EXPLAINED
    low = None if loss is None else loss.lowest()
    rising = loss is not None and low is not None and loss.last > 2 * low[0] and loss.last - low[0] > 3 * loss.error
    if loss is None or low is None or not (useless or rising):
        return None
    evidence, steps = [f"value_loss {loss.course()}, lowest {low[0]:.3g}"], (low[1][1], loss.steps[-1])
    worst = 0.0
    if useless and late is not None:
        worst, steps = float(np.median(late.values)), late.span
        evidence.insert(0, f"explained_variance {worst:.2g} (median of steps {steps[0]} to {steps[1]})")
    key = "value_optim.learning_rate" if run.has("value_optim.learning_rate") else "optim.learning_rate"
    diverges = worst < -0.5 or rising
    factor, why = (1 / 3, "its steps overshoot") if diverges else (3, "it learns too slowly to follow the policy")
    return Diagnosis(
        "critic lost",
        "; ".join(evidence),
        "The values are no better than a constant, so the advantages carry the whole noise of the returns.",
        steps,
        run.advise(
            (key, run.scaled(key, factor), why),
            ("value_warmup_steps", max(10, int(run.number("value_warmup_steps", 0)) * 2), "the critic learns first"),
            ("value_model", "reward_model", "its trunk has already learned what is scored"),
            ("advantages", "rloo", "needs no critic (with responses_per_prompt of 4 or more)"),
        ),
    )


def length_hacking(run: RunLog) -> Diagnosis | None:
    """The score rises with the length of the responses."""
    score, length = run.trend("score"), run.trend("response_tokens")
    if (
        score is None
        or length is None
        or not score.rises()
        or not length.rises(3)
        or length.last < LONGER * length.first
    ):
        return None
    limit, found = run.number("max_new_tokens", 0), length_correlation(run)
    near = limit > 0 and length.last > NEAR_LIMIT * limit
    if not near and (found is None or found < LENGTH_CORRELATION):
        return None
    evidence = (
        f"response_tokens {length.course()}" + (f" of {limit:.0f}" if limit else "") + f"; score {score.course()}"
    )
    evidence += f"; rank correlation of score and length over the samples {found:.2f}" if found is not None else ""
    penalty = max(1.0, run.scaled("missing_end_penalty", 2))
    return Diagnosis(
        "length hacking",
        evidence,
        "The reward pays for length: reward models learn that from labelers who prefer long answers.",
        (first_above(length, LONGER * length.first), length.steps[-1]),
        run.advise(
            ("missing_end_penalty", penalty, "a response that reaches the limit loses"),
            ("kl_coef", max(run.scaled("kl_coef", 2), 0.02), "twice the penalty on leaving the reference"),
            ("rewards", rewards_and(run, {"length": {"max": int(length.first)}}), "each further token costs"),
        ),
    )


def missing_ends(run: RunLog) -> Diagnosis | None:
    """Many responses reach the limit without ending."""
    ended = run.trend("ended_share")
    if ended is None or ended.last >= ENDED:
        return None
    limit = int(run.number("max_new_tokens", 64))
    lost = ended.first >= ENDED
    cause = (
        "The policy has unlearned to end its responses."
        if lost
        else "The responses are cut off: the limit is too short, or the starting policy never learned its end token (see "
        "the chat template and the end tokens of its SFT run)."
    )
    penalty = max(1.0, run.scaled("missing_end_penalty", 2))
    longer, fined = (
        ("max_new_tokens", 2 * limit, "room to end"),
        ("missing_end_penalty", penalty, "not ending costs more"),
    )
    settings = run.advise(*((fined, longer) if lost else (longer, fined)))
    return Diagnosis(
        "missing ends", f"ended_share {ended.course()}", cause, (first_below(ended, ENDED), ended.steps[-1]), settings
    )


def empty_responses(run: RunLog) -> Diagnosis | None:
    """Many responses end at once."""
    empty = run.trend("empty_share")
    if empty is None or empty.last <= EMPTY:
        return None
    return Diagnosis(
        "empty responses",
        f"empty_share {empty.course()}",
        "Ending at once scores better than answering: the reward of an empty text is high, or every token costs KL.",
        (first_above(empty, EMPTY), empty.steps[-1]),
        run.advise(
            ("missing_end_penalty", run.scaled("missing_end_penalty", 0.5), "ending is worth less"),
            ("kl_coef", run.scaled("kl_coef", 0.5), "half the price of a token that differs"),
            ("rewards", rewards_and(run, {"format": r".*\S.*"}), "an empty response loses"),
        ),
    )


def alignment_tax(run: RunLog) -> Diagnosis | None:
    """The loss on the pretraining text rises."""
    loss = run.trend("pretrain_loss")
    if loss is None or loss.last - loss.first < TAX or not loss.rises(3):
        return None
    return Diagnosis(
        "alignment tax",
        f"pretrain_loss {loss.course()} nats per token",
        "The policy pays for its reward with what it knew of other text.",
        loss.span,
        run.advise(
            ("pretrain_coef", max(run.scaled("pretrain_coef", 2), 0.1), "twice the weight of the text's loss"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 0.5), "half the step"),
        ),
    )


def over_optimization(run: RunLog) -> Diagnosis | None:
    """The score rises further while what it stands for falls: a second reward model, a win rate or a gold score."""
    score = run.trend("score")
    for name in ("held_out_win_rate", "held_out_score", "gold_score"):
        held_out = run.trend(name)
        if score is None or held_out is None or not score.rises():
            continue
        best, steps = held_out.highest()
        if best - held_out.last > max(3 * held_out.error, 0.1 * abs(best - held_out.first)) and best > held_out.first:
            return Diagnosis(
                "over-optimization",
                f"{name} {best:.3g} over steps {steps[0]} to {steps[1]}, {held_out.last:.3g} at the end; score {score.course()}",
                "The policy has found what the reward model gets wrong: its score no longer means what it did.",
                (steps[1], held_out.steps[-1]),
                run.advise(
                    ("training.max_steps", steps[1], "ends where the held-out measure was best"),
                    ("kl_coef", max(run.scaled("kl_coef", 2), 0.02), "twice the penalty on leaving the reference"),
                    ("reward_combine", "min", "with an ensemble: what one member doubts does not pay"),
                ),
            )
    return None


def one_sided_reward(run: RunLog) -> Diagnosis | None:
    """Of several reward parts one decides, or one is given up for the others."""
    parts = {name.removeprefix("score/"): series for name, series in run.series.items() if name.startswith("score/")}
    weights = part_weights(run, list(parts))
    parts = {name: series for name, series in parts.items() if len(series) >= ENOUGH}
    if len(parts) < 2:
        return None
    moved = {name: abs(weights[name]) * float(np.std(series.values)) for name, series in parts.items()}
    largest = max(moved, key=lambda name: moved[name])
    total = sum(moved.values())
    given_up = [name for name, series in parts.items() if weights[name] > 0 and series.falls(3)]
    if total == 0 or (moved[largest] < DOMINANT * total and not given_up):
        return None
    evidence = f"score/{largest} makes {moved[largest] / total:.0%} of the movement of all parts"
    evidence += "".join(f"; score/{name} {parts[name].course()}" for name in given_up)
    return Diagnosis(
        "one-sided reward",
        evidence,
        "One part of the reward outweighs the others, which then have no say or are given up for it.",
        parts[largest].span,
        (
            Setting(
                f"rewards[{list(weights).index(largest)}].weight",
                weights[largest],
                weights[largest] / 2,
                f"half the say of {largest}",
            ),
        ),
    )


def no_pairs(run: RunLog) -> Diagnosis | None:
    """Online DPO: most prompts give no pair, because their responses score alike."""
    ties = run.trend("score_ties")
    if ties is None or ties.last <= 0.5:  # more than half of the samples teach nothing
        return None
    return Diagnosis(
        "few pairs",
        f"score_ties {ties.course()}",
        "The responses to a prompt score alike, so most of the samples teach nothing.",
        (first_above(ties, 0.5), ties.steps[-1]),
        run.advise(
            ("responses_per_prompt", int(run.number("responses_per_prompt", 2)) * 2, "more to choose from"),
            ("temperature", 1.0, "samples that differ"),
            ("tie_margin", run.scaled("tie_margin", 0.5), "smaller differences count"),
        ),
    )


# Columns


def above(series: Series | None, bound: float) -> Series | None:
    """The lines above a bound; None where there is none."""
    pairs = (
        [] if series is None else [pair for pair in zip(series.steps, series.values, strict=True) if pair[1] > bound]
    )
    return Series(*map(tuple, zip(*pairs, strict=True))) if pairs else None


def first_above(series: Series, bound: float) -> int:
    """The first step of the first window whose mean lies above a bound."""
    return series.steps_of(int((series.window_means() > bound).argmax()))[0]


def first_below(series: Series, bound: float) -> int:
    """The first step of the first window whose mean lies below a bound."""
    return series.steps_of(int((series.window_means() < bound).argmax()))[0]


def at_high_rate(run: RunLog, series: Series) -> Series:
    """The lines at which the learning rate is at least half its highest: a schedule's end says nothing about the rate."""
    rates = run.series.get("learning_rate")
    if rates is None:
        return series
    high = {step for step, rate in zip(rates.steps, rates.values, strict=True) if rate >= max(rates.values) / 2}
    pairs = [pair for pair in zip(series.steps, series.values, strict=True) if pair[0] in high]
    return Series(*map(tuple, zip(*pairs, strict=True))) if pairs else series


def responses_per_step(run: RunLog) -> float:
    """Responses of one iteration."""
    return run.number("training.batch_size", 32) * run.number("responses_per_prompt", 1)


def updates_per_rollout(run: RunLog) -> int:
    """Updates on the samples of one iteration."""
    return int(run.number("epochs", 1) * run.number("minibatches", 1))


def part_weights(run: RunLog, names: Sequence[str]) -> dict[str, float]:
    """Weight of each reward part; they are logged in the order of the config's entries, which may have no name."""
    entries = run.setting("rewards")
    if not isinstance(entries, list) or len(entries) != len(names):
        return dict.fromkeys(names, 1.0)
    weights = [entry.get("weight") if isinstance(entry, dict) else None for entry in entries]
    return {name: 1.0 if weight is None else float(weight) for name, weight in zip(names, weights, strict=True)}


def rewards_and(run: RunLog, entry: dict[str, object]) -> list[object]:
    """The run's rewards and another one; `reward_model` alone is the short form of one entry."""
    return [*(run.setting("rewards") or [{"reward_model": run.setting("reward_model")}]), entry]


def length_correlation(run: RunLog) -> float | None:
    """Rank correlation of score and length over the samples of the later half; None of fewer than 16."""
    rows = [
        row
        for row in run.samples
        if isinstance(row.get("score"), (int, float)) and isinstance(row.get("response"), str)
    ]
    rows = rows[len(rows) // 2 :]
    if len(rows) < 16:
        return None
    lengths, scores = [len(row["response"]) for row in rows], [float(row["score"]) for row in rows]
    return float(np.corrcoef(np.argsort(np.argsort(lengths)), np.argsort(np.argsort(scores)))[0, 1])

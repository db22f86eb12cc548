"""Symptoms of every stage, and of the ones that learn from labeled rows (SFT, reward models, DPO), one function each.

Every threshold is a module constant with its reason. A function gives None where the run is well or lacks the metric.
"""

from collections.abc import Callable

import numpy as np

from alignment.evaluation.diagnosis.run_log import Diagnosis, RunLog

SPIKE = 10.0  # times the median of grad_norm: far outside what batches of rows differ by
SPIKES = 3  # fewer may be odd rows
HUGE_SPIKE = 100.0  # times the median: one alone moves Adam's second moment for a thousand updates
RISEN = 1.1  # times the lowest loss: a tenth more is no noise of a schedule's end
OVERFITTED = 1.05  # times the best held-out loss
CHANCE = 0.55  # accuracy of pairs; 0.5 is a coin
GAP = 0.15  # training less held-out accuracy
UNMOVED = 0.01  # of implicit rewards, beta times nats of a response: the odds of a pair change by 1 %
TIED = 0.5  # share of pairs that a reward model scores alike


def overflow(run: RunLog) -> Diagnosis | None:
    """A metric is no finite number."""
    if not run.broken:
        return None
    first = min(steps[0] for steps in run.broken.values())
    names = sorted(name for name, steps in run.broken.items() if steps[0] == first)
    return Diagnosis(
        "not finite",
        f"{', '.join(names)} from step {first} on; {sum(map(len, run.broken.values()))} values in all",
        "A loss or gradient overflowed. What is trained after it is worthless; go back to a checkpoint before it.",
        (first, max(steps[-1] for steps in run.broken.values())),
        run.advise(
            ("optim.learning_rate", run.scaled("optim.learning_rate", 1 / 3), "a third of the step"),
            ("optim.max_grad_norm", 1.0, "bounds the gradient of an update"),
            ("optim.warmup_steps", max(20, int(run.number("optim.warmup_steps", 0)) * 2), "small steps at first"),
            ("training.precision", "fp32", "a wider range, to find out whether the type is to blame"),
        ),
    )


def gradient_spikes(run: RunLog) -> Diagnosis | None:
    """Single updates have gradients far above the usual."""
    norms = run.trend("grad_norm")
    if norms is None:
        return None
    norms = norms.later(0.1)  # the first updates of a new head are large
    usual = float(np.median(norms.values))
    spikes = [(step, norm) for step, norm in zip(norms.steps, norms.values, strict=True) if norm > SPIKE * usual > 0]
    if not spikes or (len(spikes) < SPIKES and max(norm for _, norm in spikes) < HUGE_SPIKE * usual):
        return None
    bound = run.number("optim.max_grad_norm", 1.0)
    step, norm = max(spikes, key=lambda spike: spike[1])
    return Diagnosis(
        "gradient spikes",
        f"{len(spikes)} updates with grad_norm above {SPIKE:g} times the median of {usual:.3g}; {norm:.3g} at step {step}",
        "Odd rows (very long, broken, mislabeled) or steps at the edge of what is stable.",
        (spikes[0][0], spikes[-1][0]),
        run.advise(
            ("optim.max_grad_norm", float(f"{min(bound or 1.0, 2 * usual):.2g}"), "cuts what is above the usual"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 0.5), "half the step"),
            ("optim.warmup_steps", max(20, int(run.number("optim.warmup_steps", 0)) * 2), "small steps at first"),
        ),
    )


def loss_flat(run: RunLog) -> Diagnosis | None:
    """The training loss does not fall by more than its noise."""
    loss = run.trend("loss")
    if loss is None or loss.falls() or loss_rises(run) is not None:
        return None
    return Diagnosis(
        "loss flat",
        f"loss {loss.course()}, standard error of the change {loss.error:.2g}",
        "Nothing is learned that shows: the steps are too small, or the rows hold nothing that the model does not know.",
        loss.span,
        run.advise(("optim.learning_rate", run.scaled("optim.learning_rate", 5), "five times the step")),
    )


def loss_rises(run: RunLog) -> Diagnosis | None:
    """The training loss rises again after its lowest."""
    loss = run.trend("loss")
    if loss is None:
        return None
    low, steps = loss.lowest()
    if loss.last - low < max(4 * loss.error, (RISEN - 1) * abs(low)):
        return None
    return Diagnosis(
        "loss rises",
        f"loss {low:.3g} over steps {steps[0]} to {steps[1]}, {loss.last:.3g} at the end",
        "The steps are too large for what has been reached, or the later rows are of another kind.",
        (steps[1], loss.steps[-1]),
        run.advise(
            ("optim.learning_rate", run.scaled("optim.learning_rate", 1 / 3), "a third of the step"),
            ("optim.schedule", "cosine", "smaller steps towards the end"),
            ("optim.warmup_steps", max(20, int(run.number("optim.warmup_steps", 0)) * 2), "small steps at first"),
        ),
    )


def overfitting(run: RunLog) -> Diagnosis | None:
    """The held-out loss is well above its best, or pairs of the training rows are known by heart."""
    held_out, training = run.series.get("held_out_loss"), run.trend("accuracy")
    evidence, steps = [], []
    if held_out is not None and len(held_out) >= 3:
        best = int(np.argmin(held_out.values))
        if held_out.values[-1] > OVERFITTED * held_out.values[best] > 0:
            evidence.append(
                f"held_out_loss {held_out.values[best]:.3g} at step {held_out.steps[best]}, {held_out.values[-1]:.3g} at "
                f"step {held_out.steps[-1]}"
            )
            steps += [held_out.steps[best], held_out.steps[-1]]
    accuracy = run.series.get("held_out_accuracy")
    if training is not None and accuracy is not None and training.last - accuracy.values[-1] > GAP:
        evidence.append(f"accuracy {training.last:.3g} in training, {accuracy.values[-1]:.3g} held out")
        steps += training.span
    if not evidence:
        return None
    return Diagnosis(
        "overfitting",
        "; ".join(evidence),
        "The rows are learned by heart: too many passes, or too few rows for so large a step.",
        (min(steps), max(steps)),
        run.advise(
            ("training.keep_best", "held_out_loss", "the model of the best evaluation is the result"),
            ("training.epochs", 1, "each row once"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 0.5), "half the step"),
        ),
    )


def preferences_not_learned(run: RunLog) -> Diagnosis | None:
    """Pairs are ranked no better than by a coin."""
    accuracy, margin = run.trend("accuracy"), run.trend("margin")
    if accuracy is None or accuracy.last >= CHANCE or (margin is not None and margin.rises()):
        return None
    if policy_did_not_move(run) is not None:  # which is the cause
        return None
    return Diagnosis(
        "preferences not learned",
        f"accuracy {accuracy.course()} (0.5 is a coin)",
        "The labels contradict each other or are swapped, the part in which two responses differ is cut off, or the steps "
        "are too small. `alignment data check` shows tokens and what is cut.",
        accuracy.span,
        run.advise(
            ("optim.learning_rate", run.scaled("optim.learning_rate", 5), "five times the step"),
            ("data.max_length", int(run.number("data.max_length", 512)) * 2, "nothing that matters is cut"),
        ),
    )


def policy_did_not_move(run: RunLog) -> Diagnosis | None:
    """DPO: chosen and rejected responses are as likely as at the start."""
    chosen, rejected, loss = run.trend("chosen_reward"), run.trend("rejected_reward"), run.trend("loss")
    if chosen is None or rejected is None:
        return None
    # The change counts: the implicit rewards of losses without a reference do not begin at 0. Noise is that of batches
    # whose rewards differ, so that their mean alone stays where it was.
    if max(max(abs(each.last - each.first), each.noise) for each in (chosen, rejected)) >= UNMOVED:
        return None
    return Diagnosis(
        "policy did not move",
        f"chosen_reward {chosen.course()}, rejected_reward {rejected.course()}"
        + (f", loss {loss.course()}" if loss else ""),
        "The result is the starting policy: the steps are too small, or too few.",
        chosen.span,
        run.advise(("optim.learning_rate", run.scaled("optim.learning_rate", 10), "ten times the step")),
    )


def chosen_falls(run: RunLog) -> Diagnosis | None:
    """DPO: the chosen responses lose more than the margin has gained, so both become unlikely."""
    chosen, margin = run.trend("chosen_reward"), run.trend("margin")
    # The change counts: the implicit rewards of losses without a reference do not begin at 0.
    if chosen is None or margin is None or chosen.first - chosen.last <= max(margin.last - margin.first, 1.0):
        return None
    return Diagnosis(
        "chosen responses become unlikely",
        f"chosen_reward {chosen.course()} while margin {margin.course()}",
        "The pairs are told apart by making both responses unlikely; the probability goes to texts that nobody judged.",
        chosen.span,
        run.advise(
            ("sft_coef", 0.2, "keeps the chosen responses likely"),
            ("beta", run.scaled("beta", 2, 0.1), "a stronger pull to the reference"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 0.5), "half the step"),
        ),
    )


def scores_tied(run: RunLog) -> Diagnosis | None:
    """A reward model scores the two responses of many pairs alike."""
    ties = run.trend("ties")
    if ties is None or ties.last <= TIED:
        return None
    return Diagnosis(
        "scores tied",
        f"ties {ties.course()}",
        "Both responses look the same to the model: what differs is cut off, or its head has not begun to learn.",
        ties.span,
        run.advise(
            ("data.max_length", int(run.number("data.max_length", 512)) * 2, "what differs is not cut"),
            ("optim.learning_rate", run.scaled("optim.learning_rate", 5), "five times the step"),
        ),
    )


Symptom = Callable[[RunLog], Diagnosis | None]
EVERY_STAGE: tuple[Symptom, ...] = (overflow, gradient_spikes)
SUPERVISED: tuple[Symptom, ...] = (loss_rises, loss_flat, overfitting)
PREFERENCES: tuple[Symptom, ...] = (preferences_not_learned, overfitting, loss_rises)

"""`alignment doctor --run DIR`: the symptoms that each stage is examined for, and their report as text or JSON."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import yaml

from alignment.evaluation.diagnosis import loss_symptoms as loss
from alignment.evaluation.diagnosis import rollout_symptoms as rollout
from alignment.evaluation.diagnosis.loss_symptoms import EVERY_STAGE, PREFERENCES, SUPERVISED, Symptom
from alignment.evaluation.diagnosis.run_log import ENOUGH, Diagnosis, RunLog

SAMPLED: tuple[Symptom, ...] = (  # what would explain the others comes first
    rollout.sampler_mismatch,
    rollout.kl_negative,
    rollout.update_too_large,
    rollout.update_too_small,
    rollout.critic_lost,
    rollout.score_flat,
    rollout.one_sided_reward,
    rollout.over_optimization,
    rollout.length_hacking,
    rollout.missing_ends,
    rollout.empty_responses,
    rollout.collapse,
    rollout.kl_runaway,
    rollout.alignment_tax,
)
SYMPTOMS: dict[str, tuple[Symptom, ...]] = {
    "ppo": SAMPLED,
    "online_dpo": (*SAMPLED, rollout.no_pairs, loss.policy_did_not_move),
    "dpo": (loss.policy_did_not_move, *PREFERENCES, loss.chosen_falls),
    "reward": (*PREFERENCES, loss.scores_tied),
}


def symptoms_of(stage: str) -> tuple[Symptom, ...]:
    """What a stage's runs are examined for."""
    return (*EVERY_STAGE, *SYMPTOMS.get(stage, SUPERVISED))


def diagnose(run: RunLog) -> list[Diagnosis]:
    """What is wrong with a run; what would explain the others comes first."""
    return [found for symptom in symptoms_of(run.stage) if (found := symptom(run)) is not None]


def updates(run: RunLog) -> int:
    """Logged updates or iterations."""
    return max(map(len, run.series.values()), default=0)


def report_lines(name: str, run: RunLog, findings: Sequence[Diagnosis], width: int = 100) -> Iterator[str]:
    """The report as lines of text.

    Args:
        name: of the run.
    """
    count = updates(run)
    yield f"{name}: {run.stage}, {count} updates logged"
    if count < ENOUGH:
        yield f"fewer than {ENOUGH} updates: no trend is judged yet"
    if not findings:
        names = ", ".join(symptom.__name__.replace("_", " ") for symptom in symptoms_of(run.stage))
        yield from textwrap.wrap(f"none of the usual failures found; examined for: {names}", width)
    for number, found in enumerate(findings, 1):
        yield ""
        yield f"{number}. {found.symptom} (steps {found.steps[0]} to {found.steps[1]})"
        yield from _entry("evidence", found.evidence, width)
        yield from _entry("cause", found.cause, width)
        for line, each in enumerate(found.settings):
            now = "null" if each.now is None else _value(each.now)
            change = f"{each.key}={_value(each.value)} (now {now}): {each.why}"
            yield from _entry("" if line else "try", change, width)


def _value(value: object) -> str:
    """A setting's value as it is written in `key=value`; of a long list its last entry."""
    if isinstance(value, list) and len(value) > 1:
        return f"[..., {_value(value[-1])}]"
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _entry(title: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=f"   {title:10s}", subsequent_indent=" " * 13, break_on_hyphens=False
    )


def report_json(name: str, run: RunLog, findings: Sequence[Diagnosis]) -> dict[str, object]:
    """The report for machines."""
    return {"run": name, "stage": run.stage, "updates": updates(run), "findings": [asdict(found) for found in findings]}

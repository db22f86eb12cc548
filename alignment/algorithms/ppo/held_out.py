"""Held-out prompts of a PPO run, who judges responses to them, and what the starting policy's were worth.

Source: how far to optimize against a learned reward: Gao et al. 2023, arXiv:2210.10760; ensembles as judges: Coste et al.
    2023, arXiv:2310.02743.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from alignment.data.examples import PromptExample
from alignment.errors import UserError
from alignment.generation import SamplingConfig
from alignment.rewards.combine import ScoreFunction


class SavedHeldOut(TypedDict):
    """What `HeldOut.restore` needs."""

    start_scores: list[float]
    ended_by: str


@dataclass
class HeldOut:
    """Held-out prompts and their judge, with what evaluations leave for later ones.

    Attributes:
        prompts: all of them.
        score: the judge; the numbers of several rewards are neither normalized nor clipped.
        sampling: how responses are drawn, with a seed of their own.
        kl_budget: nats per response; None: any KL.
        start_scores: of the starting policy's responses, in the order of the prompts; empty before the first evaluation.
        ended_by: why the run ends; empty while it goes on.
    """

    prompts: Sequence[PromptExample]
    score: ScoreFunction
    sampling: SamplingConfig
    kl_budget: float | None = None
    start_scores: Sequence[float] = ()
    ended_by: str = ""

    def take_in(self, scores: Sequence[float], kl: float, step: int) -> dict[str, float]:
        """Metrics of an evaluation after `step` iterations; decides whether the KL budget is spent.

        Args:
            scores: of the responses to all prompts; not a number: there is none, and no mean counts the prompt.
            kl: mean KL of a response from the reference, nats.

        Raises:
            UserError: no response has a score.
        """
        if not self.start_scores:
            self.start_scores = list(scores)
        if self.kl_budget is not None and kl > self.kl_budget:
            self.ended_by = (
                f"held_out_kl is {kl:.4g} nats after iteration {step}, above held_out.kl_budget ({self.kl_budget:g})"
            )
        known = [score for score in scores if not math.isnan(score)]
        if not known:
            raise UserError("held_out: no response to a held-out prompt has a score; check who scores them")
        return {
            "held_out_score": sum(known) / len(known),
            "held_out_win_rate": share_won(scores, self.start_scores),
            "held_out_kl": kl,
        }

    def state(self) -> SavedHeldOut:
        """What `restore` needs, JSON-like."""
        return {"start_scores": list(self.start_scores), "ended_by": self.ended_by}

    def restore(self, saved: SavedHeldOut) -> None:
        """Go on from what `state` returned."""
        self.start_scores, self.ended_by = saved["start_scores"], saved["ended_by"]


def share_won(scores: Sequence[float], others: Sequence[float]) -> float:
    """Share of prompts with two scores at which one is above the other one's; equal ones count half. 0.5 without any."""
    pairs = [pair for pair in zip(scores, others, strict=True) if not any(map(math.isnan, pair))]
    won = sum(1.0 if score > other else 0.5 if score == other else 0.0 for score, other in pairs)
    return won / len(pairs) if pairs else 0.5

"""The state that an iteration of sampling and learning reads and changes, and the part that a checkpoint keeps."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from torch import Tensor

from alignment.algorithms.policies import Policy, Reference, Role
from alignment.algorithms.rollouts.alarms import Alarms
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.rollouts.servers import ServerSampler
from alignment.data.batches import Example
from alignment.errors import UserError
from alignment.generation import Generation, SamplingConfig
from alignment.ragged import Ragged, Sharing
from alignment.rewards.combine import Rewards, ScoreFunction
from alignment.training import Engine
from alignment.training.distributed import ProcessGroup

Saved = Mapping[str, Any]  # JSON-like values from a checkpoint, its `step` among them
MetricFn = Callable[[Sequence[str], Sequence[str]], Sequence[float]]  # prompts, responses -> one number for each


# Samples that wait for the next iteration


@dataclass(frozen=True)
class SampledResponses:
    """This rank's responses to the prompts of an iteration, before any network is asked about them."""

    prompts: list[Example]  # of each response
    numbers: list[int]  # global number of each response over the whole run, ascending
    drawn: Generation | Future[Generation]  # of a server's the promise

    @property
    def responses(self) -> Generation:
        """Token ids, log-probabilities in the distribution that they were drawn from, and ends."""
        return self.drawn.result() if isinstance(self.drawn, Future) else self.drawn


@dataclass
class NextRollout:
    """Responses that are sampled one iteration before the policy learns from them.

    Attributes:
        prompts_of: prompts of an iteration, of all ranks; none after the last iteration.
        waiting: responses of the next iteration; None: they are not drawn yet.
    """

    prompts_of: Callable[[int], Sequence[Example]]
    waiting: SampledResponses | None = None

    def state(self, group: ProcessGroup) -> list[tuple[int, list[int], list[float], bool]] | None:
        """Number, tokens, log-probabilities and end of the waiting responses of all ranks; a collective operation."""
        if self.waiting is None:
            return None
        drawn = self.waiting.responses
        local = list(zip(self.waiting.numbers, drawn.token_ids, drawn.log_probs, drawn.ended, strict=True))
        return sorted((row for part in group.gather_objects(local) for row in part), key=lambda row: row[0])

    def restore(
        self, saved: Sequence[tuple[int, list[int], list[float], bool]] | None, step: int, group: ProcessGroup
    ) -> None:
        """Go on with iteration `step` from what `state` returned; the number of ranks may be another one."""
        self.waiting = None
        if saved is not None:
            prompts = self.prompts_of(step)
            count = len(saved) // len(prompts)  # responses to each prompt, side by side
            local = [row for row in range(len(saved)) if row // count % group.size == group.rank]
            numbers, *columns = (list(column) for column in zip(*(saved[row] for row in local), strict=True))
            self.waiting = SampledResponses([prompts[row // count] for row in local], numbers, Generation([], *columns))


# Held-out prompts


@dataclass
class HeldOut:
    """Held-out prompts and their judge, with what evaluations leave for later ones.

    Attributes:
        prompts: all of them.
        score: the judge; the numbers of several rewards are neither normalized nor clipped.
        sampling: how responses are drawn, with a seed of their own.
        kl_budget: nats per response; None: any KL.
        start_scores: of the starting policy's responses, in the order of the prompts; empty before the first
            evaluation.
        ended_by: why the run ends; empty while it goes on.
    """

    prompts: Sequence[Example]
    score: ScoreFunction
    sampling: SamplingConfig
    kl_budget: float | None = None
    start_scores: Sequence[float] = ()
    ended_by: str = ""

    def add(self, scores: Sequence[float], kl: float, step: int) -> dict[str, float]:
        """Metrics of an evaluation after `step` iterations; decides whether the KL budget is spent."""
        self.start_scores = self.start_scores or list(scores)
        if self.kl_budget is not None and kl > self.kl_budget:
            self.ended_by = (
                f"held_out_kl is {kl:.4g} nats after iteration {step}, above held_out.kl_budget ({self.kl_budget:g})"
            )
        known = [score for score in scores if not math.isnan(score)]
        if not known:
            raise UserError("held_out: no response to a held-out prompt has a score; check who scores them")
        won = win_share(scores, self.start_scores)
        return {"held_out_score": sum(known) / len(known), "held_out_win_rate": won, "held_out_kl": kl}


def win_share(scores: Sequence[float], others: Sequence[float]) -> float:
    """Share of prompts with two scores at which `scores` is above `others`; equal ones count half. 0.5 without any."""
    pairs = [pair for pair in zip(scores, others, strict=True) if not any(map(math.isnan, pair))]
    won = sum(1.0 if score > other else 0.5 if score == other else 0.0 for score, other in pairs)
    return won / len(pairs) if pairs else 0.5


# The state


@dataclass
class SamplingState:
    """State of a run that samples, scores and learns.

    Attributes:
        policy: its engine.
        score: a judge of prompts and responses, token ids: gives their scores [B] (not a number: could not judge), or
            `Scores` with the parts of several rewards. PPO's is called once for each rollout, by every rank.
        stop_ids: tokens that end a response.
        start: the policy as it was loaded, for saving it, with its tokenizer.
        reference: log-probabilities without gradients; None where nothing is compared with it.
        metrics: functions of prompts and responses whose means are logged, by name.
        rollout_weights: how the policy's weights lie while it samples.
        roles: the networks, for notes on their memory.
        share_prompts: True where a prompt with several responses is computed once for all of them.
        logged_samples: responses of each iteration that are written to samples.jsonl.
        held_out: prompts that are scored during the run, and their judge.
        alarms: of collapse, over the metrics of the run; None: the method has none.
        ahead: responses that are sampled one iteration ahead (`rollouts_behind`).
        servers: that sample; None: this process does.
        cuda_graphs: as in `DecodingEngine`.
    """

    policy: Engine
    _: KW_ONLY
    score: ScoreFunction
    stop_ids: Sequence[int]
    start: Policy
    reference: Reference | None = None
    metrics: dict[str, MetricFn] = field(default_factory=dict)
    rollout_weights: Literal["gathered", "sharded"] = "gathered"
    roles: Sequence[Role] = ()
    share_prompts: Sharing = False
    logged_samples: int = 2
    held_out: HeldOut | None = None
    alarms: Alarms | None = None
    ahead: NextRollout | None = None
    servers: ServerSampler | None = None
    cuda_graphs: bool = False

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines that train, by the names of their checkpoints."""
        return {"policy": self.policy}

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that train together."""
        return self.policy.process_group

    def ask(self, batch: Ragged, config: SamplingSettings) -> dict[str, Tensor]:
        """Numbers that the networks give for each response token of a batch, [M]: the reference's log-probabilities."""
        if self.reference is None or config.samples_differ:
            return {}
        return {"reference_log_probs": self.reference(batch=batch, temperature=config.temperature).log_probs}

    def saved(self) -> dict[str, object]:
        """The state for `restore`, JSON-like; a collective operation."""
        saved: dict[str, object] = {"rewards": self.score.state()} if isinstance(self.score, Rewards) else {}
        if self.alarms is not None:
            saved["alarms"] = vars(self.alarms)
        if self.held_out is not None:
            saved["held_out"] = {"start_scores": list(self.held_out.start_scores), "ended_by": self.held_out.ended_by}
        if self.ahead is not None:
            saved["ahead"] = self.ahead.state(self.process_group)
        return saved

    def restore(self, saved: Saved) -> None:
        """Go on from what `saved` returned, and the `step` after which that was."""
        if isinstance(self.score, Rewards):
            self.score.load(saved.get("rewards") or {})
        if self.alarms is not None:
            self.alarms = Alarms(**saved["alarms"])
        if self.held_out is not None:
            vars(self.held_out).update(saved["held_out"])
        if self.ahead is not None:
            self.ahead.restore(saved.get("ahead"), saved["step"], self.process_group)

"""Samples: this rank's responses to the prompts of an iteration, and how a checkpoint keeps those not yet learned from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from alignment.data.examples import PromptExample
from alignment.generation import Responses
from alignment.training.distributed import ProcessGroup


@dataclass(frozen=True)
class DrawnResponses:
    """This rank's responses to the prompts of an iteration, before any network is asked about them.

    Attributes:
        prompts: of each response.
        numbers: global number of each response over the whole run, ascending.
        responses: token ids, log-probabilities in the distribution that they were drawn from, and ends.
    """

    prompts: list[PromptExample]
    numbers: list[int]
    responses: Responses


class SavedResponses(TypedDict):
    """The responses of all ranks to the prompts of an iteration in the order of their numbers, as a checkpoint keeps them."""

    numbers: list[int]
    token_ids: list[list[int]]
    log_probs: list[list[float]]
    ended: list[bool]


@dataclass
class SampledAhead:
    """Responses that are sampled one iteration before the policy learns from them.

    Attributes:
        prompts_of: prompts of an iteration, of all ranks; none after the last iteration.
        waiting: responses of the next iteration; None: they are not drawn yet.
    """

    prompts_of: Callable[[int], Sequence[PromptExample]]
    waiting: DrawnResponses | None = None

    def state(self, group: ProcessGroup) -> SavedResponses | None:
        """What `restore` needs, JSON-like; a collective operation."""
        return None if self.waiting is None else save_samples(self.waiting, group)

    def restore(self, saved: SavedResponses | None, step: int, group: ProcessGroup) -> None:
        """Go on with iteration `step` from what `state` returned."""
        self.waiting = None if saved is None else restore_samples(saved, self.prompts_of(step), group)


def save_samples(samples: DrawnResponses, group: ProcessGroup) -> SavedResponses:
    """The responses of all ranks in the order of their numbers, JSON-like; a collective operation."""
    drawn = samples.responses
    own = list(zip(samples.numbers, drawn.token_ids, drawn.log_probs, drawn.ended, strict=True))
    rows = sorted((row for part in group.gather_objects(own) for row in part), key=lambda row: row[0])
    return {
        "numbers": [row[0] for row in rows],
        "token_ids": [row[1] for row in rows],
        "log_probs": [row[2] for row in rows],
        "ended": [row[3] for row in rows],
    }


def restore_samples(saved: SavedResponses, prompts: Sequence[PromptExample], group: ProcessGroup) -> DrawnResponses:
    """This rank's part of what `save_samples` returned; the number of ranks may be another one.

    Args:
        prompts: of the iteration, of all ranks; each has equally many responses, side by side.
    """
    count = len(saved["numbers"]) // len(prompts)
    own = [row for row in range(len(saved["numbers"])) if row // count % group.size == group.rank]
    responses = Responses(
        [saved["token_ids"][row] for row in own],
        [saved["log_probs"][row] for row in own],
        [saved["ended"][row] for row in own],
    )
    return DrawnResponses([prompts[row // count] for row in own], [saved["numbers"][row] for row in own], responses)

"""The part of a rollout that rewards read: prompts as written, responses as texts, and the rows' further columns."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alignment.data.examples import Example
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.generation import response_text

if TYPE_CHECKING:
    from alignment.data.rows.records import Messages


@dataclass(frozen=True)
class SampledTexts:
    """N responses and what belongs to each.

    Attributes:
        prompts: text or messages, as they were read.
        responses: texts without their end token.
        columns: the further columns of each prompt's row.
        lengths: tokens of each response, its end token included.
        row_ids: name of each prompt's row, for messages.
        failures: why responses got no number, with counts; a reward that fails to give one adds its reason.
    """

    prompts: "Sequence[str | Messages]"
    responses: Sequence[str]
    columns: Sequence[Mapping[str, object]] = ()
    lengths: Sequence[int] = ()
    row_ids: Sequence[str] = field(default=())
    failures: Counter[str] = field(default_factory=Counter)

    def column(self, name: str) -> list[object]:
        """A column of all rows; None where a row lacks it."""
        return [row.get(name) for row in self.columns]


TextReward = Callable[[SampledTexts], Sequence[float | None]]
"""Sampled texts -> one number for each; None: the reward does not apply to this response, or could not be given."""


def texts_of_responses(
    tokenizer: Tokenizer,
    prompts: Sequence[Example],
    responses: Sequence[Sequence[int]],
    ended: Sequence[bool],
) -> SampledTexts:
    """Responses in token ids as texts, with prompts and columns.

    Args:
        tokenizer: the policy's.
        prompts: of each response.
        responses: token ids.
        ended: True where the response stopped by itself.
    """
    return SampledTexts(
        [prompt.prompt for prompt in prompts],
        [response_text(tokenizer, ids, end) for ids, end in zip(responses, ended, strict=True)],
        [prompt.extra for prompt in prompts],
        [len(ids) for ids in responses],
        [prompt.row_id for prompt in prompts],
    )

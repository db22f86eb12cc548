"""Records to token sequences of limited length, and these to ragged micro-batches. Every drop and cut is counted.

Nothing is cached on disk: ids always come from the tokenizer and the rows at hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from alignment.data.rows.records import SHOWN_IDS, Comparison, Demonstration, Messages, Prompt, Tally, Text
from alignment.data.text import chat
from alignment.data.text.encoding import adds_bos, bos_id
from alignment.errors import UserError, raise_all
from alignment.ragged import Ragged, RaggedBatch, fill_groups

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_FLOOR = 0.25  # share of max_length a long prompt keeps, however long the response is

PROMPT_CUT = "prompt longer than fits: its beginning cut off"
RESPONSE_CUT = "response longer than fits: its end cut off, with the end token"
TEXT_CUT = "text longer than max_length: cut into successive pieces"
EMPTY = "response is nothing but the end token"
EQUAL = "chosen and rejected are the same tokens"

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Example:
    """One token sequence; `mask` is True where a token is to be predicted and counts."""

    ids: list[int]
    mask: list[bool]
    row_id: str


@dataclass(frozen=True, slots=True)
class PairExample:
    """Two responses to the same prompt tokens."""

    chosen: Example
    rejected: Example
    margin: float | None
    row_id: str


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A prompt ready to be continued; `prompt` and `extra` as they were read, `cut` where `ids` lack its beginning."""

    ids: list[int]
    prompt: str | Messages
    extra: dict[str, Any]
    row_id: str
    cut: bool = False


@dataclass(frozen=True)
class PairBatch(RaggedBatch):
    """B pairs as 2B documents: all chosen, then all rejected in the same order. Its weight is B."""

    margins: Tensor | None  # [B]; None where no row has one


def tokenize_texts(
    rows: Sequence[Text], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> tuple[list[Example], Tally]:
    """Documents to model, each at most `max_length` tokens; every token but a text's first is predicted exactly once.

    A longer text is cut into successive pieces. A piece after the first starts with the BOS where the tokenizer has
    one, else with the last token of the piece before: its first new token needs something to be predicted from.
    """
    counts, examples = Tally(rows=len(rows), kept=len(rows)), []
    bos = bos_id(tokenizer) if adds_bos(tokenizer) else None
    for row, ids in zip(rows, chat.texts_ids(tokenizer, [row.text for row in rows]), strict=True):
        if len(ids) > max_length:
            counts.shorten(TEXT_CUT, row.row_id)
        examples += [Example(piece, [True] * len(piece), row.row_id) for piece in pieces(ids, max_length, bos)]
    return examples, _measure(counts, examples)


def pieces(ids: list[int], max_length: int, bos: int | None) -> list[list[int]]:
    """Successive pieces of at most `max_length` >= 2 ids, the later ones led in by `bos` or the token before."""
    cut = [ids[:max_length]]
    for start in range(max_length, len(ids), max_length - 1):
        lead = ids[start - 1] if bos is None else bos
        cut.append([lead, *ids[start : start + max_length - 1]])
    return cut


def tokenize_demonstrations(
    rows: Sequence[Demonstration], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> tuple[list[Example], Tally]:
    """Prompt and response joined; the response and its end token count, in dialogues every assistant turn.

    Raises:
        UserError: the chat template is missing or refuses rows; all refusals at once.
    """
    counts, examples = Tally(rows=len(rows)), []
    bos = bos_id(tokenizer)
    single = [row for row in rows if row.messages is None]
    prompts = iter(encode_prompts(tokenizer, single))
    responses = iter(chat.responses_ids(tokenizer, [row.response for row in single], [row.prompt for row in single]))
    dialogues = iter(
        _each(
            [row for row in rows if row.messages],
            lambda row: chat.chat_ids(tokenizer, row.messages or [], row.trained),
        )
    )
    for row in rows:
        if row.messages is None:
            head, tail = next(prompts), next(responses)
            mask = [False] * len(head) + [True] * len(tail)
        else:
            ids, mask = next(dialogues)
            start = last_span(mask)
            head, tail = ids[:start], ids[start:]
        if len(tail) < 2:
            counts.drop(EMPTY, row.row_id)
            continue
        kept_head, [kept_tail] = fit(head, [tail], max_length, bos)
        _note_cuts(counts, row.row_id, len(head) > len(kept_head), len(tail) > len(kept_tail))
        kept_mask = truncate_left(mask[: len(head)], len(kept_head), head[:1] == [bos]) + [True] * len(kept_tail)
        examples.append(Example(kept_head + kept_tail, kept_mask, row.row_id))
    counts.kept = len(examples)
    return examples, _measure(counts, examples)


def tokenize_comparisons(
    rows: Sequence[Comparison], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> tuple[list[PairExample], Tally]:
    """Both responses after the very same prompt tokens; pairs whose tokens are equal in the end are dropped."""
    counts, pairs = Tally(rows=len(rows)), []
    prompts = encode_prompts(tokenizer, rows)
    sides = [(text, row.prompt) for row in rows for text in (row.chosen, row.rejected)]
    responses = chat.responses_ids(tokenizer, [text for text, _ in sides], [prompt for _, prompt in sides])
    for row, head, chosen, rejected in zip(rows, prompts, responses[::2], responses[1::2], strict=True):
        kept_head, tails = fit(head, [chosen, rejected], max_length, bos_id(tokenizer))
        if min(len(chosen), len(rejected)) < 2:
            counts.drop(EMPTY, row.row_id)
        elif tails[0] == tails[1]:
            counts.drop(EQUAL, row.row_id)
        else:
            cut = max(len(chosen), len(rejected)) > max(map(len, tails))
            _note_cuts(counts, row.row_id, len(head) > len(kept_head), cut)
            first, second = (
                Example(kept_head + tail, [False] * len(kept_head) + [True] * len(tail), row.row_id) for tail in tails
            )
            pairs.append(PairExample(first, second, row.margin, row.row_id))
    counts.kept = len(pairs)
    return pairs, _measure(counts, [side for pair in pairs for side in (pair.chosen, pair.rejected)])


def tokenize_prompts(
    rows: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> tuple[list[PromptExample], Tally]:
    """Prompts of at most `max_length` tokens, longer ones without their beginning (the BOS stays)."""
    counts, examples = Tally(rows=len(rows), kept=len(rows)), []
    for row, ids in zip(rows, encode_prompts(tokenizer, rows), strict=True):
        kept = truncate_left(ids, max_length, ids[:1] == [bos_id(tokenizer)])
        cut = len(ids) > len(kept)
        _note_cuts(counts, row.row_id, cut, False)
        examples.append(PromptExample(kept, row.prompt, row.extra, row.row_id, cut))
    return examples, _measure(counts, examples)


def encode_prompts(
    tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Demonstration | Comparison | Prompt]
) -> list[list[int]]:
    """Prompt ids of each row: plain texts in one go, messages through the template one by one."""
    texts = iter(chat.prompts_ids(tokenizer, [row.prompt for row in rows if isinstance(row.prompt, str)]))
    dialogues = [row for row in rows if not isinstance(row.prompt, str)]
    rendered = iter(_each(dialogues, lambda row: chat.prompt_ids(tokenizer, row.prompt)))
    return [next(texts) if isinstance(row.prompt, str) else next(rendered) for row in rows]


def _each(rows: Sequence[Row], encode: Callable[[Row], Any]) -> list[Any]:
    """`encode` of each row; what it refuses is reported for all rows at once, the same refusal once with its rows."""
    done: list[Any] = []
    refused: dict[str, list[str]] = {}
    for row in rows:
        try:
            done.append(encode(row))
        except UserError as error:
            refused.setdefault(str(error), []).append(row.row_id)  # type: ignore[attr-defined]
    raise_all(f"{names[0]}: {why}{_more(names[1:])}" for why, names in refused.items())
    return done


def _more(row_ids: Sequence[str]) -> str:
    """That other rows share a fault, and the names of the first few."""
    shown = ", ".join(row_ids[: SHOWN_IDS - 1]) + (", ..." if len(row_ids) >= SHOWN_IDS else "")
    return f" (likewise {len(row_ids)} more: {shown})" if row_ids else ""


def fit(
    prompt: list[int], responses: list[list[int]], max_length: int, bos: int | None
) -> tuple[list[int], list[list[int]]]:
    """Prompt and responses cut so that the prompt with each response has at most `max_length` tokens.

    The prompt gives way first, from its beginning, down to `PROMPT_FLOOR` of the length; then responses lose their
    ends. All responses keep the same prompt, and each keeps at least one token (`max_length` >= 2).
    """
    longest = max(map(len, responses))
    floor = min(len(prompt), max(1, int(max_length * PROMPT_FLOOR)))
    room = min(len(prompt), max(floor, max_length - longest))
    return truncate_left(prompt, room, prompt[:1] == [bos]), [response[: max_length - room] for response in responses]


def truncate_left(values: list[Any], length: int, keep_first: bool) -> list[Any]:
    """The last `length` values; with `keep_first` (a BOS) the first and the last `length - 1`."""
    if len(values) <= length:
        return values
    lead = values[:1] if keep_first else []
    return lead + values[len(values) - (length - len(lead)) :]  # counted from the front: [-0:] would be everything


def last_span(mask: Sequence[bool]) -> int:
    """Where the last unbroken run of True begins, in a mask that ends with True."""
    return max((index + 1 for index, counts in enumerate(mask) if not counts), default=0)


def _note_cuts(counts: Tally, row_id: str, prompt: bool, response: bool) -> None:
    if prompt:
        counts.shorten(PROMPT_CUT, row_id)
    if response:
        counts.shorten(RESPONSE_CUT, row_id)


def _measure(counts: Tally, examples: Sequence[Example | PromptExample]) -> Tally:
    counts.documents = len(examples)
    counts.tokens = sum(len(example.ids) for example in examples)
    return counts


def collate(examples: Sequence[Example], micro_batch_tokens: int) -> list[Ragged]:
    """Ragged batches of at most `micro_batch_tokens` tokens each; a longer document stands alone.

    Documents of similar length come together, which costs attention the least. The weight is the number of targets.
    """
    return [
        Ragged.build(
            [example.ids for example in group],
            [example.mask for example in group],
            row_ids=[example.row_id for example in group],
        )
        for group in _longest_first(examples, [(len(example.ids),) for example in examples], micro_batch_tokens)
    ]


def collate_pairs(pairs: Sequence[PairExample], micro_batch_tokens: int) -> list[PairBatch]:
    """Pair batches of at most `micro_batch_tokens` tokens each, both sides together; a longer pair stands alone."""
    lengths = [(len(pair.chosen.ids), len(pair.rejected.ids)) for pair in pairs]
    return [_pair_batch(group) for group in _longest_first(pairs, lengths, micro_batch_tokens)]


def _pair_batch(pairs: Sequence[PairExample]) -> PairBatch:
    sides = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    ragged = Ragged.build(
        [side.ids for side in sides],
        [side.mask for side in sides],
        weight=len(pairs),
        row_ids=[side.row_id for side in sides],
    )
    margins = [pair.margin for pair in pairs]
    if all(margin is None for margin in margins):
        return PairBatch(ragged, None)
    return PairBatch(ragged, torch.tensor([margin or 0.0 for margin in margins]))  # no margin: a plain comparison


def _longest_first(rows: Sequence[Row], lengths: Sequence[tuple[int, ...]], limit: int) -> list[list[Row]]:
    """Rows from long to short by their longest document (equal ones in their order), in groups of `limit` tokens."""
    order = sorted(range(len(rows)), key=lambda number: -max(lengths[number]))
    return [[rows[number] for number in group] for group in fill_groups(order, [sum(each) for each in lengths], limit)]

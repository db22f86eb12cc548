"""Records to token sequences of limited length; every drop and cut is counted. Batches are made in batches.py.

Nothing is cached on disk: ids always come from the tokenizer and the rows at hand.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from alignment.data.examples import Example, PairExample, PromptExample
from alignment.data.rows.records import SHOWN_IDS, Comparison, Demonstration, Prompt, Tally, Text
from alignment.data.text import chat
from alignment.data.text.truncation import split_document, truncate, truncate_left
from alignment.data.tokenizers.tokenizer import Tokenizer, adds_bos, bos_id
from alignment.errors import UserError, raise_all

PROMPT_CUT = "prompt longer than fits: its beginning cut off"
RESPONSE_CUT = "response longer than fits: its end cut off, with the end token"
TEXT_CUT = "text longer than max_length: cut into successive pieces"
EMPTY = "response is nothing but the end token"
EQUAL = "chosen and rejected are the same tokens"

AnyRow = TypeVar("AnyRow", bound=Demonstration | Comparison | Prompt)
Encoded = TypeVar("Encoded")


def tokenize_texts(rows: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Documents to model, each at most `max_length` tokens; every token but a text's first is predicted exactly once.

    A longer text is cut into successive pieces. A piece after the first starts with the BOS where the tokenizer has
    one, else with the last token of the piece before: its first new token needs something to be predicted from.
    """
    counts, examples = Tally(rows=len(rows), kept=len(rows)), []
    bos = bos_id(tokenizer) if adds_bos(tokenizer) else None
    for row, ids in zip(rows, chat.texts_ids(tokenizer, [row.text for row in rows]), strict=True):
        if len(ids) > max_length:
            counts.note_cut(TEXT_CUT, row.row_id)
        examples += [Example(piece, [True] * len(piece), row.row_id) for piece in split_document(ids, max_length, bos)]
    return examples, counts.with_documents(example.ids for example in examples)


def tokenize_demonstrations(
    rows: Sequence[Demonstration], tokenizer: Tokenizer, max_length: int
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
        kept_head, [kept_tail] = truncate(head, [tail], max_length, bos)
        _note_cuts(counts, row.row_id, len(head) > len(kept_head), len(tail) > len(kept_tail))
        kept_mask = truncate_left(mask[: len(head)], len(kept_head), head[:1] == [bos]) + [True] * len(kept_tail)
        examples.append(Example(kept_head + kept_tail, kept_mask, row.row_id))
    counts.kept = len(examples)
    return examples, counts.with_documents(example.ids for example in examples)


def tokenize_comparisons(
    rows: Sequence[Comparison], tokenizer: Tokenizer, max_length: int
) -> tuple[list[PairExample], Tally]:
    """Both responses after the very same prompt tokens; pairs whose tokens are equal in the end are dropped."""
    counts, pairs = Tally(rows=len(rows)), []
    prompts = encode_prompts(tokenizer, rows)
    sides = [(text, row.prompt) for row in rows for text in (row.chosen, row.rejected)]
    responses = chat.responses_ids(tokenizer, [text for text, _ in sides], [prompt for _, prompt in sides])
    for row, head, chosen, rejected in zip(rows, prompts, responses[::2], responses[1::2], strict=True):
        kept_head, tails = truncate(head, [chosen, rejected], max_length, bos_id(tokenizer))
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
    return pairs, counts.with_documents(ids for pair in pairs for ids in pair.documents)


def tokenize_prompts(
    rows: Sequence[Prompt], tokenizer: Tokenizer, max_length: int
) -> tuple[list[PromptExample], Tally]:
    """Prompts of at most `max_length` tokens, longer ones without their beginning (the BOS stays)."""
    counts, examples = Tally(rows=len(rows), kept=len(rows)), []
    for row, ids in zip(rows, encode_prompts(tokenizer, rows), strict=True):
        kept = truncate_left(ids, max_length, ids[:1] == [bos_id(tokenizer)])
        cut = len(ids) > len(kept)
        _note_cuts(counts, row.row_id, cut, False)
        examples.append(PromptExample(kept, row.prompt, row.extra, row.row_id, cut))
    return examples, counts.with_documents(example.ids for example in examples)


def encode_prompts(tokenizer: Tokenizer, rows: Sequence[Demonstration | Comparison | Prompt]) -> list[list[int]]:
    """Prompt ids of each row: plain texts in one go, messages through the template one by one."""
    texts = iter(chat.prompts_ids(tokenizer, [row.prompt for row in rows if isinstance(row.prompt, str)]))
    dialogues = [row for row in rows if not isinstance(row.prompt, str)]
    rendered = iter(_each(dialogues, lambda row: chat.prompt_ids(tokenizer, row.prompt)))
    return [next(texts) if isinstance(row.prompt, str) else next(rendered) for row in rows]


def _each(rows: Sequence[AnyRow], encode: Callable[[AnyRow], Encoded]) -> list[Encoded]:
    """`encode` of each row; what it refuses is reported for all rows at once, the same refusal once with its rows."""
    done: list[Encoded] = []
    refused: dict[str, list[str]] = {}
    for row in rows:
        try:
            done.append(encode(row))
        except UserError as error:
            refused.setdefault(str(error), []).append(row.row_id)
    raise_all(f"{names[0]}: {why}{_more(names[1:])}" for why, names in refused.items())
    return done


def _more(row_ids: Sequence[str]) -> str:
    """That other rows share a fault, and the names of the first few."""
    shown = ", ".join(row_ids[: SHOWN_IDS - 1]) + (", ..." if len(row_ids) >= SHOWN_IDS else "")
    return f" (likewise {len(row_ids)} more: {shown})" if row_ids else ""


def last_span(mask: Sequence[bool]) -> int:
    """Where the last unbroken run of True begins, in a mask that ends with True."""
    return max((index + 1 for index, counts in enumerate(mask) if not counts), default=0)


def _note_cuts(counts: Tally, row_id: str, prompt: bool, response: bool) -> None:
    if prompt:
        counts.note_cut(PROMPT_CUT, row_id)
    if response:
        counts.note_cut(RESPONSE_CUT, row_id)
